"""What a policy earns on a later block, beside doing nothing, holding, the best constant position and the exact optimum.
All returns are log returns; nothing here trains. Bars follow from each other, yet nothing here goes through them one by one: a
bar is a map of the held position, and maps are put together in log2(n) rounds (a scan, Hillis & Steele 1986)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from models.dqn.market import FLAT

Floats = NDArray[np.float64]
Fill = Literal["close", "next"]
YEAR_MICROS = 365.25 * 86_400e6


@dataclass(frozen=True)
class Path:
    """What one policy did on one segment: net and gross log return, position and change of position of every bar."""

    net: Floats
    gross: Floats
    position: NDArray[np.int64]
    changes: NDArray[np.int64]


def _path(held: NDArray[np.int64], returns: Floats, fee: float, fill: str) -> Path:
    """The path that leads to the position indices `held` [n], one after every bar, from flat."""
    before = np.concatenate([[FLAT], held[:-1]])[: len(held)]
    position, changes = (before if fill == "next" else held) - FLAT, np.abs(held - before)
    gross = position * returns
    return Path(gross - fee * changes, gross, position, changes)


def roll_out(best_action: NDArray[np.int64], returns: Floats, targets: NDArray[np.int64], fee: float, fill: str) -> Path:
    """Follow the best action by (bar, held position index) [n, 3] over log returns [n], starting flat."""
    maps = targets[np.arange(3)[None, :], best_action]  # [n, 3] index held after `step` bars, by index held before
    step = 1
    while step < len(maps):
        maps[step:] = np.take_along_axis(maps[step:], maps[:-step], 1)
        step *= 2
    return _path(maps[:, FLAT], returns, fee, fill)


def optimum(returns: Floats, targets: NDArray[np.int64], fee: float, fill: str) -> Path:
    """The best possible path with the whole future known: dynamic programming over held positions, bars put together as
    products of (max, +) matrices."""
    held = np.broadcast_to(np.arange(3)[:, None], (3, 3))
    earning = held if fill == "next" else targets
    paid = (earning - FLAT) * returns[:, None, None] - fee * np.abs(targets - held)  # [n, 3 held, 3 actions]
    best = np.full((len(returns), 3, 3), -np.inf)  # [n, 3 held, 3 held after `step` bars]
    np.put_along_axis(best, np.broadcast_to(targets, best.shape), paid, 2)
    step = 1
    while step < len(returns):
        first, then = best[:-step], best[step:]
        best[:-step] = np.max([first[:, :, k, None] + then[:, k, None, :] for k in range(3)], axis=0)
        step *= 2
    value = np.concatenate([best.max(2)[1:], np.zeros((1, 3))])[: len(returns)]  # [n, 3] of what comes after every bar
    return roll_out((paid + value[:, targets]).argmax(2), returns, targets, fee, fill)


def constant(returns: Floats, position: int, fee: float, fill: str) -> Path:
    """Take one position at the first bar and keep it."""
    return _path(np.full(len(returns), FLAT + position), returns, fee, fill)


@dataclass
class HeldOut:
    """A block that is evaluated on: log returns and their time stamps by segment, with the baselines' paths, which do not
    depend on the agent and are worked out once."""

    returns: Sequence[Floats]
    times: Sequence[NDArray[np.int64]]  # which bars of different series are the same moment
    targets: NDArray[np.int64]
    fee: float
    bars_per_year: float
    seed: int  # of the bootstrap
    _baselines: dict[str, dict[str, Any]] = field(default_factory=dict)

    def baselines(self, fill: Fill) -> dict[str, list[Path]]:
        """Paths by segment of flat, buy_and_hold, best_constant and optimum; `best_constant` is one position for all."""
        if fill not in self._baselines:
            may_be_held = sorted(set((self.targets[FLAT] - FLAT).tolist()))
            constants = {p: [constant(r, p, self.fee, fill) for r in self.returns] for p in may_be_held}
            best = max(constants.values(), key=total)
            optima = [optimum(r, self.targets, self.fee, fill) for r in self.returns]
            self._baselines[fill] = {
                "flat": constants[0], "buy_and_hold": constants[1], "best_constant": best, "optimum": optima
            }  # fmt: skip
        return self._baselines[fill]

    def measures(self, paths: Sequence[Path]) -> dict[str, Any]:
        """What one policy did. Log returns are summed over segments; ratios are annualised by the bars per calendar year."""
        net, gross, position, changes = (
            np.concatenate([*(getattr(p, name) for p in paths), np.zeros(0, np.int64)])
            for name in ("net", "gross", "position", "changes")
        )
        n, active = max(len(net), 1), position != 0
        downside = float(np.sqrt((np.minimum(net, 0.0) ** 2).sum() / n))
        mean, deviation = float(net.sum() / n), float(net.std()) if len(net) else 0.0
        return {
            "net_return": float(net.sum()),
            "gross_return": float(gross.sum()),
            "sharpe": _ratio(mean, deviation, self.bars_per_year),
            "sortino": _ratio(mean, downside, self.bars_per_year),
            "max_drawdown": max((float(drawdown(p.net).max(initial=0.0)) for p in paths), default=0.0),
            "turnover_per_bar": float(changes.sum() / n),
            "hit_rate": float((gross[active] > 0).mean()) if active.any() else 0.0,
            "trades": int((changes > 0).sum()),
            "fees": float(self.fee * changes.sum()),
            "exposure": float(np.abs(position).sum() / n),
        }


def total(paths: Sequence[Path]) -> float:
    """Net log return, summed over segments."""
    return float(sum(p.net.sum() for p in paths))


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


def drawdown(net: Floats) -> Floats:
    """Share of wealth lost since its highest point so far, by bar."""
    wealth = np.cumsum(net)
    return 1 - np.exp(wealth - np.maximum(np.maximum.accumulate(wealth), 0.0)) if len(net) else net


def _ratio(mean: float, deviation: float, per_year: float) -> float:
    return float(mean / deviation * np.sqrt(per_year)) if deviation > 0 else 0.0


def evaluate(best_actions: Sequence[NDArray[np.int64]], block: HeldOut, fill: Fill) -> dict[str, Any]:
    """Measures of the agent (best actions [n, 3] by segment), its share of the optimum, its confidence interval, and the same
    measures of the baselines. A net return above the optimum raises AssertionError: it proves a bug or a leak."""
    paths = roll_outs(best_actions, block, fill)
    simple = block.baselines(fill)
    earned, best = total(paths), total(simple["optimum"])
    fraction = earned / best if best > 0 else 0.0
    if earned > best + 1e-9 * max(1.0, abs(best)):
        raise AssertionError(f"net return {earned} above the exact optimum {best}: a bug or a leak")
    empty = np.zeros(0)
    when = np.concatenate([*block.times, empty.astype(np.int64)])
    low, high = block_bootstrap(np.concatenate([*(p.net for p in paths), empty]), when, seed=block.seed)
    moments = _by_time(np.concatenate([*(p.gross for p in paths), empty]), when)[0]
    return {
        "bars": len(when),
        **block.measures(paths),
        "net_return_per_bar": earned / max(len(when), 1),
        "net_return_per_bar_low": low if np.isfinite(low) else None,
        "net_return_per_bar_high": high if np.isfinite(high) else None,
        "gross_t": _ratio(float(moments.mean()), float(moments.std(ddof=1)), len(moments)) if len(moments) > 1 else 0.0,
        "optimum_return": best,
        "fraction_of_optimum": fraction,
        "baselines": {name: block.measures(of) for name, of in simple.items()},
    }


def roll_outs(best_actions: Sequence[NDArray[np.int64]], block: HeldOut, fill: Fill) -> list[Path]:
    """The agent's path on every segment."""
    return [
        roll_out(actions, returns, block.targets, block.fee, fill)
        for actions, returns in zip(best_actions, block.returns, strict=True)
    ]


def curves(best_actions: Sequence[NDArray[np.int64]], block: HeldOut, fill: Fill) -> dict[str, Any]:
    """Over the segments one after the other, at no more than 500 bars, the last among them. `equity`: summed net log return by
    policy; `drawdown`: the deepest since the bar shown before, by policy; `positions`: the agent's."""
    policies = {"agent": roll_outs(best_actions, block, fill), **block.baselines(fill)}
    bars = sum(len(r) for r in block.returns)
    if not bars:
        return {}
    at = np.linspace(0, bars - 1, min(bars, 500)).round().astype(np.int64)
    since = np.concatenate([[0], at[:-1] + 1])
    shown = {name: policies[name] for name in ("agent", "buy_and_hold", "optimum")}
    deepest = {name: np.concatenate([drawdown(p.net) for p in paths]) for name, paths in shown.items()}
    return {
        "equity": {name: np.cumsum(np.concatenate([p.net for p in paths]))[at].tolist() for name, paths in shown.items()},
        "drawdown": {name: np.maximum.reduceat(values, since).tolist() for name, values in deepest.items() if name != "optimum"},
        "positions": np.concatenate([p.position for p in policies["agent"]])[at].tolist(),
    }
