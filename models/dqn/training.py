"""Training of the DQN agent: how a run starts, stops and resumes is read from top to bottom in `train`. What an update does
stands in models/dqn/learner.py."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import models.tft.training
from models.checkpoint import CheckpointError, Snapshot, check_weights, load_weights
from models.dqn.config import DQNConfig
from models.dqn.evaluation import YEAR_MICROS, Fill, HeldOut, curves, evaluate
from models.dqn.forecasts import ForecastInput, agent_table, carried
from models.dqn.learner import Learner, epsilon_at
from models.dqn.market import (
    ACTIONS,
    FeatureScaler,
    Market,
    feature_table,
    market_of,
    segments_of,
    table_digest,
    targets_of_actions,
)
from models.dqn.network import PositionQNetwork
from models.dqn.plain import speed
from models.features import FeatureContract
from models.progress import BestEpoch, EpochRow, OnCheckpoint, OnEpoch, StopRequested, TrainResult
from models.windows import SeriesArrays, UnfitSeriesError

logger = logging.getLogger(__name__)


def train(
    config: DQNConfig,
    series: SeriesArrays,
    *,
    on_epoch: OnEpoch,
    on_checkpoint: OnCheckpoint,
    stop_requested: StopRequested = lambda: False,
    resume: Snapshot | None = None,
    forecasts: ForecastInput | None = None,
) -> TrainResult:
    """Train on the train block, choose by the validation block, report on the test block.

    Calls `on_checkpoint` after every `checkpoint_every` epochs and exactly once with `is_final`, however training ends.
    `forecasts` come from models/dqn/forecasts.py, exactly when the configuration asks for them. Raises ValueError when no series
    has two train rows, or `resume` belongs to other data.
    """
    torch.manual_seed(config.seed)
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    market = market_of(config, series, forecasts)
    digest = table_digest(series)
    if forecasts is not None:
        digest = hashlib.sha256((digest + forecasts.digest).encode()).hexdigest()
    learner = Learner(config, market.table.to(device), market.returns, segments_of(market.blocks["train"]), market.scale, device)
    validation, test = (_held_out(config, series, market, rows) for rows in (market.blocks["val"], market.blocks["test"]))

    best, history = BestEpoch(), []
    epoch, in_epoch, loss_sum, elapsed = 0, 0, 0.0, 0.0
    best_weights = last_weights = _copy(learner.online)
    if resume is not None:
        meta = resume.metadata
        if meta["table"] != digest:
            raise ValueError(
                f"the resume state was made on other features or prices (sha256 {meta['table'][:12]}, these have {digest[:12]}): "
                "its row numbers mean nothing here; train again, without it"
            )
        learner.load(resume, meta["update"])
        best, history = BestEpoch(**meta["best"]), [EpochRow(**row) for row in meta["history"]]
        epoch, in_epoch, loss_sum, elapsed = meta["epoch"], meta["in_epoch"], meta["loss_sum"], meta["elapsed"]
        best_weights, last_weights = resume.part("best."), resume.part("last.")
        total = config.epochs * config.updates_per_epoch
        logger.info("dqn resumes at update %d of %d, with %d transitions", learner.updates, total, learner.replay.filled)

    def weights(tensors: dict[str, Tensor], which: str, stop_reason: str | None) -> Snapshot:
        metadata: dict[str, Any] = {
            "family": "dqn", "config": config.model_dump(mode="json"), "contract": series.contract.model_dump(mode="json"),
            "contract_fingerprint": series.contract.fingerprint, "series": list(series.names), "epoch": epoch,
            "best_epoch": best.epoch, "weights": which, "stop_reason": stop_reason, "reward_scale": market.scale,
        }  # fmt: skip
        scaling = {"scaler.mean": market.scaler.mean, "scaler.scale": market.scaler.scale}
        if forecasts is not None:
            scaling |= {f"tft.{name}": tensor for name, tensor in forecasts.tft.tensors.items()}
            metadata["tft"] = forecasts.tft.metadata
        return Snapshot({**{f"network.{k}": v for k, v in tensors.items()}, **scaling}, metadata)

    def resume_state() -> Snapshot:
        tensors = learner.state() | {f"best.{k}": v for k, v in best_weights.items()}
        tensors |= {f"last.{k}": v for k, v in last_weights.items()}
        metadata = {
            "epoch": epoch, "in_epoch": in_epoch, "update": learner.updates, "loss_sum": loss_sum, "elapsed": elapsed,
            "best": asdict(best), "history": [asdict(row) for row in history], "table": digest,
        }  # fmt: skip
        return Snapshot(tensors, metadata)

    stop_reason: Any = "all_epochs"
    finished = resume is not None and best.exhausted(config.early_stopping) and in_epoch == 0
    if finished:
        stop_reason = "early_stopping"
    while epoch < config.epochs and not finished:
        started = time.perf_counter()
        losses = torch.zeros((), dtype=torch.float64, device=device)
        while in_epoch < config.updates_per_epoch:
            if stop_requested():
                stop_reason = "interrupted"
                break
            loss = learner.update()
            losses += loss
            in_epoch += 1
        loss_sum += float(losses)
        elapsed += time.perf_counter() - started
        if stop_reason == "interrupted" and math.isfinite(loss_sum):
            break
        try:
            if not math.isfinite(loss_sum):
                raise FloatingPointError("the loss is not finite")
            actions = learner.best_actions(market.blocks["val"])
        except FloatingPointError as error:
            logger.error("dqn epoch %d: %s; the weights of epoch %d are kept", epoch + 1, error, epoch)
            stop_reason = "non_finite_loss"
            break
        epoch += 1
        score, values = None, {"epsilon": epsilon_at(learner.updates, config)}
        if actions:
            found = evaluate(actions, validation, config.fill)
            score = found["net_return_per_bar"]
            values |= {"val_net_return": found["net_return"], "val_fraction_of_optimum": found["fraction_of_optimum"]}
        last_weights = _copy(learner.online)
        row = EpochRow(epoch, loss_sum / config.updates_per_epoch, score, elapsed, values)
        history.append(row)
        if score is not None and best.update(epoch, score, config.early_stopping):
            best_weights = last_weights
        in_epoch, loss_sum, elapsed = 0, 0.0, 0.0
        on_epoch(row)
        if epoch % config.checkpoint_every == 0:
            on_checkpoint(epoch, False, weights(last_weights, "last", None), resume_state())
        if score is not None and best.exhausted(config.early_stopping):
            stop_reason = "early_stopping"
            break

    use_best = config.final_weights == "best" and best.epoch is not None and stop_reason in {"all_epochs", "early_stopping"}
    which = "best" if use_best else "last"
    if stop_reason == "interrupted":
        on_checkpoint(epoch, True, weights(_copy(learner.online), "last", stop_reason), resume_state())
        return TrainResult(epoch, stop_reason, best.epoch, "last", tuple(history), {}, {})
    final = best_weights if use_best else last_weights
    learner.online.load_state_dict(final)
    # Before the report: whatever that may raise, the final file exists
    on_checkpoint(epoch, True, weights(final, which, stop_reason), None)
    metrics, report = _final_report(learner.best_actions(market.blocks["test"]), test, config, best)
    if forecasts is not None:
        metrics["tft"] = forecasts.told
    report["speed"] = took = speed(config, market, device)
    logger.info("dqn update %.2f ms, %.2f times as fast as the plain loop", 1e3 * took.ours, took.ratio)
    return TrainResult(epoch, stop_reason, best.epoch, "best" if use_best else "last", tuple(history), metrics, report)


def _copy(network: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}


def _bars_per_year(series: SeriesArrays) -> float:
    """Bars of a series per calendar year, the mean over series with two rows or more."""
    rates = []
    for first, rows in zip(series.offsets[:-1], series.history_rows, strict=True):
        if rows >= 2 and (span := series.timestamps[first + rows - 1] - series.timestamps[first]) > 0:
            rates.append((rows - 1) / (span / YEAR_MICROS))
    return float(np.mean(rates)) if rates else 252.0


def _held_out(config: DQNConfig, series: SeriesArrays, market: Market, rows: NDArray[np.int64]) -> HeldOut:
    """A block for evaluation; the last row of a segment has no bar to earn."""
    bars = [slice(a, b - 1) for a, b in rows if b - a >= 2]
    returns = market.returns.numpy()
    return HeldOut(
        [returns[bar] for bar in bars], [series.timestamps[bar] for bar in bars], targets_of_actions(config.positions).numpy(),
        config.fee, _bars_per_year(series), config.seed,
    )  # fmt: skip


def _final_report(
    actions: list[NDArray[np.int64]], test: HeldOut, config: DQNConfig, best: BestEpoch
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metrics of the test block under both fills, the verdict, and curves for the report."""
    metrics: dict[str, Any] = {"validation_score": best.score}
    fills: tuple[Fill, ...] = ("close", "next")
    for fill in fills:
        metrics[f"test_fill_{fill}"] = evaluate(actions, test, fill)
    lows = [metrics[f"test_fill_{fill}"]["net_return_per_bar_low"] for fill in fills]
    metrics["beats_flat"] = all(low is not None and low > 0 for low in lows)
    metrics["verdict"] = "beats flat" if metrics["beats_flat"] else "does not beat flat"
    return metrics, curves(actions, test, config.fill)


