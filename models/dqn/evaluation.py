"""What a policy earns on a later block, beside doing nothing, holding, the best constant position and the exact optimum.
All returns are log returns; nothing here trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from models.dqn.market import FLAT

Floats = NDArray[np.float64]
YEAR_MICROS = 365.25 * 86_400e6


@dataclass(frozen=True)
class Path:
    """What one policy did on one segment: net and gross log return and position of every bar, and fees paid."""

    net: Floats
    gross: Floats
    position: NDArray[np.int64]
    changes: NDArray[np.int64]


def roll_out(best_action: NDArray[np.int64], returns: Floats, targets: NDArray[np.int64], fee: float, fill: str) -> Path:
    """Follow the best action by (bar, held position index) [n, 3] over log returns [n], starting flat."""
    n = len(returns)
    position = np.empty(n, np.int64)
    changes = np.empty(n, np.int64)
    held = FLAT
    moves = targets[np.arange(3)[None, :], best_action]  # [n, 3] new index by held index
    for t in range(n):
        new = int(moves[t, held])
        changes[t] = abs(new - held)
        position[t] = (held if fill == "next" else new) - FLAT
        held = new
    gross = position * returns
    return Path(gross - fee * changes, gross, position, changes)


def optimum(returns: Floats, targets: NDArray[np.int64], fee: float, fill: str) -> Path:
    """The best possible path with the whole future known, by backward dynamic programming over held positions."""
    n = len(returns)
    best = np.empty((n, 3), np.int64)
    value = np.zeros(3)
    cost = fee * np.abs(targets - np.arange(3)[:, None])
    for t in range(n - 1, -1, -1):
        earning = np.broadcast_to(np.arange(3)[:, None], (3, 3)) if fill == "next" else targets
        q = (earning - FLAT) * returns[t] - cost + value[targets]
        best[t] = q.argmax(1)
        value = q.max(1)
    return roll_out(best, returns, targets, fee, fill)


def constant(returns: Floats, position: int, fee: float, fill: str) -> Floats:
    """Net log return per bar of taking one position at the first bar and keeping it."""
    held = np.full(len(returns), position)
    if fill == "next" and len(held):
        held[0] = 0
    net = held * returns
    if len(net):
        net[0] -= fee * abs(position)
    return net


def _by_time(values: Floats, times: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Sum and number of values at every time stamp, in rising time."""
    place = np.unique(times, return_inverse=True)[1]
    return np.bincount(place, values).astype(np.float64), np.bincount(place).astype(np.float64)


