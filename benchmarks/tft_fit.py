"""A whole fit, from Parquet to a trained network, beside pytorch-forecasting and darts: windows trained on per CPU-second.

python -m benchmarks.tft_fit [--quick] [--json], in the environment of requirements-bench.lock (see there).

Four series of random features and prices (5 static, 210 historical, 10 known-future columns), one Parquet file each; hidden 32,
4 heads, 60 -> 10 bars, 3 quantiles, dropout 0.1, 128 windows an update, one epoch, one thread. Everything between reading the
files and the trained weights counts: reading, the library's own dataset and its scaling, every update. Ours also counts its
validation, baselines, test report and interpretation; the peers only train. Ours draws 16 starts of 8 consecutive windows (the
default), peers 128 windows; their hidden_continuous_size is 32 (8, their default, is a smaller network). Not counted: imports and
our data gate, which peers have not. All in one process, one after the other, round by round; a ratio is the median over rounds.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks import command_line, show
from models.features import FeatureContract
from models.tft.config import TFTConfig
from models.tft.training import train
from models.windows import SeriesArrays

T, H, D, HEADS, BATCH = 60, 10, 32, 4, 128
QUANTILES = [0.1, 0.5, 0.9]
ROWS = {"AAA": 1500, "BBB": 1500, "CCC": 1500, "DDD": 1500}
STATIC, PAST, AHEAD = ([f"{k}_{i:03d}" for i in range(n)] for k, n in (("static", 5), ("hist", 210), ("fut", 10)))
CONTRACT = FeatureContract(targets=("target",), static=tuple(STATIC), historical=tuple(PAST), future=tuple(AHEAD))
TARGETS = {"vs_pytorch_forecasting": (">=", 5.0), "vs_darts": (">=", 5.0)}

Fit = Callable[[list[Path], int], None]
"""Reads the files and trains for a number of updates."""


def write(folder: Path) -> list[Path]:
    paths = []
    for number, (name, rows) in enumerate(ROWS.items()):
        random = np.random.default_rng(number)
        price = np.exp(np.cumsum(random.normal(0, 0.02, rows)) + 3)
        columns: dict[str, Any] = {"entity_id": [name] * rows, "bar": np.arange(rows), "price": price, "target": price}
        columns["timestamp"] = pa.array(np.arange(rows) * 86_400_000_000, pa.timestamp("us", tz="UTC"))
        columns |= {c: np.full(rows, number + i, np.float32) for i, c in enumerate(STATIC)}
        columns |= {c: random.normal(size=rows).astype(np.float32) for c in (*PAST, *AHEAD)}
        paths.append(folder / f"{name}.parquet")
        pq.write_table(pa.table(columns), paths[-1])
    return paths


def ours(paths: list[Path], updates: int) -> None:
    tables = [pq.read_table(path) for path in paths]
    rows = np.array([table.num_rows for table in tables])

    def values(names: list[str], kind: type) -> Any:
        return np.concatenate([np.stack([table[n].to_numpy() for n in names], axis=1).astype(kind) for table in tables])

    offsets = np.concatenate([[0], np.cumsum(rows)])
    series = SeriesArrays(
        contract=CONTRACT, names=tuple(table["entity_id"][0].as_py() for table in tables), offsets=offsets, history_rows=rows,
        timestamps=np.concatenate([table["timestamp"].cast(pa.int64()).to_numpy() for table in tables]),
        price=values(["price"], np.float64)[:, 0], targets=values(["target"], np.float64),
        static=values(STATIC, np.float32)[offsets[:-1]], historical=values(PAST, np.float32), future=values(AHEAD, np.float32),
    )  # fmt: skip
    config = TFTConfig(hidden_size=D, num_heads=HEADS, epochs=1, updates_per_epoch=updates, checkpoint_every=1, device="cpu")
    assert config.batch_size * config.windows_per_start == BATCH
    train(config, series, on_epoch=lambda row: None, on_checkpoint=lambda *_: None)


def pytorch_forecasting(paths: list[Path], updates: int) -> None:
    import pandas as pd
    from lightning.pytorch import Trainer
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.metrics import QuantileLoss

    frame = pd.concat([pd.read_parquet(path) for path in paths], ignore_index=True)
    frame = frame[frame["bar"] < 0.7 * max(ROWS.values())]  # the train block
    dataset = TimeSeriesDataSet(
        frame, time_idx="bar", target="target", group_ids=["entity_id"], max_encoder_length=T, min_encoder_length=T,
        max_prediction_length=H, min_prediction_length=H, static_reals=STATIC, time_varying_known_reals=AHEAD,
        # With the ten known ones its encoder selects among 210
        time_varying_unknown_reals=PAST[: len(PAST) - len(AHEAD)],
    )  # fmt: skip
    network = TemporalFusionTransformer.from_dataset(
        dataset, hidden_size=D, hidden_continuous_size=D, attention_head_size=HEADS, dropout=0.1, learning_rate=1e-3,
        loss=QuantileLoss(QUANTILES), output_size=len(QUANTILES),
    )  # fmt: skip
    trainer = Trainer(
        max_epochs=1, limit_train_batches=updates, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(network, dataset.to_dataloader(train=True, batch_size=BATCH, num_workers=0))
    assert trainer.global_step == updates


def darts(paths: list[Path], updates: int) -> None:
    import pandas as pd
    from darts import TimeSeries
    from darts.models import TFTModel
    from darts.utils.likelihood_models import QuantileRegression

    frame = pd.concat([pd.read_parquet(path) for path in paths], ignore_index=True)
    frame = frame[frame["bar"] < 0.7 * max(ROWS.values())]

    def cut(columns: list[str], static: list[str] | None = None) -> list[Any]:
        return TimeSeries.from_group_dataframe(
            frame, group_cols="entity_id", time_col="bar", value_cols=columns, static_cols=static, drop_group_cols="entity_id"
        )

    model = TFTModel(
        input_chunk_length=T, output_chunk_length=H, hidden_size=D, hidden_continuous_size=D, lstm_layers=1,
        num_attention_heads=HEADS, dropout=0.1, likelihood=QuantileRegression(QUANTILES), batch_size=BATCH, n_epochs=1,
        pl_trainer_kwargs={
            "accelerator": "cpu", "limit_train_batches": updates, "enable_progress_bar": False, "logger": False,
            "enable_checkpointing": False, "enable_model_summary": False, "gradient_clip_val": 1.0,
        },
    )  # fmt: skip
    as_float = [[series.astype(np.float32) for series in cut(columns)] for columns in (PAST[: len(PAST) - len(AHEAD) - 1], AHEAD)]
    target = [series.astype(np.float32) for series in cut(["target"], STATIC)]
    model.fit(target, past_covariates=as_float[0], future_covariates=as_float[1], dataloader_kwargs={"num_workers": 0})
    assert model.trainer.global_step == updates


def measure(updates: int, rounds: int) -> dict[str, float]:
    """The figures; the seconds are told on stderr."""
    fits: dict[str, Fit] = {"ours": ours, "pytorch_forecasting": pytorch_forecasting, "darts": darts}
    seconds: dict[str, list[float]] = {name: [] for name in fits}
    with tempfile.TemporaryDirectory() as folder:
        paths = write(Path(folder))
        for fit in fits.values():
            fit(paths, 1)  # imports and caches
        for _ in range(rounds):
            for name, fit in fits.items():
                started = time.process_time()
                fit(paths, updates)
                seconds[name].append(time.process_time() - started)
    for name, spent in seconds.items():
        median = statistics.median(spent)
        rate = updates * BATCH / median
        print(f"{name:24}{median:8.1f} CPU s ({min(spent):.1f} to {max(spent):.1f}) {rate:8.1f} windows/CPU s", file=sys.stderr)
    return {
        f"vs_{name}": statistics.median(a / b for a, b in zip(spent, seconds["ours"], strict=True))
        for name, spent in seconds.items()
        if name != "ours"
    }


def main() -> None:
    options = command_line(__doc__, "one round of ten updates instead of three of thirty").parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    packages = ("torch", "pytorch-forecasting", "darts")
    print(", ".join(f"{p} {version(p)}" for p in packages), file=sys.stderr)
    show("tft_fit", measure(10, 1) if options.quick else measure(30, 3), TARGETS, packages, options.json)


if __name__ == "__main__":
    main()