@dataclass(frozen=True)
class Decision:
    """What the agent does on the last complete bar of a series, by the position held now."""

    series: str
    timestamp: int  # microseconds since 1970 UTC
    actions: dict[str, str]  # position word -> action word
    values: dict[str, list[float]]  # position word -> Q of sell, hold, buy


def rebuilt(snapshot: Snapshot) -> tuple[PositionQNetwork, FeatureScaler]:
    """Network and scaler of a published agent. Raises CheckpointError when weights and config do not fit, also those of the TFT
    that it reads."""
    config = DQNConfig.model_validate(snapshot.metadata["config"])
    contract = FeatureContract.model_validate(snapshot.metadata["contract"])
    scaling = [snapshot.tensors.get(f"scaler.{name}", torch.zeros(0)) for name in ("mean", "scale")]
    width = len(contract.features)
    if config.tft_folds:
        forecaster = models.tft.training.rebuilt(tft := carried(snapshot))[0]
        width += forecaster.horizon * len(tft.metadata["config"]["quantiles"])
    if any(tuple(x.shape) != (width,) or not bool(torch.isfinite(x).all()) for x in scaling):
        raise CheckpointError(f"the scaler is not of {width} finite features")
    weights = snapshot.part("network.")
    with torch.device("meta"):  # no memory for a network that the file does not fill
        check_weights(PositionQNetwork(width, config.hidden_sizes), weights)
    network = PositionQNetwork(width, config.hidden_sizes)
    load_weights(network, weights)
    return network, FeatureScaler(*scaling)


