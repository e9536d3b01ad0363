"""The data gate on generated rows x 228 columns: CPU time of its passes against a bare DuckDB scan; memory at ten times the rows.

python -m benchmarks.ingest [--quick] [--large] [--json]; polars is measured where it is installed.

Sizes are 50,000 and 500,000 rows (--quick: 5,000 and 50,000; --large: 500,000 and 5,000,000), fifty series, one Parquet file per
50,000 rows. Every measurement is a process of its own on the sorted parts that staging has written; they alternate, round by
round; imports are not counted, and of two runs in a process the quicker one counts (`stage` runs once). The bare scan is
DuckDB's sum of every column. `profile` is the gate's pass with all its queries, `quantiles` the same with the sampled quantiles
of drift, `leaks` the leak check, `store` Parquet to the row-major window store, `gate` Great Expectations' suite over the
profile. Peers compute the same counts, minima and maxima of every column: polars by its streaming engine, pandas from a table in
memory. CPU seconds of all threads; peaks are of memory that is the process's own (mapped files and the page cache come back to
the system by themselves), sampled every 10 ms. rss_growth_mib is the largest growth of a stage's peak from the smaller to the
larger size, over_limit_mib the largest peak beyond DuckDB's limit (512 MiB).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command_line, show

LIMIT = 512
FILE_ROWS, SERIES = 50_000, 50
STATIC, PAST, AHEAD = ([f"{k}_{i:03d}" for i in range(n)] for k, n in (("static", 5), ("hist", 210), ("fut", 10)))
TARGETS = {
    "profile_vs_scan": ("<=", 2.0), "quantiles_vs_scan": ("<=", 4.0), "store_vs_scan": ("<=", 2.0),
    "rss_growth_mib": ("<=", 300.0), "over_limit_mib": ("<=", 300.0), "gate_s": ("<=", 2.0),
}  # fmt: skip


def write(folder: Path, rows: int) -> None:
    """Series of equal length, files of FILE_ROWS rows that cut across them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    length = rows // SERIES
    for at in range(0, rows, FILE_ROWS):
        random = np.random.default_rng(at)
        row = np.arange(at, min(at + FILE_ROWS, rows))
        columns: dict[str, Any] = {
            "entity_id": pa.array([f"S{i:03d}" for i in row // length]),
            "timestamp": pa.array((row % length) * 60_000_000, pa.timestamp("us", tz="UTC")),
            "price": np.exp(random.normal(0, 0.001, len(row)).cumsum()),
        }
        columns |= {name: (row // length + i).astype(np.float32) for i, name in enumerate(STATIC)}
        columns |= {name: random.standard_normal(len(row), np.float32) for name in (*PAST, *AHEAD)}
        pq.write_table(pa.table(columns), folder / f"part-{at:08d}.parquet", use_dictionary=["entity_id"])


def contract() -> Any:
    from models.features import FeatureContract

    return FeatureContract(targets=("price",), static=tuple(STATIC), historical=tuple(PAST), future=tuple(AHEAD))


# --- one measurement, in a process of its own ----------------------------------------------------------------------


def stage(folder: Path) -> Callable[[], None]:
    from models.config import IngestConfig
    from tasks.staging import stage_parquet

    config = IngestConfig(memory_limit=f"{LIMIT}MiB", rules={"future_time": "warn"})

    def run() -> None:
        staged = stage_parquet(str(folder / "source"), contract(), config, folder / "staged")
        (folder / "staged.json").write_text(staged.model_dump_json())

    return run


def staged_files(folder: Path) -> Any:
    from tasks.staging import StagedFiles

    return StagedFiles.model_validate_json((folder / "staged.json").read_text())


def scan(folder: Path) -> Callable[[], None]:
    import duckdb

    staged = staged_files(folder)
    columns = ", ".join(f"sum({name})" for name in ("price", *STATIC, *PAST, *AHEAD))

    def run() -> None:
        connection = duckdb.connect(config={"memory_limit": f"{LIMIT}MiB", "threads": staged.config.threads})
        connection.execute("SET enable_progress_bar = false")
        connection.sql(f"SELECT {columns} FROM read_parquet({list(staged.parts)!r})").fetchall()

    return run


def profile(folder: Path) -> Callable[[], None]:
    from tasks import expectations

    staged = staged_files(folder)
    return lambda: print(len(expectations.profile(staged).columns), file=sys.stderr)


def quantiles(folder: Path) -> Callable[[], None]:
    from tasks.drift import quantile_profile

    plain, staged = profile(folder), staged_files(folder)

    def run() -> None:
        plain()
        quantile_profile(staged.parts, staged.contract)

    return run


def leaks(folder: Path) -> Callable[[], None]:
    from tasks.leaks import find_leaks, read_blocks

    staged = staged_files(folder)
    return lambda: print(find_leaks(read_blocks(staged.parts, staged.contract), (*PAST, *AHEAD)), file=sys.stderr)


def gate(folder: Path) -> Callable[[], None]:
    """The suite alone; the profile before it counts elsewhere."""
    from tasks import expectations

    staged = staged_files(folder)
    found = expectations.profile(staged)
    expectations.profile = lambda _: found  # type: ignore[assignment]
    expectations.validate_features(staged)  # imports

    def run() -> None:
        expectations.validate_features(staged)

    return run


def store(folder: Path) -> Callable[[], None]:
    from tasks.series import _read

    staged = staged_files(folder)

    def run() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            _read(staged.parts, staged.contract, staged.rows, 0, Path(place))

    return run


def polars(folder: Path) -> Callable[[], None]:
    import polars as pl

    names = ["price", *STATIC, *PAST, *AHEAD]
    wanted = [
        expression
        for n in names
        for expression in (
            pl.col(n).count().alias(f"{n}:count"), pl.col(n).is_finite().sum().alias(f"{n}:finite"),
            pl.col(n).min().alias(f"{n}:min"), pl.col(n).max().alias(f"{n}:max"),
        )
    ]  # fmt: skip
    parts = staged_files(folder).parts
    return lambda: print(pl.scan_parquet(list(parts)).select(wanted).collect(engine="streaming").width, file=sys.stderr)


def pandas(folder: Path) -> Callable[[], None]:
    import pandas as pd

    parts = staged_files(folder).parts

    def run() -> None:
        table = pd.concat([pd.read_parquet(part) for part in parts], ignore_index=True)
        numbers = table[["price", *STATIC, *PAST, *AHEAD]]
        for summary in (numbers.count(), np.isfinite(numbers).sum(), numbers.min(), numbers.max()):
            assert len(summary) == 226

    return run


MEASURED: dict[str, Callable[[Path], Callable[[], None]]] = {
    "stage": stage, "scan": scan, "profile": profile, "quantiles": quantiles, "leaks": leaks, "gate": gate, "store": store,
    "polars": polars, "pandas": pandas,
}  # fmt: skip


class Peak(threading.Thread):
    """Largest memory of its own that the process has held while the thread ran, in MiB; 0 where the system does not say."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mib = 0.0
        self.ended = threading.Event()

    def run(self) -> None:
        status = Path("/proc/self/status")
        while status.exists() and not self.ended.wait(0.01):
            line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
            self.mib = max(self.mib, int(line.split()[1]) / 1024)


def one(name: str, folder: Path) -> None:
    import duckdb  # noqa: F401  (pyarrow and DuckDB load pandas late)
    import pandas  # noqa: F401
    import pyarrow.compute
    import pyarrow.dataset  # noqa: F401

    run = MEASURED[name](folder)
    peak = Peak()
    peak.start()
    spent: list[tuple[float, float]] = []
    for _ in range(1 if name == "stage" else 2):  # the first time memory is new to the process
        cpu, wall = time.process_time(), time.perf_counter()
        run()
        spent.append((time.process_time() - cpu, time.perf_counter() - wall))
    peak.ended.set()
    peak.join()
    cpu, wall = min(spent)
    print(json.dumps({"cpu": cpu, "wall": wall, "mib": peak.mib}))


# --- all of them ---------------------------------------------------------------------------------------------------


def measured(name: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.ingest", "--one", name, str(folder)]
    environment = {**os.environ, "FORECASTLE_HOME": str(folder / "home"), "POLARS_MAX_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(sizes: list[int], rounds: int) -> dict[str, float]:
    """The figures; the times are told on stderr."""
    figures: dict[str, float] = {}
    peaks: dict[str, list[float]] = {}
    names = [
        name for name in MEASURED if name not in ("stage", "polars") or (name == "polars" and importlib.util.find_spec(name))
    ]
    with tempfile.TemporaryDirectory(prefix="ingest-") as place:
        for rows in sizes:
            folder = Path(place) / str(rows)
            write(folder / "source", rows)
            found = {"stage": [measured("stage", folder)], **{name: [] for name in names}}
            for _ in range(rounds):
                for name in names:
                    found[name].append(measured(name, folder))
            bare = [x["cpu"] for x in found["scan"]]
            ratios = {n: statistics.median(a["cpu"] / b for a, b in zip(found[n], bare, strict=True)) for n in names}
            ratios["stage"] = found["stage"][0]["cpu"] / statistics.median(bare)
            for name, all_of in found.items():
                cpu, peak = statistics.median(x["cpu"] for x in all_of), max(x["mib"] for x in all_of)
                print(f"{rows:9} rows {name:10}{cpu:9.2f} CPU s {ratios[name]:7.2f} x scan {peak:8.0f} MiB", file=sys.stderr)
                peaks.setdefault(name, []).append(peak)
            figures |= {f"{name}_vs_scan": ratios[name] for name in ("profile", "quantiles", "store", "stage", "leaks")}
            figures |= {f"{name}_vs_scan": ratios[name] for name in ("polars", "pandas") if name in ratios}
            figures["gate_s"] = statistics.median(x["cpu"] for x in found["gate"])
    ours = [name for name in peaks if name not in ("scan", "polars", "pandas")]
    figures["rss_growth_mib"] = max(peaks[name][-1] - peaks[name][0] for name in ours)
    figures["over_limit_mib"] = max(peaks[name][-1] for name in ours) - LIMIT
    return figures


def main() -> None:
    parser = command_line(__doc__, "5,000 and 50,000 rows, one round")
    parser.add_argument("--large", action="store_true", help="500,000 and 5,000,000 rows")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one[0], Path(options.one[1]))
        return
    sizes = [5_000, 50_000] if options.quick else [500_000, 5_000_000] if options.large else [50_000, 500_000]
    packages = ("duckdb", "pyarrow", "great-expectations", "numpy", "pandas")
    show("ingest", measure(sizes, 1 if options.quick else 2), TARGETS, packages, options.json)


if __name__ == "__main__":
    main()
