"""Tiny market data: Parquet sources and arrays with any group sizes and column names."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from models.features import FeatureContract
from models.windows import SeriesArrays

DAY = 86_400_000_000
START = 1_262_304_000_000_000  # 2010-01-01 UTC
NAMES = {"entity": "entity_id", "timestamp": "timestamp", "price": "price", "targets": ("target",)}
PREFIXES = {"static": "static_", "historical": "hist_", "future": "fut_"}


def market_tables(
    series=None, *, static=5, historical=210, future=10, seed=0, names=NAMES, prefixes=PREFIXES,
    future_rows=0,
):  # fmt: skip
    """One Arrow table per series: random features, a random-walk price; `future_rows` more with key and future only."""
    if series is None:
        series = {"AAA": 200, "BBB": 150}
    tables = {}
    for number, (name, rows) in enumerate(series.items()):
        random = np.random.default_rng([seed, number])
        total = rows + future_rows
        price = np.exp(np.cumsum(random.normal(0, 0.02, total)) + 3)
        gone = np.arange(total) >= rows
        columns = {
            names["entity"]: pa.array([name] * total, pa.string()),
            names["timestamp"]: pa.array(START + DAY * np.arange(total), pa.int64()).cast(pa.timestamp("us", tz="UTC")),
            names["price"]: pa.array(price, mask=gone),
        }
        for target in names["targets"]:
            if target != names["price"]:
                columns[target] = pa.array(price, mask=gone)
        for i in range(static):
            columns[f"{prefixes['static']}{i:03d}"] = pa.array(np.full(total, number + i, np.float32), mask=gone)
        for i in range(historical):
            columns[f"{prefixes['historical']}{i:03d}"] = pa.array(random.normal(size=total).astype(np.float32), mask=gone)
        for i in range(future):
            columns[f"{prefixes['future']}{i:03d}"] = pa.array(np.sin(np.arange(total) / (i + 2)).astype(np.float32))
        tables[name] = pa.table(columns)
    return tables


def write_market(folder: Path, **options) -> dict[str, Path]:
    """Write `market_tables` into a folder, a file per series."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, table in market_tables(**options).items():
        paths[name] = folder / f"{name}.parquet"
        pq.write_table(table, paths[name])
    return paths


def small_contract(static=3, historical=20, future=4, lookback_bars=0) -> FeatureContract:
    """A resolved contract with those group sizes."""
    return FeatureContract(
        targets=("target",),
        static=tuple(f"static_{i:03d}" for i in range(static)),
        historical=tuple(f"hist_{i:03d}" for i in range(historical)),
        future=tuple(f"fut_{i:03d}" for i in range(future)),
        lookback_bars=lookback_bars,
    )


def series_arrays(series=None, *, seed=0, **sizes) -> SeriesArrays:
    """Random series as arrays, without Parquet."""
    if series is None:
        series = {"AAA": 200, "BBB": 150}
    contract = small_contract(**sizes)
    groups = contract.groups()
    rows = np.array(list(series.values()))
    total = int(rows.sum())
    random = np.random.default_rng(seed)
    price = np.concatenate([np.exp(np.cumsum(random.normal(0, 0.02, n)) + 3) for n in rows])
    return SeriesArrays(
        contract=contract,
        names=tuple(series),
        offsets=np.concatenate([[0], np.cumsum(rows)]).astype(np.int64),
        history_rows=rows.astype(np.int64),
        timestamps=np.concatenate([START + DAY * np.arange(n) for n in rows]).astype(np.int64),
        price=price,
        targets=price[:, None].copy(),
        static=random.normal(size=(len(rows), len(groups["static"]))).astype(np.float32),
        historical=random.normal(size=(total, len(groups["historical"]))).astype(np.float32),
        future=random.normal(size=(total, len(groups["future"]))).astype(np.float32),
    )
