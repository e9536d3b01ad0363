"""Scaling of the TFT's inputs and target, learnt from the train block alone and saved with the weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.tft.baselines import Past, Ridge, aimed_origins, linear_inputs, linear_models, pooled_model, volatility
from models.windows import SeriesArrays, UnfitSeriesError, WindowBatch

logger = logging.getLogger(__name__)
Floats = NDArray[np.float64]
Anchor = Literal["none", "difference", "ratio", "linear"]
CLIP = 50.0


def _moments(values: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation of columns; 0 and 1 without rows, scale 1 for a constant column."""
    if not len(values):
        return np.zeros(values.shape[1:]), np.ones(values.shape[1:])
    # 1e30 squared is still a double, but nothing larger would be: shrink first
    size = np.maximum(np.abs(values).max(0), 1e-300)
    shrunk = values / size
    mean, deviation = shrunk.mean(0), shrunk.std(0)
    return mean * size, np.where(deviation > 1e-9, deviation * size, 1.0)


class Frame(NamedTuple):
    """Levels that forecasts are relative to, by origin [..., 1] or also by step [..., H], and the spreads that they are measured
    by: of the origin [..., 1] x of the step [1 or H]."""

    levels: Floats
    spreads: Floats
    growth: Floats

    def at(self, origins: NDArray[np.int64]) -> Frame:
        """The frame of some origins."""
        return Frame(self.levels[origins], self.spreads[origins], self.growth)


