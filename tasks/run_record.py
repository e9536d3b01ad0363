"""What a run knows of where it runs: GPU, driver, provider, pod, price; how often it was started. Uses Prefect."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess

from prefect.runtime import flow_run

MOST_STARTS = 5


class TooManyCrashes(RuntimeError):
    """The run crashed again and again."""


def stop_crash_loop() -> None:
    """Called first by every flow of a deployment: a crashed run is started again by an automation, which cannot count.

    Raises TooManyCrashes at start number 6.
    """
    if (starts := flow_run.run_count or 1) > MOST_STARTS:
        raise TooManyCrashes(f"started {starts} times and crashed each time before; look at the log, then retry or run it anew")


def gpus() -> list[tuple[str, str]]:
    """Name and driver of each GPU that nvidia-smi lists."""
    program = shutil.which("nvidia-smi")
    if not program:
        return []
    query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    return [(name.strip(), driver.strip()) for name, _, driver in (line.partition(",") for line in done.stdout.splitlines())]


def run_record(device: str, seconds: float) -> list[tuple[str, str]]:
    """Where a training ran and what it cost, for its report.

    Provider, region, pod and price (US dollars an hour) come from FORECASTLE_PROVIDER, FORECASTLE_REGION, FORECASTLE_POD
    and FORECASTLE_PRICE_PER_HOUR; a Runpod pod names itself.
    """
    rows = [("time", f"{seconds:.1f} s on {device}")]
    rows += [("GPU", f"{name}, driver {driver}") for name, driver in gpus()] if device != "cpu" else []
    rows.append(("machine", f"{platform.node()}, {os.cpu_count()} CPUs, {platform.platform()}"))
    pod = os.environ.get("FORECASTLE_POD") or os.environ.get("RUNPOD_POD_ID")
    provider = os.environ.get("FORECASTLE_PROVIDER") or ("runpod" if os.environ.get("RUNPOD_POD_ID") else None)
    region = os.environ.get("FORECASTLE_REGION") or os.environ.get("RUNPOD_DC_ID")
    rows += [(name, value) for name, value in (("provider", provider), ("region", region), ("pod", pod)) if value]
    price = os.environ.get("FORECASTLE_PRICE_PER_HOUR")
    if price:
        rows.append(("cost", f"{seconds / 3600 * float(price):.4f} $ at {float(price):g} $ an hour"))
    return rows
