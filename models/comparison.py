"""A challenger against the champion on the same bars, none of which either has trained or chosen its weights on: paired
differences with a block-bootstrap interval. What is done about it stands in tasks/promotion.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import models.dqn.training
import models.tft.training
from models.checkpoint import Snapshot
from models.config import Split
from models.dqn.config import DQNConfig
from models.dqn.evaluation import block_bootstrap, roll_out
from models.dqn.forecasts import agent_table
from models.dqn.market import FeatureScaler, feature_table, log_returns, targets_of_actions
from models.dqn.network import PositionQNetwork
from models.features import FeatureContract
from models.tft.config import TFTConfig
from models.tft.evaluation import Forecasts, calibrated, forecast_block, pinball_numpy
from models.windows import SeriesArrays, WindowDataset, block_rows, overlap

Floats = NDArray[np.float64]
LEAST_MOMENTS = 30
"""Fewest time stamps to decide on."""
CURVE_POINTS = 300


class Incomparable(ValueError):
    """The two models cannot be held against each other; the message says why."""


@dataclass(frozen=True)
class Comparison:
    """One measure of both models, means per window or bar; `difference` and its 95 % interval `low` to `high` are how much
    better the challenger is. `curve` is its summed advantage in time, at most 300 points."""

    measure: str
    challenger: float
    champion: float
    difference: float
    low: float
    high: float
    values: int
    moments: int
    first: str
    last: str
    curve: list[float]

    def evidence(self) -> dict[str, Any]:
        """The numbers without the curve."""
        return {name: value for name, value in vars(self).items() if name != "curve"}


def untouched_from(series: SeriesArrays, split: Split) -> dict[str, int]:
    """First instant (microseconds since 1970 UTC) by series after everything a training with this split learns from."""
    out = {}
    for name, (first, end) in zip(series.names, block_rows(series, split, 0)["test"], strict=True):
        out[name] = int(series.timestamps[first]) if first < end else int(series.timestamps[end - 1]) + 1
    return out


def rows_from(series: SeriesArrays, bounds: Sequence[dict[str, int]]) -> NDArray[np.int64]:
    """Rows [S, 2] of each series from the latest of its bounds on. A series that a model never saw counts from that model's
    latest bound: other series of the same days are no news to it either."""
    out = []
    for name, begin, rows in zip(series.names, series.offsets[:-1], series.history_rows, strict=True):
        start = max(bound.get(name, max(bound.values())) for bound in bounds)
        out.append((begin + np.searchsorted(series.timestamps[begin : begin + rows], start), begin + rows))
    return np.array(out, np.int64)


def _paired(measure: str, ours: Floats, theirs: Floats, sign: int, times: NDArray[np.int64], block: int) -> Comparison:
    """Differences by value; `sign` is -1 where less is better. Raises Incomparable with too few moments."""
    better = sign * (ours - theirs)
    moments, place = np.unique(times, return_inverse=True)
    if len(moments) < LEAST_MOMENTS:
        raise Incomparable(f"{len(moments)} time stamps after both trainings to compare on, at least {LEAST_MOMENTS} are needed")
    low, high = block_bootstrap(better, times, seed=0, least=block)
    running = np.cumsum(np.bincount(place, better))
    at = np.linspace(0, len(moments) - 1, min(len(moments), CURVE_POINTS)).round().astype(np.int64)
    first, last = (np.datetime_as_string(np.datetime64(int(t), "us"), unit="m", timezone="UTC") for t in moments[[0, -1]])
    return Comparison(
        measure, float(ours.mean()), float(theirs.mean()), float(better.mean()), low, high, len(better), len(moments),
        str(first), str(last), running[at].tolist(),
    )  # fmt: skip


def _same_features(snapshots: Iterable[Snapshot], series: SeriesArrays) -> None:
    for snapshot in snapshots:
        if FeatureContract.model_validate(snapshot.metadata["contract"]).features != series.contract.features:
            raise Incomparable("the two models were trained on other feature columns")


def compare_forecasts(
    challenger: Snapshot, champion: Snapshot, series: SeriesArrays, rows: NDArray[np.int64]
) -> tuple[Comparison, ...]:
    """Total pinball loss, over steps and quantiles, of every window whose targets lie in `rows`, in the target's own unit.

    Blocks of the bootstrap are at least a horizon long: windows a bar apart share most of their targets. Raises Incomparable.
    """
    _same_features((challenger, champion), series)
    ours, theirs = (TFTConfig.model_validate(snapshot.metadata["config"]) for snapshot in (challenger, champion))
    first = series.contract.target_names[0]
    for name, a, b in (
        ("target", ours.target or first, theirs.target or first), ("horizon", ours.horizon, theirs.horizon),
        ("quantiles", ours.quantiles, theirs.quantiles),
    ):  # fmt: skip
        if a != b:
            raise Incomparable(f"another {name}: {a} against {b}")
    windows = WindowDataset(series, rows, max(ours.context, theirs.context), ours.horizon)
    if not len(windows):
        raise Incomparable("no whole window after both trainings")
    losses: list[Floats] = []
    for snapshot, config in ((challenger, ours), (champion, theirs)):
        found = _forecasts(snapshot, config, series, windows)
        losses.append(pinball_numpy(found.quantiles, found.actual, config.quantiles).sum((1, 2)))
    times = series.timestamps[found.origins]
    return (_paired("total pinball loss per window", losses[0], losses[1], -1, times, ours.horizon),)


def _forecasts(snapshot: Snapshot, config: TFTConfig, series: SeriesArrays, common: WindowDataset) -> Forecasts:
    """Forecasts of the common windows, each with the context of its own model."""
    network, scaler = models.tft.training.rebuilt(snapshot)
    target = series.target(config.target)
    windows = WindowDataset(series, np.stack([series.offsets[:-1]] * 2, axis=1), config.context, config.horizon)
    windows.keep(common.first_origin, common.counts)
    try:
        scaler.check_ratio(series, target, np.arange(len(target)))
    except ValueError as error:
        raise Incomparable(str(error)) from error
    frame = scaler.frame(series, target)
    found = forecast_block(network, scaler, windows, target, frame, "cpu")
    if "conformal.shift" in snapshot.tensors:
        found = calibrated(found, snapshot.tensors["conformal.shift"].numpy(), scaler, frame)
    if not np.isfinite(found.quantiles).all():
        raise Incomparable("forecasts are not finite")
    return found


def compare_policies(
    challenger: Snapshot, champion: Snapshot, series: SeriesArrays, rows: NDArray[np.int64]
) -> tuple[Comparison, ...]:
    """Net log return of every bar in `rows` under either fill, with the challenger's fee: against the champion, then against
    flat. Raises Incomparable."""
    _same_features((challenger, champion), series)
    features = feature_table(series)
    seen = [agent_table(snapshot, series, features, rows) for snapshot in (challenger, champion)]
    segments = [(int(a), int(b)) for a, b in overlap(seen[0][1], seen[1][1]) if b - a >= 2]
    if not segments:
        raise Incomparable("no bar to trade after both trainings")
    configs = [DQNConfig.model_validate(snapshot.metadata["config"]) for snapshot in (challenger, champion)]
    policies = [models.dqn.training.rebuilt(snapshot) for snapshot in (challenger, champion)]
    returns = log_returns(series).numpy()
    times = np.concatenate([series.timestamps[a : b - 1] for a, b in segments])
    best = [_best_actions(*policy, table, segments) for policy, (table, _) in zip(policies, seen, strict=True)]
    out = []
    fills: tuple[Literal["close", "next"], ...] = ("close", "next")
    for fill in fills:
        nets: list[Floats] = []
        for config, actions in zip(configs, best, strict=True):
            moves = targets_of_actions(config.positions).numpy()
            paths = [
                roll_out(action, returns[a : b - 1], moves, configs[0].fee, fill)
                for action, (a, b) in zip(actions, segments, strict=True)
            ]
            nets.append(np.concatenate([path.net for path in paths]))
        out.append(_paired(f"net log return per bar, fill {fill}", nets[0], nets[1], 1, times, 1))
        out.append(_paired(f"net log return per bar, fill {fill}, against flat", nets[0], np.zeros_like(nets[0]), 1, times, 1))
    return tuple(out)


def _best_actions(
    network: PositionQNetwork, scaler: FeatureScaler, table: Tensor, segments: Sequence[tuple[int, int]]
) -> list[NDArray[np.int64]]:
    with torch.no_grad():
        return [network(scaler.apply(table[a : b - 1])).argmax(2).numpy() for a, b in segments]
