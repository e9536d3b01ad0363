"""The TFT as an input of the agent: forecasts of every row by TFTs that ended before it. What is done with them stands in
models/dqn/training.py.

The rows before the test block are cut into `tft_folds` parts by time, the same instants for all series. A TFT of the champion's
configuration is trained on the parts before each cut alone, a purge gap apart, and forecasts the rows up to the next cut; the
last one forecasts the test block and goes with the agent. The first part has no forecast, and none is put in its place."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import models.tft.training
from models.checkpoint import CheckpointError, Snapshot, checkpoint_bytes
from models.config import Split
from models.dqn.config import DQNConfig
from models.progress import StopRequested
from models.tft.calibration import shifted
from models.tft.config import TFTConfig
from models.tft.evaluation import normalised_quantiles
from models.windows import SeriesArrays, UnfitSeriesError, WindowDataset, block_rows, overlap

logger = logging.getLogger(__name__)
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class ForecastInput:
    """Forecasts of the rows [S, 2] that have one: `values` [N, H x Q], NaN elsewhere; `tft` is the last fold's network, `digest`
    the sha256 of all of them, `told` what the report says."""

    values: Tensor
    rows: Rows
    tft: Snapshot
    digest: str
    told: dict[str, Any]


def cut_instants(config: DQNConfig, series: SeriesArrays) -> list[int]:
    """Ends of the parts in microseconds since 1970 UTC, the last where the test block begins (over all series: at its share of
    the rows in time). Raises UnfitSeriesError when there are fewer instants than parts."""
    ends = series.offsets[:-1] + series.history_rows
    times = np.sort(np.concatenate([series.timestamps[a:b] for a, b in zip(series.offsets[:-1], ends, strict=True)]))
    at, count = int(len(times) * (config.split.train + config.split.val) + 1e-9), config.tft_folds
    if config.split.cut_dates:
        tested = [series.timestamps[a] for a, b in block_rows(series, config.split, 0)["test"] if a < b]
        at = int(np.searchsorted(times, min(tested))) if tested else len(times)
    last = int(times[at]) if at < len(times) else int(times[-1]) + 1
    earlier = times[times < last]
    cuts = [int(earlier[len(earlier) * k // count]) for k in range(1, count) if len(earlier)] + [last]
    if len(cuts) < count or not (np.diff(cuts) > 0).all():
        raise UnfitSeriesError(f"too few time stamps before the test block to cut them into {count} parts: lower tft_folds")
    return cuts


def _rows_before(series: SeriesArrays, instant: int) -> Rows:
    spans = zip(series.offsets[:-1], series.history_rows, strict=True)
    return np.array([np.searchsorted(series.timestamps[a : a + n], instant) for a, n in spans], np.int64)


def known_before(series: SeriesArrays, instant: int, held: float, gap: int) -> SeriesArrays:
    """The series as a fold's training sees them: nothing of the `gap` rows before the instant is learnt from. Where the share
    `held` of them is a longer validation block, `block_rows` keeps that gap."""
    rows = _rows_before(series, instant)
    return replace(series, history_rows=np.maximum(0, np.where(held * rows > gap + 1, rows, rows - gap)))


def foreseen(series: SeriesArrays, tft: TFTConfig, since: int, until: int | None = None) -> Rows:
    """Rows [S, 2] from `since` to `until` that can be forecast: `context` rows up to them, `horizon` rows after them."""
    begin, ahead = series.offsets[:-1], series.offsets[1:] - tft.horizon
    first = begin + np.maximum(tft.context - 1, _rows_before(series, since))
    end = begin + (series.history_rows if until is None else _rows_before(series, until))
    return np.stack([first, np.maximum(first, np.minimum(end, ahead))], axis=1)


def moves(tft: Snapshot, series: SeriesArrays, rows: Rows) -> Tensor:
    """Quantiles of all steps ahead of every row, [n, H x Q] float32: where the TFT's anchor is the last value, as the change
    (the log ratio) from it, else as they are. Raises CheckpointError when they are not finite."""
    config = TFTConfig.model_validate(tft.metadata["config"])
    network, scaler = models.tft.training.rebuilt(tft)
    windows = WindowDataset(series, rows + np.array([1, config.horizon]), config.context, config.horizon)
    if not len(windows):
        return torch.empty(0, config.horizon * len(config.quantiles))
    target = series.target(config.target)
    found, origins = normalised_quantiles(network, scaler, windows, "cpu")
    scaler.check_ratio(series, target, origins)
    if "conformal.shift" in tft.tensors:
        found = shifted(found, tft.tensors["conformal.shift"].numpy())
    frame = scaler.frame(series, target).at(origins)
    out = found * (frame.spreads * frame.growth)[..., None]
    if scaler.anchor not in ("ratio", "difference"):
        out = out + frame.levels[..., None]
    if not np.isfinite(out).all():
        raise CheckpointError("the TFT's forecasts are not finite")
    return torch.from_numpy(out.reshape(len(out), -1).astype(np.float32))


def _every(rows: Rows) -> Tensor:
    return torch.cat([torch.arange(int(a), int(b)) for a, b in rows])


def _unknown(series: SeriesArrays, tft: TFTConfig) -> Tensor:
    """Forecasts before there are any, [N, H x Q]: NaN, so that a row without one that is read after all spoils the loss."""
    return torch.full((len(series.timestamps), tft.horizon * len(tft.quantiles)), torch.nan)


def walk_forward(
    config: DQNConfig, tft: TFTConfig, series: SeriesArrays, *, kept: Mapping[int, Snapshot] | None = None,
    keep: Callable[[int, Snapshot], None] = lambda fold, snapshot: None, stop_requested: StopRequested = lambda: False,
) -> ForecastInput | None:  # fmt: skip
    """Train the folds' TFTs, those in `kept` (by number from 1) apart, and forecast with each; None when asked to stop.

    `keep` gets every one that was trained. Raises UnfitSeriesError when a fold is too short, FloatingPointError for its loss.
    """
    cuts, gap = cut_instants(config, series), series.contract.lookback_bars + tft.horizon
    share = min(tft.split.train / (tft.split.train + tft.split.val), 1 - 1e-9)
    alone = tft.model_copy(
        update={
            "split": Split(train=share, val=1 - share - 1e-12), "rolling_cuts": 0, "extra_seeds": 0,
            "checkpoint_every": tft.epochs, "device": config.device,
        }
    )  # fmt: skip
    values = _unknown(series, tft)
    digest, told, made = hashlib.sha256(), [], []
    for fold, (since, until) in enumerate(zip(cuts, [*cuts[1:], None], strict=True), 1):
        known = known_before(series, since, 1 - share, gap)
        found = (kept or {}).get(fold)
        if found is None:
            logger.info("tft fold %d of %d: trains on rows before %s", fold, len(cuts), _date(since))
            found = _trained(alone, known, fold, stop_requested)
            if found is None:
                return None
            keep(fold, found)
        rows = foreseen(series, tft, since, until)
        values[_every(rows)] = moves(found, series, rows)
        digest.update(checkpoint_bytes(found))
        made.append(found)
        learnt = {"rows_known": int(known.history_rows.sum()), "rows_forecast": int((rows[:, 1] - rows[:, 0]).sum())}
        told.append({"from": _date(since), **learnt, "epochs": found.metadata["epoch"]})
    rows = foreseen(series, tft, cuts[0])
    without = int(series.history_rows.sum() - (rows[:, 1] - rows[:, 0]).sum())
    last = Snapshot(made[-1].tensors, {**made[-1].metadata, "since": cuts[-1]})
    return ForecastInput(values, rows, last, digest.hexdigest(), {"rows_without_forecast": without, "folds": told})


def _trained(config: TFTConfig, known: SeriesArrays, fold: int, stop_requested: StopRequested) -> Snapshot | None:
    """The final snapshot of one fold; None when asked to stop."""
    finals: list[Snapshot] = []

    def on_checkpoint(epoch: int, is_final: bool, weights: Snapshot, resume: Snapshot | None) -> None:
        if is_final:
            finals.append(weights)

    try:
        result = models.tft.training.train(
            config, known, on_epoch=lambda row: None, on_checkpoint=on_checkpoint, stop_requested=stop_requested
        )
    except UnfitSeriesError as error:
        raise UnfitSeriesError(f"TFT fold {fold}: {error}; lower tft_folds, or the champion's context") from error
    if result.stop_reason == "interrupted":
        return None
    if result.stop_reason == "non_finite_loss":
        raise FloatingPointError(f"TFT fold {fold}: the loss is not finite after {result.epochs} epochs")
    return finals[0]


def carried(snapshot: Snapshot) -> Snapshot:
    """The TFT in an agent's file. Raises CheckpointError when there is none."""
    if not isinstance(snapshot.metadata.get("tft"), dict):
        raise CheckpointError("the agent reads forecasts, but its file holds no TFT")
    return Snapshot(snapshot.part("tft."), snapshot.metadata["tft"])


def agent_table(snapshot: Snapshot, series: SeriesArrays, table: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
    """What a published agent sees, unscaled [N, F], given the feature table; and those of `rows` [S, 2] that it sees whole: all
    of them, or with a TFT those that it can forecast and has not learnt from."""
    if not DQNConfig.model_validate(snapshot.metadata["config"]).tft_folds:
        return table, rows
    tft = carried(snapshot)
    config = TFTConfig.model_validate(tft.metadata["config"])
    rows = overlap(rows, foreseen(series, config, tft.metadata["since"]))
    values = _unknown(series, config)
    values[_every(rows)] = moves(tft, series, rows)
    return torch.cat([table, values], 1), rows


def _date(micros: int) -> str:
    return str(np.datetime_as_string(np.datetime64(micros, "us"), unit="m", timezone="UTC"))
