"""Random window batches [64, 60, 210] from the memory-mapped window store, beside a memory copy of as many bytes and peers.

python -m benchmarks.windows [--quick] [--large] [--json], in the environment of requirements-bench.lock for all peers; a peer
that is not installed is left out.

Generated float32 rows, 5 static, 210 historical and 10 future columns, 50,000 and 500,000 of them (--quick: 50,000 alone;
--large: 5,000,000 too). Ours draws the starts, gathers history, the ten future rows and the static columns; the copy moves the
bytes of the history alone, into new memory like ours. pandas slices one window at a time from a table that is in memory.
pytorch-forecasting makes the batch with its own data loader, in this process, from 50,000 rows; building its dataset is not
counted. Rounds alternate, one thread, CPU time (the store is warm: nothing waits for a disk); a ratio is the median over rounds.
own_memory is what the process holds beside the mapped files after all batches, less what it held before.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command_line, show
from models.features import FeatureContract
from models.windows import SeriesArrays, WindowDataset

B, T, H, SERIES = 64, 60, 10, 50
STATIC, PAST, AHEAD = ([f"{k}_{i:03d}" for i in range(n)] for k, n in (("static", 5), ("hist", 210), ("fut", 10)))
CONTRACT = FeatureContract(targets=("price",), static=tuple(STATIC), historical=tuple(PAST), future=tuple(AHEAD))
TARGETS = {"vs_memcpy": (">=", 0.6)}


def window_store(folder: Path, rows: int) -> SeriesArrays:
    """Series of equal length, features mapped from row-major .npy files as in the window cache."""
    random = np.random.default_rng(0)
    mapped = {}
    for name, width in (("historical", 210), ("future", 10)):
        path = folder / f"{name}-{rows}.npy"
        block = np.lib.format.open_memmap(path, "w+", np.float32, (rows, width))
        for at in range(0, rows, 50_000):
            block[at : at + 50_000] = random.standard_normal((min(50_000, rows - at), width), np.float32)
        block.flush()
        del block
        mapped[name] = np.load(path, mmap_mode="r", allow_pickle=False)
    length = rows // SERIES
    price = np.exp(random.normal(0, 0.01, rows).cumsum())
    return SeriesArrays(
        contract=CONTRACT, names=tuple(f"S{i:03d}" for i in range(SERIES)), offsets=np.arange(0, rows + 1, length),
        history_rows=np.full(SERIES, length), timestamps=np.tile(np.arange(length) * 60_000_000, SERIES), price=price,
        targets=price[:, None], static=random.standard_normal((SERIES, 5), np.float32), **mapped,
    )  # fmt: skip


def our_batches(series: SeriesArrays) -> Callable[[int], None]:
    windows = WindowDataset(series, np.stack([series.offsets[:-1], series.offsets[1:]], axis=1), T, H)
    generator = np.random.default_rng(1)

    def draw(batches: int) -> None:
        for _ in range(batches):
            batch = windows.batch(windows.random_starts(B, 1, generator), 1)
        assert batch.historical.shape == (B, T, 210)

    return draw


def copies() -> Callable[[int], None]:
    sources = np.random.default_rng(2).standard_normal((16, B, T, 210), np.float32)

    def draw(batches: int) -> None:
        for i in range(batches):
            copied = sources[i % len(sources)].copy()
        assert copied.shape == (B, T, 210)

    return draw


def pandas_slices(series: SeriesArrays) -> Callable[[int], None]:
    import pandas as pd

    table = pd.DataFrame(np.asarray(series.historical), columns=PAST)
    random = np.random.default_rng(3)

    def draw(batches: int) -> None:
        for _ in range(batches):
            np.stack([table.iloc[at : at + T].to_numpy() for at in random.integers(0, len(table) - T, B)])

    return draw


def pytorch_forecasting(series: SeriesArrays) -> Callable[[int], None]:
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet

    rows = len(series.price)
    static = series.static[series.series_of_row]
    features = np.concatenate([static, series.historical, series.future], axis=1)
    frame = pd.DataFrame(features, columns=[*STATIC, *PAST, *AHEAD])
    length = rows // SERIES
    frame = frame.assign(entity=np.repeat(series.names, length), bar=np.tile(np.arange(length), SERIES), target=series.price)
    dataset = TimeSeriesDataSet(
        frame, time_idx="bar", target="target", group_ids=["entity"], max_encoder_length=T, min_encoder_length=T,
        max_prediction_length=H, min_prediction_length=H, static_reals=STATIC, time_varying_known_reals=AHEAD,
        time_varying_unknown_reals=PAST,
    )  # fmt: skip
    loader = dataset.to_dataloader(train=True, batch_size=B, num_workers=0)

    def draw(batches: int) -> None:
        for _, _ in zip(range(batches), loader, strict=False):
            pass

    return draw


def own_memory() -> float:
    """MiB that belong to this process alone, mapped files left out; NaN where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def timed(draw: Callable[[int], None], batches: int) -> float:
    started = time.process_time()
    draw(batches)
    return (time.process_time() - started) / batches


def measure(sizes: list[int], rounds: int) -> dict[str, float]:
    """The figures; the times are told on stderr."""
    figures: dict[str, float] = {}
    peers: dict[str, Any] = {"pandas": pandas_slices, "pytorch_forecasting": pytorch_forecasting}
    peers = {name: make for name, make in peers.items() if importlib.util.find_spec(name)}
    with tempfile.TemporaryDirectory(prefix="windows-") as folder:
        for rows in sizes:
            series = window_store(Path(folder), rows)
            series.historical.sum()  # every page mapped: the first touch of one is not a gather's
            draws = {"ours": (our_batches(series), 200), "memcpy": (copies(), 200)}
            before = own_memory()
            if rows == sizes[0]:
                draws |= {name: (make(series), 4) for name, make in peers.items()}
            seconds: dict[str, list[float]] = {name: [] for name in draws}
            for round_ in range(rounds + 1):
                for name, (draw, batches) in draws.items():
                    spent = timed(draw, batches)
                    if round_:  # the first one warms the store
                        seconds[name].append(spent)
            for name, spent in seconds.items():
                ratio = statistics.median(a / b for a, b in zip(seconds["memcpy"], spent, strict=True))
                print(
                    f"{rows:9} rows {name:20} {1e3 * statistics.median(spent):9.2f} ms a batch  {ratio:.3f} of memcpy",
                    file=sys.stderr,
                )
                if name == "ours":
                    figures[f"vs_memcpy_{rows // 1000}k"] = ratio
                elif name != "memcpy":
                    figures[f"vs_{name}"] = statistics.median(a / b for a, b in zip(spent, seconds["ours"], strict=True))
            if rows != sizes[0]:
                figures[f"own_memory_mib_{rows // 1000}k"] = own_memory() - before
    figures["vs_memcpy"] = min(value for key, value in figures.items() if key.startswith("vs_memcpy_"))
    return figures


def main() -> None:
    parser = command_line(__doc__, "50,000 rows alone")
    parser.add_argument("--large", action="store_true", help="5,000,000 rows too")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    sizes = [50_000] if options.quick else [50_000, 500_000, *([5_000_000] if options.large else [])]
    show("windows", measure(sizes, 2 if options.quick else 5), TARGETS, ("numpy",), options.json)


if __name__ == "__main__":
    main()