@dataclass(frozen=True)
class Scaler:
    """Statistics of the train block. Historical columns and the target are per series, with the pooled values in one
    more row for series never seen; static and future columns are pooled (per series they would be erased).

    A target with an anchor is the change from the last known value (a difference, or a log ratio) or from a linear forecast:
    the ridge of lags and running means in baselines.py, fitted on the train block.
    """

    names: tuple[str, ...]
    anchor: Anchor
    horizon: int
    historical_mean: Floats  # [S + 1, V]
    historical_scale: Floats
    static_mean: Floats  # [V]
    static_scale: Floats
    static_low: Floats  # [V], to name codes never seen
    static_high: Floats
    future_mean: Floats  # [V]
    future_scale: Floats
    target_mean: Floats  # [S + 1]
    target_scale: Floats
    linear_mean: Floats = field(default_factory=lambda: np.empty(0))  # [S + 1, F], with anchor linear alone
    linear_inverse_scale: Floats = field(default_factory=lambda: np.empty(0))  # [S + 1, F]
    linear_weights: Floats = field(default_factory=lambda: np.empty(0))  # [S + 1, F, H]
    linear_intercept: Floats = field(default_factory=lambda: np.empty(0))  # [S + 1, H]

    @classmethod
    def fit(
        cls, series: SeriesArrays, train: NDArray[np.int64], target: Floats, anchor: str, horizon: int
    ) -> Scaler:  # fmt: skip
        """Statistics of the rows `train` [S, 2]. Raises ValueError for ratio anchors of targets that are not positive."""
        blocks = [slice(int(a), int(b)) for a, b in train]
        positive = all(bool((target[rows] > 0).all()) for rows in blocks)
        if anchor == "auto":
            anchor = "ratio" if positive else "linear"
        if anchor == "ratio" and not positive:
            raise ValueError("anchor ratio needs a target above zero; use linear, difference or none")
        inside = np.concatenate([np.arange(b.start, b.stop) for b in blocks])
        wide = [series.historical[b].astype(np.float64) for b in blocks]
        historical = [_moments(w) for w in wide] + [_moments(np.concatenate(wide))]
        changes = [_changes(target[b], anchor) for b in blocks]
        targets = [_moments(c[:, None]) for c in [*changes, np.concatenate(changes)]]
        for index, block in enumerate(blocks):
            if block.stop == block.start:  # nothing of its own to learn from
                historical[index], targets[index] = historical[-1], targets[-1]
        linear: dict[str, Floats] = {}
        if anchor == "linear":
            linear, targets = _linear(series, train, target, horizon)
        trained = [i for i, b in enumerate(blocks) if b.stop > b.start]
        static = series.static[trained].astype(np.float64)
        static_mean, static_scale = _moments(static)
        future_mean, future_scale = _moments(series.future[inside].astype(np.float64))
        return cls(
            names=series.names, anchor=anchor, horizon=horizon,  # type: ignore[arg-type]
            historical_mean=np.stack([m for m, _ in historical]), historical_scale=np.stack([s for _, s in historical]),
            static_mean=static_mean, static_scale=static_scale, static_low=static.min(0), static_high=static.max(0),
            future_mean=future_mean, future_scale=future_scale,
            target_mean=np.array([m[0] if anchor == "none" else 0.0 for m, _ in targets]),
            target_scale=np.array([s[0] for _, s in targets]), **linear,
        )  # fmt: skip

    def rows_of(self, series: SeriesArrays) -> NDArray[np.int64]:
        """Row of the statistics for every series; the last, pooled row for series that training never saw."""
        place = {name: i for i, name in enumerate(self.names)}
        return np.array([place.get(name, len(self.names)) for name in series.names], np.int64)

    def warn_unseen(self, series: SeriesArrays) -> None:
        """Log every series that training never saw, or with static codes outside the range that it saw, in one line each."""
        columns = series.contract.groups()["static"]
        outside = (series.static < self.static_low) | (series.static > self.static_high)
        for name, static, odd in zip(series.names, series.static, outside, strict=True):
            said = [] if name in self.names else ["not in training, pooled statistics are used"]
            said += [f"{columns[v]} is {static[v]:g}, a code never seen in training" for v in np.flatnonzero(odd)]
            if said:
                logger.warning("series %s: %s", name, "; ".join(said))

    def check_ratio(self, series: SeriesArrays, target: Floats, rows: NDArray[np.int64]) -> None:
        """Raises UnfitSeriesError naming series of whose target a log ratio cannot be taken at a complete one of `rows`."""
        if self.anchor != "ratio":
            return
        which = series.series_of_row[rows]
        bad = which[(target[rows] <= 0) & (rows < (series.offsets[:-1] + series.history_rows)[which])]
        if len(bad):
            names = ", ".join(series.names[s] for s in np.unique(bad))
            raise UnfitSeriesError(
                f"anchor ratio needs a target above zero, after the train block too: use linear, difference or none: {names}"
            )

    def inputs(self, batch: WindowBatch, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled static, historical and future inputs of a batch, float32; `rows` comes from `rows_of`."""
        which = rows[batch.series]
        scaled = (
            (batch.static - self.static_mean) / self.static_scale,
            (batch.historical - self.historical_mean[which][:, None]) / self.historical_scale[which][:, None],
            (batch.future - self.future_mean) / self.future_scale,
        )
        static, historical, future = (torch.from_numpy(np.clip(x, -CLIP, CLIP).astype(np.float32)) for x in scaled)
        return static, historical, future

    def frame(self, series: SeriesArrays, target: Floats) -> Frame:
        """What a forecast from every row is relative to and measured by; no later row counts.

        With a ratio or difference anchor the unit is the EWMA volatility at the origin times sqrt(h): the network learns how
        much wider or narrower than that band the next bars are.
        """
        which = self.rows_of(series)
        by_row, scale = which[series.series_of_row], self.target_scale
        if self.anchor == "none":
            return Frame(self.target_mean[by_row, None], scale[by_row, None], np.ones(1))
        past = Past.of(series, np.zeros((len(which), 2), np.int64), target, self.anchor)
        if self.anchor != "linear":
            sigma, root = volatility(past, scale[which] ** 2), np.sqrt(np.arange(1, self.horizon + 1))
            return Frame(np.asarray(target, np.float64)[:, None], sigma[:, None], root)
        inputs = linear_inputs(past)
        levels = np.empty((len(target), self.horizon))
        for row in np.unique(by_row):
            mine = by_row == row
            ridge = Ridge(
                self.linear_mean[row], self.linear_inverse_scale[row], self.linear_weights[row], self.linear_intercept[row],
                residuals=np.empty(0),
            )  # fmt: skip
            levels[mine] = ridge.points(inputs[mine])
        return Frame(levels, scale[by_row, None], np.ones(1))

    def normalise(self, target: Floats, frame: Frame) -> Floats:
        """Target values [..., H] in normalised units, given the frame of their origins."""
        change = np.log(target / frame.levels) if self.anchor == "ratio" else target - frame.levels
        return change / (frame.spreads * frame.growth)

    def restore(self, quantiles: Floats, frame: Frame) -> Floats:
        """Quantiles [..., H, Q] in the target's own unit; rising order is kept."""
        change = quantiles * (frame.spreads * frame.growth)[..., None]
        if self.anchor == "ratio":
            return frame.levels[..., None] * np.exp(np.clip(change, -700, 700))
        return change + frame.levels[..., None]

    def tensors(self) -> dict[str, Tensor]:
        """The statistics as tensors of a checkpoint."""
        return {f"scaler.{name}": torch.from_numpy(value.copy()) for name, value in self._arrays().items()}

    def _arrays(self) -> dict[str, Floats]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray) and value.size}

    @classmethod
    def from_checkpoint(cls, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Scaler:
        """The scaler saved by `tensors`, with names and anchor from the metadata."""
        arrays: dict[str, Any] = {
            name.removeprefix("scaler."): value.numpy() for name, value in tensors.items() if name.startswith("scaler.")
        }
        horizon = metadata["config"]["horizon"]
        return cls(names=tuple(metadata["series"]), anchor=metadata["anchor"], horizon=horizon, **arrays)


def _linear(
    series: SeriesArrays, train: NDArray[np.int64], target: Floats, horizon: int
) -> tuple[dict[str, Floats], list[tuple[Floats, Floats]]]:
    """Ridges by series with the pooled one last, as arrays; and mean 0 and the deviation of their residuals."""
    past = Past.of(series, train, target, "none")
    inputs = linear_inputs(past)
    every = np.arange(len(train))
    models = linear_models(past, inputs, (0.5,), horizon, every)
    ridges = [models[int(s)] for s in every] + [pooled_model(past, inputs, (0.5,), horizon)]
    deviations, by_series = [], aimed_origins(past, horizon)
    pooled = np.concatenate(by_series)
    for origins, ridge in zip([*by_series, pooled], ridges, strict=True):
        used = origins if len(origins) else pooled
        residuals = past.values[used[:, None] + np.arange(1, horizon + 1)] - ridge.points(inputs[used])
        deviations.append((np.zeros(1), _moments(residuals.reshape(-1, 1))[1]))
    arrays = {
        "linear_mean": np.stack([r.mean for r in ridges]), "linear_inverse_scale": np.stack([r.inverse_scale for r in ridges]),
        "linear_weights": np.stack([r.weights for r in ridges]), "linear_intercept": np.stack([r.intercept for r in ridges]),
    }  # fmt: skip
    return arrays, deviations


def _changes(target: Floats, anchor: str) -> Floats:
    """What the target's scale is learnt from: levels, or changes from bar to bar."""
    if anchor == "ratio":
        return np.diff(np.log(target))
    return np.diff(target) if anchor == "difference" else target