def decide(snapshot: Snapshot, series: SeriesArrays) -> list[Decision]:
    """Greedy decisions of a published agent. Raises CheckpointError when weights and config do not fit, ValueError on
    another contract."""
    trained = FeatureContract.model_validate(snapshot.metadata["contract"])
    if trained.features != series.contract.features:
        raise ValueError("the source has other feature columns than the agent was trained on")
    network, scaler = rebuilt(snapshot)
    ends = series.offsets[:-1] + series.history_rows
    last = np.stack([np.maximum(ends - 1, series.offsets[:-1]), ends], axis=1)
    table, seen = agent_table(snapshot, series, feature_table(series), last)
    whole = seen[:, 0] < seen[:, 1]
    if left := [n for n, rows, good in zip(series.names, series.history_rows, whole, strict=True) if rows and not good]:
        tft = carried(snapshot).metadata["config"]
        needs = f"{tft['context']} complete rows, later than what the TFT learnt from, and {tft['horizon']} rows ahead"
        text = f"no forecast, so no decision: {', '.join(left)} (it takes {needs}: key and future columns alone)"
        if not whole.any():
            raise UnfitSeriesError(text)
        logger.warning(text)
    rows, names = seen[whole, 0].tolist(), [name for name, good in zip(series.names, whole, strict=True) if good]
    with torch.no_grad():
        values = network(scaler.apply(table[rows]))
    words = ("short", "flat", "long")
    out = []
    for name, row, q in zip(names, rows, values, strict=True):
        actions = {word: ACTIONS[int(q[i].argmax())] for i, word in enumerate(words)}
        out.append(Decision(name, int(series.timestamps[row]), actions, {w: q[i].tolist() for i, w in enumerate(words)}))
    return out
