"""What a trained TFT is worth on a later block: quantile losses in the target's own unit beside simple forecasts, and
what it looked at. Nothing here trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.tft.baselines import BASELINES, Past
from models.tft.calibration import shifted
from models.tft.config import TFTConfig
from models.tft.network import TemporalFusionTransformer
from models.tft.scaling import Floats, Frame, Scaler
from models.windows import SeriesArrays, WindowBatch, WindowDataset

RUN_WINDOWS = 512
"""Consecutive windows per pass: each row passes the variable selection once per 512 windows."""
PERCENTILE_ROWS = 16_384
"""Most rows whose selection weights are kept for percentiles: 14 MB at 210 variables."""


@dataclass(frozen=True)
class Forecasts:
    """Quantiles of all windows of a block [n, H, Q] and actual values [n, H], in the target's own unit and normalised."""

    quantiles: Floats
    actual: Floats
    normalised: Floats
    normalised_actual: Floats
    series: NDArray[np.int64]  # [n] index of the series
    origins: NDArray[np.int64]  # [n] row of the last known bar


def pinball_numpy(quantiles: Floats, actual: Floats, levels: tuple[float, ...]) -> Floats:
    """Pinball loss of every element: [..., Q]."""
    error = actual[..., None] - quantiles
    return np.maximum(np.array(levels) * error, (np.array(levels) - 1) * error)


def _runs(windows: WindowDataset) -> Iterator[WindowBatch]:
    """Every window of the block once, in runs of consecutive windows of one series."""
    for start in windows.sequential_starts(RUN_WINDOWS):
        left = int(windows.counts[start[0]] - (start[1] - windows.first_origin[start[0]]))
        yield windows.batch(start[None], min(RUN_WINDOWS, left))


def normalised_quantiles(
    network: TemporalFusionTransformer, scaler: Scaler, windows: WindowDataset, device: str
) -> tuple[Floats, NDArray[np.int64]]:
    """Quantiles of every window of a block [n, H, Q] in normalised units, and their origins [n], in evaluation mode."""
    rows, out, origins = scaler.rows_of(windows.series), [], []
    was_training = network.training
    network.eval()
    try:
        with torch.no_grad():
            for batch in _runs(windows):
                inputs = (t.to(device) for t in scaler.inputs(batch, rows))
                out.append(network(*inputs)[0].double().cpu().numpy())
                origins.append(batch.origins[0])
    finally:
        network.train(was_training)
    return np.concatenate(out), np.concatenate(origins)


def forecast_block(
    network: TemporalFusionTransformer,
    scaler: Scaler,
    windows: WindowDataset,
    target: Floats,
    frame: Frame,
    device: str,
) -> Forecasts:
    """Forecasts of every window of a block, in evaluation mode, without gradients; `frame` is the scaler's of this target."""
    normalised, origins = normalised_quantiles(network, scaler, windows, device)
    here, actual = frame.at(origins), target[origins[:, None] + np.arange(1, windows.horizon + 1)]
    return Forecasts(
        scaler.restore(normalised, here), actual, normalised, scaler.normalise(actual, here),
        windows.series.series_of_row[origins], origins,
    )  # fmt: skip


def calibrated(found: Forecasts, shift: Floats, scaler: Scaler, frame: Frame) -> Forecasts:
    """The same forecasts with the conformal shift [H, Q], in normalised units, applied."""
    normalised = shifted(found.normalised, shift)
    return replace(found, normalised=normalised, quantiles=scaler.restore(normalised, frame.at(found.origins)))


def block_metrics(
    found: Forecasts, series: SeriesArrays, train: NDArray[np.int64], target: Floats, config: TFTConfig, anchor: str
) -> dict[str, Any]:
    """Total pinball, q-risk (2 sum pinball / sum |y|), coverage and MAE per step, beside those of the baselines; share_below:
    how often the actual value was at or below each quantile, which promises its own level."""
    loss = pinball_numpy(found.quantiles, found.actual, config.quantiles)
    past = Past.of(series, train, target, anchor)
    simple, baselines = {}, {}
    for name, baseline in BASELINES.items():
        quantiles = baseline(past, found.series, found.origins, config.quantiles, config.horizon)
        simple[name] = pinball_numpy(quantiles, found.actual, config.quantiles)
        baselines[name] = {
            "pinball": float(simple[name].mean()),
            "pinball_by_step": [float(x) for x in simple[name].mean((0, 2))],
            "q_risk": _q_risk(simple[name], found.actual, config.quantiles),
            "coverage": float(covered(quantiles, found.actual).mean()),
        }
    middle = int(np.argmin(np.abs(np.array(config.quantiles) - 0.5)))
    by_series = {}
    for s in np.unique(found.series):
        mine = found.series == s
        own = float(loss[mine].mean())
        skills = {f"skill_vs_{name}": _skill(own, float(other[mine].mean())) for name, other in simple.items()}
        by_series[series.names[s]] = {"pinball": own, **skills}
    inside = covered(found.quantiles, found.actual)
    below = (found.actual[..., None] <= found.quantiles).mean((0, 1))
    return {
        "windows": len(found.actual),
        "pinball": float(loss.mean()),
        "pinball_by_step": [float(x) for x in loss.mean((0, 2))],
        **{f"{name}_pinball": row["pinball"] for name, row in baselines.items()},
        **{f"skill_vs_{name}": _skill(float(loss.mean()), float(other.mean())) for name, other in simple.items()},
        "q_risk": _q_risk(loss, found.actual, config.quantiles),
        "coverage": float(inside.mean()),
        "coverage_by_step": [float(x) for x in inside.mean(0)],
        "share_below": {f"p{q * 100:g}": float(x) for q, x in zip(config.quantiles, below, strict=True)},
        "crossings": int((np.diff(found.quantiles, axis=-1) < 0).sum()),
        "mae_by_step": [float(x) for x in np.abs(found.actual - found.quantiles[..., middle]).mean(0)],
        "baselines": baselines,
        "by_series": by_series,
    }