def block_bootstrap(
    net: Floats, times: NDArray[np.int64], *, seed: int, draws: int = 1000, level: float = 0.95, least: int = 1
) -> tuple[float, float]:
    """Confidence interval of the mean per bar: circular blocks of about n^(1/3) of the n time stamps (Politis & Romano
    1992), of `least` or more. All series of a time stamp are drawn together: they move together, so drawing them apart makes
    it too narrow."""
    sums, counts = _by_time(net, times)
    n = len(sums)
    if n < 2:
        return (float("-inf"), float("inf"))
    length = min(n, max(least, round(n ** (1 / 3))))
    starts = np.random.default_rng(seed).integers(0, n, (draws, -(-n // length)))

    def drawn(values: Floats) -> Floats:
        running = np.cumsum(np.concatenate([[0.0], values, values[:length]]))
        return np.asarray((running[starts + length] - running[starts]).sum(1))

    means = drawn(sums) / drawn(counts)
    tail = (1 - level) / 2
    return float(np.quantile(means, tail)), float(np.quantile(means, 1 - tail))


def _drawdown(net: Floats) -> float:
    wealth = np.concatenate([[0.0], np.cumsum(net)])
    return float(1 - np.exp((wealth - np.maximum.accumulate(wealth)).min()))


def _ratio(mean: float, deviation: float, per_year: float) -> float:
    return float(mean / deviation * np.sqrt(per_year)) if deviation > 0 else 0.0


def evaluate(
    best_actions: Sequence[NDArray[np.int64]], returns: Sequence[Floats], times: Sequence[NDArray[np.int64]],
    targets: NDArray[np.int64], *, fee: float, fill: Literal["close", "next"], bars_per_year: float, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Metrics of a policy over segments. Log returns are summed over segments; ratios are annualised by `bars_per_year`
    (bars per calendar year of the data). `times` tells which bars of different series are the same moment.
    `fraction_of_optimum` above 1 raises: it proves a bug or a leak."""
    paths = [roll_out(a, r, targets, fee, fill) for a, r in zip(best_actions, returns, strict=True)]
    optima = [optimum(r, targets, fee, fill) for r in returns]
    net = np.concatenate([p.net for p in paths]) if paths else np.zeros(0)
    gross = np.concatenate([p.gross for p in paths]) if paths else np.zeros(0)
    position = np.concatenate([p.position for p in paths]) if paths else np.zeros(0, np.int64)
    changes = np.concatenate([p.changes for p in paths]) if paths else np.zeros(0, np.int64)
    when = np.concatenate(times) if paths else np.zeros(0, np.int64)
    n = len(net)
    best = float(sum(p.net.sum() for p in optima))
    total = float(net.sum())
    fraction = total / best if best > 0 else 0.0
    if fraction > 1 + 1e-9:
        raise AssertionError(f"net return {total} above the exact optimum {best}: a bug or a leak")
    hold = float(sum(constant(r, 1, fee, fill).sum() for r in returns))
    choices = (
        [0.0, hold] if targets[FLAT, 0] == FLAT else [0.0, hold, float(sum(constant(r, -1, fee, fill).sum() for r in returns))]
    )
    downside = float(np.sqrt(np.mean(np.minimum(net, 0.0) ** 2))) if n else 0.0
    low, high = block_bootstrap(net, when, seed=seed)
    moments = _by_time(gross, when)[0]
    active = position != 0
    return {
        "bars": n,
        "net_return": total,
        "net_return_per_bar": total / n if n else 0.0,
        "net_return_per_bar_low": low if np.isfinite(low) else None,
        "net_return_per_bar_high": high if np.isfinite(high) else None,
        "gross_return": float(gross.sum()),
        "gross_t": _ratio(float(moments.mean()), float(moments.std(ddof=1)), len(moments)) if len(moments) > 1 else 0.0,
        "sharpe": _ratio(float(net.mean()), float(net.std()), bars_per_year) if n else 0.0,
        "sortino": _ratio(float(net.mean()), downside, bars_per_year) if n else 0.0,
        "max_drawdown": max((_drawdown(p.net) for p in paths), default=0.0),
        "turnover_per_bar": float(changes.mean()) if n else 0.0,
        "hit_rate": float((gross[active] > 0).mean()) if active.any() else 0.0,
        "trades": int((changes > 0).sum()),
        "fees": float(fee * changes.sum()),
        "exposure": float(np.abs(position).mean()) if n else 0.0,
        "flat_return": 0.0,
        "buy_and_hold_return": hold,
        "best_constant_return": max(choices),
        "optimum_return": best,
        "fraction_of_optimum": fraction,
    }


def equity_curves(
    best_actions: Sequence[NDArray[np.int64]],
    returns: Sequence[Floats],
    targets: NDArray[np.int64],
    fee: float,
    fill: str,
) -> dict[str, Any]:
    """`equity`: summed log return of agent, buy-and-hold and optimum over the segments one after the other;
    `positions`: the agent's. At most 500 points, the first and the last bar among them."""
    paths = [roll_out(a, r, targets, fee, fill) for a, r in zip(best_actions, returns, strict=True)]
    bars = sum(len(p.net) for p in paths)
    at = np.linspace(0, bars - 1, min(bars, 500)).round().astype(np.int64)
    curves = {
        "agent": [p.net for p in paths],
        "buy_and_hold": [constant(r, 1, fee, fill) for r in returns],
        "optimum": [optimum(r, targets, fee, fill).net for r in returns],
    }
    return {
        "equity": {name: np.cumsum(np.concatenate([*parts, []]))[at].tolist() for name, parts in curves.items()},
        "positions": np.concatenate([*(p.position for p in paths), np.zeros(0, np.int64)])[at].tolist(),
    }
