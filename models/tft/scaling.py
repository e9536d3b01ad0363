"""Scaling of the TFT's inputs and target, learnt from the train block alone and saved with the weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.windows import SeriesArrays, WindowBatch

logger = logging.getLogger(__name__)
Floats = NDArray[np.float64]
Anchor = Literal["none", "difference", "ratio"]
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


@dataclass(frozen=True)
class Scaler:
    """Statistics of the train block. Historical columns and the target are per series, with the pooled values in one
    more row for series never seen; static and future columns are pooled (per series they would be erased).

    A target with an anchor is the change from the last known value: a difference, or a log ratio.
    """

    names: tuple[str, ...]
    anchor: Anchor
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

    @classmethod
    def fit(cls, series: SeriesArrays, train: NDArray[np.int64], target: Floats, anchor: str) -> Scaler:
        """Statistics of the rows `train` [S, 2]. Raises ValueError for ratio anchors of targets that are not positive."""
        blocks = [slice(int(a), int(b)) for a, b in train]
        positive = all(bool((target[rows] > 0).all()) for rows in blocks)
        if anchor == "auto":
            anchor = "ratio" if positive else "none"
        if anchor == "ratio" and not positive:
            raise ValueError("anchor ratio needs a target above zero; use difference or none")
        inside = np.concatenate([np.arange(b.start, b.stop) for b in blocks])
        wide = [series.historical[b].astype(np.float64) for b in blocks]
        historical = [_moments(w) for w in wide] + [_moments(np.concatenate(wide))]
        changes = [_changes(target[b], anchor) for b in blocks]
        targets = [_moments(c[:, None]) for c in [*changes, np.concatenate(changes)]]
        for index, block in enumerate(blocks):
            if block.stop == block.start:  # nothing of its own to learn from
                historical[index], targets[index] = historical[-1], targets[-1]
        trained = [i for i, b in enumerate(blocks) if b.stop > b.start]
        static = series.static[trained].astype(np.float64)
        static_mean, static_scale = _moments(static)
        future_mean, future_scale = _moments(series.future[inside].astype(np.float64))
        return cls(
            names=series.names, anchor=anchor,  # type: ignore[arg-type]
            historical_mean=np.stack([m for m, _ in historical]), historical_scale=np.stack([s for _, s in historical]),
            static_mean=static_mean, static_scale=static_scale, static_low=static.min(0), static_high=static.max(0),
            future_mean=future_mean, future_scale=future_scale,
            target_mean=np.array([0.0 if anchor != "none" else m[0] for m, _ in targets]),
            target_scale=np.array([s[0] for _, s in targets]),
        )  # fmt: skip

    def rows_of(self, series: SeriesArrays) -> NDArray[np.int64]:
        """Row of the statistics for every series; the last, pooled row for series that training never saw."""
        place = {name: i for i, name in enumerate(self.names)}
        return np.array([place.get(name, len(self.names)) for name in series.names], np.int64)

    def warn_unseen(self, series: SeriesArrays) -> None:
        """Log the series that training never saw, and static codes outside the range that it saw."""
        for name in series.names:
            if name not in self.names:
                logger.warning("series %s was not in training: pooled statistics are used", name)
        columns = series.contract.groups()["static"]
        for s, v in np.argwhere((series.static < self.static_low) | (series.static > self.static_high)):
            logger.warning("series %s: %s is %g, a code never seen in training", series.names[s], columns[v], series.static[s, v])

    def check_ratio(self, series: SeriesArrays, target: Floats, rows: NDArray[np.int64]) -> None:
        """Raises ValueError naming the series when a log ratio cannot be taken of the target at one of the complete `rows`."""
        if self.anchor != "ratio":
            return
        which = series.series_of_row[rows]
        bad = which[(target[rows] <= 0) & (rows < (series.offsets[:-1] + series.history_rows)[which])]
        if len(bad):
            names = ", ".join(series.names[s] for s in np.unique(bad))
            raise ValueError(
                f"anchor ratio needs a target above zero, after the train block too: use difference or none: {names}"
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

    def normalise(self, target: Floats, last: Floats, which: NDArray[np.int64]) -> Floats:
        """Target values [S, K, H] in normalised units, given the last known values [S, K]."""
        scale, mean = self.target_scale[which][:, None, None], self.target_mean[which][:, None, None]
        if self.anchor == "ratio":
            return np.log(target / last[..., None]) / scale
        base = last[..., None] if self.anchor == "difference" else mean
        return (target - base) / scale

    def restore(self, quantiles: Floats, last: Floats, which: NDArray[np.int64]) -> Floats:
        """Quantiles [S, K, H, Q] in the target's own unit; rising order is kept."""
        scale = self.target_scale[which][:, None, None, None]
        if self.anchor == "ratio":
            return last[..., None, None] * np.exp(np.clip(quantiles * scale, -700, 700))
        mean = self.target_mean[which][:, None, None, None]
        return quantiles * scale + (last[..., None, None] if self.anchor == "difference" else mean)

    def tensors(self) -> dict[str, Tensor]:
        """The statistics as tensors of a checkpoint."""
        return {f"scaler.{name}": torch.from_numpy(value.copy()) for name, value in self._arrays().items()}

    def _arrays(self) -> dict[str, Floats]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    @classmethod
    def from_checkpoint(cls, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Scaler:
        """The scaler saved by `tensors`, with names and anchor from the metadata."""
        arrays: dict[str, Any] = {
            name.removeprefix("scaler."): value.numpy() for name, value in tensors.items() if name.startswith("scaler.")
        }
        return cls(names=tuple(metadata["series"]), anchor=metadata["anchor"], **arrays)


def _changes(target: Floats, anchor: str) -> Floats:
    """What the target's scale is learnt from: levels, or changes from bar to bar."""
    if anchor == "ratio":
        return np.diff(np.log(target))
    return np.diff(target) if anchor == "difference" else target
