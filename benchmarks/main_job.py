"""Seconds and peak memory of each stage of the main job on the demo shares, each in a fresh process.

python -m benchmarks.main_job [--quick] [--json]; --quick trains one epoch of ten updates. Installing is not in it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import command_line, show

TARGETS: dict[str, tuple[str, float]] = {"run_s": ("<=", 480.0), "again_s": ("<=", 180.0)}
QUICK = ["--config.epochs", "1", "--config.updates-per-epoch", "10"]


def stage(arguments: list[str], environment: dict[str, str]) -> tuple[dict[str, Any], float, float]:
    """A command's JSON result, its wall seconds and its peak resident MiB (its own and its children's largest)."""
    wrapper = (
        "import resource, runpy, sys\n"
        "sys.argv = ['forecastle', *sys.argv[1:]]\n"
        "try:\n    runpy.run_module('flows', run_name='__main__')\n"
        "finally:\n"
        "    peak = max(resource.getrusage(w).ru_maxrss for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))\n"
        "    print('peak_kib', peak, file=sys.stderr)\n"
    )
    started = time.perf_counter()
    command = [sys.executable, "-c", wrapper, *arguments, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    peak = next(line for line in reversed(done.stderr.splitlines()) if line.startswith("peak_kib"))
    return json.loads(done.stdout), seconds, int(peak.split()[1]) / 1024


def measure(quick: bool) -> dict[str, float]:
    """The benchmark's figures."""
    with tempfile.TemporaryDirectory(prefix="main-job-") as folder:
        home = Path(folder)
        store = (home / "store").as_uri()
        environment = {**os.environ, "HOME": folder, "FORECASTLE_HOME": str(home / "state"), "FORECASTLE_STORE": store}
        environment.pop("PREFECT_API_URL", None)
        from tasks.demo_features import write_demo_features

        started = time.perf_counter()
        write_demo_features(home / "shares")
        rows = [("demo features", time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)]
        ingested, seconds, peak = stage(["ingest", str(home / "shares")], environment)
        rows.append(("ingest", seconds, peak))
        small = QUICK if quick else []
        for family in ("tft", "dqn"):
            command = ["train", family, "--dataset", ingested["dataset"], *small]
            rows.append((f"train {family}", *stage(command, environment)[1:]))
        again = 0.0
        for family in ("tft", "dqn"):
            result, seconds, _ = stage(["train", family, "--dataset", ingested["dataset"], *small], environment)
            if not result["already_trained"]:
                sys.exit(f"{family} was trained twice")
            again += seconds
    figures = {"run_s": sum(s for _, s, _ in rows), "again_s": again, "peak_mib": max(p for *_, p in rows)}
    for name, seconds, peak in rows:
        print(f"{name:15} {seconds:8.1f} s {peak:8.0f} MiB", file=sys.stderr)
    return figures


def main() -> None:
    options = command_line(__doc__, "one epoch of ten updates").parse_args()
    packages = ("torch", "prefect", "duckdb", "pyarrow", "great-expectations", "numpy")
    show("main_job", measure(options.quick), TARGETS, packages, options.json)


if __name__ == "__main__":
    main()
