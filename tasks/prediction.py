"""Forecasts and actions for new rows, by a published model, to Parquet. Uses pyarrow and Prefect."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

import models.dqn.training
import models.tft.training
from models.checkpoint import Snapshot, write_atomically
from models.config import IngestConfig
from models.dqn.config import DQNConfig
from models.manifest import ModelManifest
from models.tft.config import TFTConfig
from models.windows import SeriesArrays
from tasks.artifacts import load_published, read_manifest
from tasks.drift import tell_drift
from tasks.expectations import validate_features
from tasks.series import series_from_staged
from tasks.staging import stage_parquet
from tasks.storage import ObjectStore

TIME = pa.timestamp("us", tz="UTC")


@task(name="predict-rows", cache_policy=NO_CACHE)
def predict_rows(store: ObjectStore, name: str, version: int | None, source: str, out: Path) -> tuple[ModelManifest, int]:
    """Write the model's output for a source; the manifest it was made with, and the rows written.

    The source of a TFT, or of an agent that reads one, may end each series with `horizon` rows that hold key and future columns
    alone. Raises DataContractError for bad rows and ArtifactIntegrityError for a damaged model; `out` is then left as it was.
    """
    manifest = read_manifest(store, name, version if version is not None else "champion")
    config = manifest.config
    forecaster = config if isinstance(config, TFTConfig) else manifest.tft and manifest.tft.config
    ahead = forecaster.horizon if forecaster else 0
    with tempfile.TemporaryDirectory(prefix="forecastle-") as folder:
        snapshot = load_published(store, manifest, Path(folder))
        staged = stage_parquet(source, manifest.dataset.contract, IngestConfig(), Path(folder) / "staged", future_rows=ahead)
        validate_features(staged)
        tell_drift(staged, manifest, store)
        series = series_from_staged(staged)
        table = _actions(snapshot, series) if isinstance(config, DQNConfig) else _forecasts(snapshot, series, config)
    table = table.append_column("model", pa.array([manifest.model] * len(table), pa.string()))
    table = table.append_column("version", pa.array([manifest.version] * len(table), pa.int64()))
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd")
    write_atomically(out, buffer.getvalue().to_pybytes())
    get_run_logger().info("%s version %d: %d rows to %s", manifest.model, manifest.version, len(table), out)
    return manifest, len(table)


def _forecasts(snapshot: Snapshot, series: SeriesArrays, config: TFTConfig) -> pa.Table:
    """One row per series and bar ahead: series, origin, timestamp, one column per quantile."""
    found = models.tft.training.forecast(snapshot, series)
    steps = config.horizon
    columns: dict[str, pa.Array] = {
        "series": pa.array([f.series for f in found for _ in range(steps)], pa.string()),
        "origin": pa.array([f.origin for f in found for _ in range(steps)], pa.int64()).cast(TIME),
        "timestamp": pa.array([int(t) for f in found for t in f.timestamps], pa.int64()).cast(TIME),
    }
    for i, level in enumerate(config.quantiles):
        columns[f"p{level * 100:g}"] = pa.array([float(q) for f in found for q in f.quantiles[:, i]], pa.float64())
    return pa.table(columns)


def _actions(snapshot: Snapshot, series: SeriesArrays) -> pa.Table:
    """One row per series and held position: series, timestamp, position, action, values of sell, hold and buy."""
    rows = [
        {
            "series": decision.series,
            "timestamp": decision.timestamp,
            "position": position,
            "action": action,
            **dict(zip(("q_sell", "q_hold", "q_buy"), decision.values[position], strict=True)),
        }
        for decision in models.dqn.training.decide(snapshot, series)
        for position, action in decision.actions.items()
    ]
    table = pa.Table.from_pylist(rows)
    return table.set_column(1, "timestamp", table["timestamp"].cast(TIME))