def covered(quantiles: Floats, actual: Floats) -> NDArray[np.bool_]:
    """Whether each actual value [n, H] lies in the outer band."""
    return (actual >= quantiles[..., 0]) & (actual <= quantiles[..., -1])


def _q_risk(loss: Floats, actual: Floats, levels: tuple[float, ...]) -> dict[str, float]:
    size = max(float(np.abs(actual).sum()), 1e-300)
    return {f"p{q * 100:g}": float(2 * loss[..., i].sum() / size) for i, q in enumerate(levels)}


def _skill(loss: float, simple: float) -> float:
    """Share of the simple forecast's loss that is saved; 0 is no better."""
    return 1 - loss / simple if simple > 0 else 0.0


@dataclass(frozen=True)
class Interpretation:
    """What the network looked at over a whole block: mean selection weights [V] by group with their 10th, 50th and 90th
    percentiles over rows [3, V], and mean attention [H, T+H] of each step ahead on the rows -(T-1)..0 and 1..H from the origin.
    """

    windows: int
    names: dict[str, tuple[str, ...]]
    means: dict[str, Floats]
    percentiles: dict[str, Floats]
    attention: Floats


def interpretation(network: TemporalFusionTransformer, scaler: Scaler, windows: WindowDataset, device: str) -> Interpretation:
    """Selection weights of every row and attention of every window of a block, in one pass and in evaluation mode.

    A row counts once however many windows share it, and so does a series' static row. The percentiles are of every k-th row,
    the smallest k that leaves at most `PERCENTILE_ROWS`: those stay in memory, as float32.
    """
    rows, groups = scaler.rows_of(windows.series), windows.series.contract.groups()
    T, H, used = windows.context, windows.horizon, windows.counts[windows.counts > 0]
    total = dict(zip(groups, (len(used), int((used + T - 1).sum()), int((used + H - 1).sum())), strict=True))
    every = {group: -(-count // PERCENTILE_ROWS) for group, count in total.items()}
    sums = {group: np.zeros(len(names)) for group, names in groups.items()}
    seen = dict.fromkeys(groups, 0)
    kept: dict[str, list[NDArray[np.float32]]] = {group: [] for group in groups}
    attention = np.zeros((H, T + H))
    was_training = network.training
    network.eval()
    try:
        for batch in _runs(windows):
            found = network.interpret(*(t.to(device) for t in scaler.inputs(batch, rows)))
            attention += found.attention.sum(0, dtype=torch.float64).cpu().numpy()
            # Of a run that continues a series, the first rows are the last ones of the run before
            goes_on = batch.origins[0, 0] > windows.first_origin[batch.series[0]]
            known = (1, T - 1, H - 1) if goes_on else (0, 0, 0)
            for group, weights, old in zip(groups, (found.static, found.historical[0], found.future[0]), known, strict=True):
                new = weights[old:].float().cpu().numpy()
                sums[group] += new.sum(0, dtype=np.float64)
                kept[group].append(new[-seen[group] % every[group] :: every[group]].copy())
                seen[group] += len(new)
    finally:
        network.train(was_training)
    return Interpretation(
        windows=len(windows),
        names=dict(groups),
        means={group: sums[group] / seen[group] for group in groups},
        percentiles={group: np.quantile(np.concatenate(kept[group]), (0.1, 0.5, 0.9), axis=0) for group in groups},
        attention=attention / len(windows),
    )


def samples(found: Forecasts, series: SeriesArrays, count: int = 4) -> list[dict[str, Any]]:
    """A few windows spread over the block, for fan charts."""
    chosen: list[int] = np.unique(np.linspace(0, len(found.actual) - 1, count).astype(int)).tolist()
    return [
        {
            "series": series.names[found.series[i]],
            "origin": np.datetime_as_string(np.datetime64(int(series.timestamps[found.origins[i]]), "us"), unit="m"),
            "actual": found.actual[i].tolist(),
            "quantiles": found.quantiles[i].tolist(),
        }
        for i in chosen
    ]
