"""Forecasts that a trained TFT must beat: quantiles [n, H, Q] of n windows from the train block's statistics and the
target's own past up to the window's origin. No torch; what the comparison says stands in evaluation.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from models.windows import SeriesArrays

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
DECAY = 0.94
"""RiskMetrics' daily lambda (J.P. Morgan and Reuters 1996)."""
CALM = 0.05
"""Least EWMA volatility as a share of the train block's: after a long flat stretch a change over it would have no bound."""
FEWEST = 100
"""Origins in the train block below which a series takes the pooled coefficients and quantiles."""
LAGS = (0, 1, 2, 3, 6, 12, 24)
MEANS = (5, 22, 60, 168)
"""Day, week, month and quarter of daily bars; a week of hourly ones. Corsi's HAR (2009) has 1, 5 and 22."""
RIDGE = 1.0
"""Penalty of coefficients of standardised inputs: it only holds inputs that are nearly equal apart."""


@dataclass(frozen=True)
class Past:
    """The target where changes add up: its log for a ratio anchor, else itself [N]; first and end row of every series'
    complete rows and of its train block [S, 2]."""

    values: Floats
    spans: Rows
    train: Rows
    anchor: str

    @classmethod
    def of(cls, series: SeriesArrays, train: Rows, target: Floats, anchor: str) -> Past:
        """The past of every series. Rows ahead, without a target, are in no span."""
        begin = series.offsets[:-1]
        anchor = "none" if anchor == "linear" else anchor
        values = np.log(np.where(target > 0, target, 1.0)) if anchor == "ratio" else np.asarray(target, np.float64)
        return cls(values, np.stack([begin, begin + series.history_rows], axis=1), train, anchor)

    def changes(self, block: Rows, horizon: int) -> list[Floats]:
        """Changes over 1 .. H rows of one block, by origin; pairs whose later row lies after the block are left out."""
        a, b = (int(x) for x in block)
        inside = self.values[a:b]
        return [inside[h:] - inside[: max(0, b - a - h)] for h in range(1, horizon + 1)]

    def restore(self, levels: Floats) -> Floats:
        """The target's own unit."""
        return np.exp(np.clip(levels, -700, 700)) if self.anchor == "ratio" else levels


def _bands(samples: Sequence[Sequence[Floats]], levels: Sequence[float], fewest: int) -> Floats:
    """Quantiles [S, H, Q] of samples[s][h]; those of all series together where the last step has fewer than `fewest`."""
    usable = [steps for steps in samples if len(steps[-1])]
    if not usable:
        raise ValueError("no train block is longer than the horizon")
    pooled = np.stack([np.quantile(np.concatenate(step), levels) for step in zip(*usable, strict=True)])
    return np.stack([np.stack([np.quantile(x, levels) for x in s]) if len(s[-1]) >= fewest else pooled for s in samples])


def naive(past: Past, which: Rows, origins: Rows, levels: Sequence[float], horizon: int) -> Floats:
    """Last value plus the train quantiles of h-step changes, by series (changes in log for a ratio anchor)."""
    bands = _bands([past.changes(block, horizon) for block in past.train], levels, 1)
    return past.restore(past.values[origins][:, None, None] + bands[which])


def ewma_band(past: Past, which: Rows, origins: Rows, levels: Sequence[float], horizon: int) -> Floats:
    """Last value plus z sigma sqrt(h): sigma the EWMA volatility at the origin, z the train quantiles of h-step changes
    divided by the sigma sqrt(h) of their own origin, by series and step."""
    sigma = volatility(past, _train_variances(past))
    root = np.sqrt(np.arange(1, horizon + 1))
    standardised = [
        [change / (sigma[a : a + len(change)] * root[h]) for h, change in enumerate(past.changes(np.array([a, b]), horizon))]
        for a, b in past.train
    ]
    band = _bands(standardised, levels, FEWEST)[which] * (sigma[origins][:, None] * root)[:, :, None]
    return past.restore(past.values[origins][:, None, None] + band)


def volatility(past: Past, variances: Floats) -> Floats:
    """EWMA volatility of one-row changes up to and including every row [N]. It starts from the variance given for each
    series [S], and is never below `CALM` times its root."""
    sigma = np.ones_like(past.values)
    for (a, b), start in zip(past.spans, variances.tolist(), strict=True):
        moves = (np.diff(past.values[a:b]) ** 2).tolist()
        found = list(accumulate(moves, lambda old, move: DECAY * old + (1 - DECAY) * move, initial=start))
        sigma[a:b] = np.maximum(np.sqrt(found[: b - a]), max(CALM * start**0.5, 1e-300))
    return sigma


def _train_variances(past: Past) -> Floats:
    """Mean square of one-row changes in the train block, by series; the pooled one for a series without."""
    squares = [past.changes(block, 1)[0] ** 2 for block in past.train]
    every = np.concatenate(squares)
    pooled = float(every.mean()) if len(every) else 0.0
    return np.array([float(s.mean()) if len(s) else pooled for s in squares])


