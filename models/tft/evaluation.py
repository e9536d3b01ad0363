"""What a trained TFT is worth on a later block: quantile losses in the target's own unit beside the naive forecast, and
what it looked at. Nothing here trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.tft.config import TFTConfig
from models.tft.network import TemporalFusionTransformer
from models.tft.scaling import Floats, Scaler
from models.windows import SeriesArrays, WindowBatch, WindowDataset

RUN_WINDOWS = 512
"""Consecutive windows per pass: each row passes the variable selection once per 512 windows."""


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


def forecast_block(
    network: TemporalFusionTransformer,
    scaler: Scaler,
    windows: WindowDataset,
    target: Floats,
    config: TFTConfig,
    device: str,
) -> Forecasts:
    """Forecasts of every window of a block, in evaluation mode, without gradients."""
    rows = scaler.rows_of(windows.series)
    out: list[list[Any]] = [[] for _ in range(6)]
    was_training = network.training
    network.eval()
    try:
        with torch.no_grad():
            for batch in _runs(windows):
                count = batch.windows
                inputs = (t.to(device) for t in scaler.inputs(batch, rows))
                normalised = network(*inputs).double().cpu().numpy()
                which = rows[batch.series]
                last, actual = target[batch.origins], target[windows.target_rows(batch)]
                pieces = (
                    scaler.restore(normalised, last, which)[0], actual[0], normalised[0],
                    scaler.normalise(actual, last, which)[0], np.repeat(batch.series, count), batch.origins[0],
                )  # fmt: skip
                for total, piece in zip(out, pieces, strict=True):
                    total.append(piece)
    finally:
        network.train(was_training)
    return Forecasts(*(np.concatenate(part) for part in out))


def _naive(train: NDArray[np.int64], target: Floats, found: Forecasts, config: TFTConfig, anchor: str) -> Floats:
    """Last value plus the train quantiles of h-step changes, by series (changes in log for a ratio anchor): [n, H, Q]."""
    out = np.empty_like(found.quantiles)
    values = np.log(target) if anchor == "ratio" else target
    pooled: list[Any] = [[] for _ in range(config.horizon)]
    bands: dict[int, Any] = {}
    for s, (a, b) in enumerate(train):
        changes = [values[a + h : b] - values[a : b - h] for h in range(1, config.horizon + 1)]
        if len(changes[-1]):
            bands[s] = np.stack([np.quantile(c, config.quantiles) for c in changes])
            for total, change in zip(pooled, changes, strict=True):
                total.append(change)
    every = np.stack([np.quantile(np.concatenate(c), config.quantiles) for c in pooled])
    for i, (s, origin) in enumerate(zip(found.series, found.origins, strict=True)):
        level = values[origin] + bands.get(int(s), every)
        out[i] = np.exp(level) if anchor == "ratio" else level
    return out


def block_metrics(
    found: Forecasts, series: SeriesArrays, train: NDArray[np.int64], target: Floats, config: TFTConfig, anchor: str
) -> dict[str, Any]:
    """Total pinball, q-risk (2 sum pinball / sum |y|), coverage and MAE per step, beside the naive forecast's."""
    loss = pinball_numpy(found.quantiles, found.actual, config.quantiles)
    naive = pinball_numpy(_naive(train, target, found, config, anchor), found.actual, config.quantiles)
    size = max(float(np.abs(found.actual).sum()), 1e-300)
    middle = int(np.argmin(np.abs(np.array(config.quantiles) - 0.5)))
    by_series = {}
    for s in np.unique(found.series):
        mine = found.series == s
        by_series[series.names[s]] = {
            "pinball": float(loss[mine].mean()), "skill_vs_naive": _skill(float(loss[mine].mean()), float(naive[mine].mean())),
        }  # fmt: skip
    return {
        "windows": len(found.actual),
        "pinball": float(loss.mean()),
        "naive_pinball": float(naive.mean()),
        "skill_vs_naive": _skill(float(loss.mean()), float(naive.mean())),
        "q_risk": {f"p{q * 100:g}": float(2 * loss[..., i].sum() / size) for i, q in enumerate(config.quantiles)},
        "coverage": float(((found.actual >= found.quantiles[..., 0]) & (found.actual <= found.quantiles[..., -1])).mean()),
        "crossings": int((np.diff(found.quantiles, axis=-1) < 0).sum()),
        "mae_by_step": [float(x) for x in np.abs(found.actual - found.quantiles[..., middle]).mean(0)],
        "by_series": by_series,
    }


def _skill(loss: float, naive: float) -> float:
    """Share of the naive loss that is saved; 0 is no better than naive."""
    return 1 - loss / naive if naive > 0 else 0.0


def importance(
    network: TemporalFusionTransformer, scaler: Scaler, windows: WindowDataset, device: str
) -> dict[str, dict[str, float]]:
    """Mean selection weight of every variable by group, over all rows that the block's windows see."""
    rows = scaler.rows_of(windows.series)
    groups = windows.series.contract.groups()
    totals = {group: np.zeros(len(names)) for group, names in groups.items()}
    seen = dict.fromkeys(groups, 0)
    network.eval()
    for batch in _runs(windows):
        found = network.interpret(*(t.to(device) for t in scaler.inputs(batch, rows)))
        for group, weights in zip(groups, (found.static, found.historical, found.future), strict=True):
            flat = weights.reshape(-1, weights.shape[-1]).double().cpu().numpy()
            totals[group] += flat.sum(0)
            seen[group] += len(flat)
    return {
        group: {name: float(x) for name, x in zip(names, totals[group] / max(1, seen[group]), strict=True)}
        for group, names in groups.items()
    }


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