@dataclass(frozen=True)
class Ridge:
    """Coefficients of all steps, and the quantiles of their train residuals."""

    mean: Floats  # [F] of the inputs
    inverse_scale: Floats  # [F], 0 for an input that is constant
    weights: Floats  # [F, H]
    intercept: Floats  # [H]
    residuals: Floats  # [H, Q]

    @classmethod
    def fit(cls, inputs: Floats, aims: Floats, levels: Sequence[float]) -> Ridge:
        """Ridge regression of aims [m, H] on standardised inputs [m, F]."""
        mean, intercept, deviation = inputs.mean(0), aims.mean(0), inputs.std(0)
        live = deviation > 1e-9 * np.abs(inputs).max(0)
        inverse = np.where(live, 1 / np.where(live, deviation, 1.0), 0.0)
        standard, aim = (inputs - mean) * inverse, aims - intercept
        weights = np.linalg.solve(standard.T @ standard + RIDGE * np.eye(len(mean)), standard.T @ aim)
        return cls(mean, inverse, weights, intercept, np.quantile(aim - standard @ weights, levels, axis=0).T)

    def points(self, inputs: Floats) -> Floats:
        """Forecasts [k, H] for inputs [k, F]."""
        return (inputs - self.mean) * self.inverse_scale @ self.weights + self.intercept

    def quantiles(self, inputs: Floats) -> Floats:
        """Quantiles [k, H, Q] for inputs [k, F]."""
        return self.points(inputs)[..., None] + self.residuals


def linear(past: Past, which: Rows, origins: Rows, levels: Sequence[float], horizon: int) -> Floats:
    """A ridge regression per step and series on lags and running means of the target, plus the train quantiles of its
    residuals. With an anchor, inputs and aims are taken relative to the last value (for a ratio: log returns)."""
    inputs = linear_inputs(past)
    models = linear_models(past, inputs, levels, horizon, np.unique(which))
    out = np.empty((len(origins), horizon, len(levels)))
    for s, model in models.items():
        mine = which == s
        out[mine] = model.quantiles(inputs[origins[mine]])
    if past.anchor != "none":
        out += past.values[origins][:, None, None]
    return past.restore(out)


def linear_inputs(past: Past) -> Floats:
    """Lags and running means of every row [N, F], none from a later row. Before a series' start its first value stands
    in for a lag, and a mean takes the rows there are."""
    lags = LAGS if past.anchor == "none" else LAGS[1:]
    out = np.zeros((len(past.values), len(lags) + len(MEANS)))
    for a, b in past.spans:
        values, row = past.values[a:b], np.arange(b - a)
        sums = np.concatenate([[0.0], np.cumsum(values)])
        columns = [values[np.maximum(row - lag, 0)] for lag in lags]
        for width in MEANS:
            first = np.maximum(row + 1 - width, 0)
            columns.append((sums[row + 1] - sums[first]) / (row + 1 - first))
        out[a:b] = np.stack(columns, axis=1) - (0.0 if past.anchor == "none" else values[:, None])
    return out


def aimed_origins(past: Past, horizon: int) -> list[Rows]:
    """Origins whose last aim lies in the train block, by series."""
    return [np.arange(a, max(a, b - horizon)) for a, b in past.train]


def _fitted(past: Past, inputs: Floats, rows: Rows, levels: Sequence[float], horizon: int) -> Ridge:
    aims = past.values[rows[:, None] + np.arange(1, horizon + 1)]
    return Ridge.fit(inputs[rows], aims if past.anchor == "none" else aims - past.values[rows, None], levels)


def pooled_model(past: Past, inputs: Floats, levels: Sequence[float], horizon: int) -> Ridge:
    """The regression over all series. Raises ValueError when no train block is longer than the horizon."""
    rows = np.concatenate(aimed_origins(past, horizon))
    if not len(rows):
        raise ValueError("no train block is longer than the horizon")
    return _fitted(past, inputs, rows, levels, horizon)


def linear_models(past: Past, inputs: Floats, levels: Sequence[float], horizon: int, wanted: Rows) -> dict[int, Ridge]:
    """The regression of every wanted series; the pooled one for those with fewer than `FEWEST` origins to learn from."""
    origins = aimed_origins(past, horizon)
    models = {int(s): _fitted(past, inputs, origins[s], levels, horizon) for s in wanted if len(origins[s]) >= FEWEST}
    if len(models) < len(wanted):
        pooled = pooled_model(past, inputs, levels, horizon)
        models |= {int(s): pooled for s in wanted if int(s) not in models}
    return models


Baseline = Callable[[Past, Rows, Rows, Sequence[float], int], Floats]
BASELINES: dict[str, Baseline] = {"naive": naive, "ewma": ewma_band, "linear": linear}
