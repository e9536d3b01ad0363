"""Training of the DQN agent: double DQN (van Hasselt et al. 2016) with one head per held position, index replay and
rewards scaled by the train returns' deviation; or `backup: full`, fitted Q iteration over all position-action cells.
How a run starts, stops and resumes is read from top to bottom in `train`."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import huber_loss

from models.checkpoint import CheckpointError, Snapshot, check_weights, load_weights
from models.dqn.config import DQNConfig
from models.dqn.evaluation import YEAR_MICROS, equity_curves, evaluate
from models.dqn.market import (
    ACTIONS,
    FeatureScaler,
    MarketEnv,
    feature_table,
    log_returns,
    rewards_of,
    segments_of,
    table_digest,
    targets_of_actions,
)
from models.dqn.network import PositionQNetwork
from models.dqn.replay import IndexReplay
from models.features import FeatureContract
from models.progress import BestEpoch, EpochRow, OnCheckpoint, OnEpoch, StopRequested, TrainResult
from models.windows import SeriesArrays, block_rows

logger = logging.getLogger(__name__)


def epsilon_at(update: int, config: DQNConfig) -> float:
    """Share of random actions at an absolute update: linear from start to end."""
    done = min(1.0, update / config.epsilon_decay_updates)
    return config.epsilon_start + done * (config.epsilon_end - config.epsilon_start)


def learning_rate_at(update: int, config: DQNConfig) -> float:
    """Adam's step size at an absolute update: linear over all epochs' updates."""
    done = min(1.0, update / (config.epochs * config.updates_per_epoch))
    return config.learning_rate + done * (config.final_learning_rate - config.learning_rate)


def reward_scale_of(returns: Tensor, train_rows: NDArray[np.int64]) -> float:
    """Standard deviation of the log returns inside the train block; 1 when they are constant."""
    inside = torch.cat([returns[a : b - 1] for a, b in train_rows if b - a >= 2])
    scale = float(inside.std(correction=0))
    return scale if scale > 0 else 1.0


class Learner:
    """Networks, optimizer, replay and environment of one run: what `update` moves on and a resume state holds."""

    def __init__(self, config: DQNConfig, table: Tensor, returns: Tensor, segments: Tensor, scale: float, device: str) -> None:
        self.config, self.table, self.device = config, table, device
        self.online = PositionQNetwork(table.shape[1], config.hidden_sizes).to(device)
        self.target_network = PositionQNetwork(table.shape[1], config.hidden_sizes).to(device)
        self.target_network.load_state_dict(self.online.state_dict())
        kind = torch.optim.AdamW if config.weight_decay else torch.optim.Adam
        self.optimizer = kind(self.online.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)
        self.env = MarketEnv(
            returns, segments, targets_of_actions(config.positions), fee=config.fee, reward_scale=scale, fill=config.fill,
            num_envs=config.num_envs,
        )  # fmt: skip
        self.replay = IndexReplay(config.replay_size)
        self.updates = 0
        self.train_rows = torch.cat([torch.arange(int(a), int(b) - 1) for a, b in segments])

    def explore(self) -> None:
        """One bar in every copy of the market: epsilon-greedy, one coin per copy."""
        env = self.env
        with torch.no_grad():
            values = self.online(self.table[env.rows.to(self.device)]).cpu()
        greedy = values[torch.arange(len(env.rows)), env.held].argmax(1)
        coin = torch.rand(len(env.rows)) < epsilon_at(self.updates, self.config)
        actions = torch.where(coin, torch.randint(3, (len(env.rows),)), greedy)
        rows, held = env.rows.clone(), env.held.clone()
        rewards, truncated = env.step(actions)
        self.replay.add(rows, held, actions, rewards, truncated)

    def update(self) -> Tensor:
        """One optimizer step; its loss, not synchronised."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.updates, config)
        loss = self._full_loss() if config.backup == "full" else self._sampled_loss()
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.online.parameters(), config.gradient_clip)
        self.optimizer.step()
        self.updates += 1
        if self.updates % config.target_update == 0:
            with torch.no_grad():
                for theirs, ours in zip(self.target_network.parameters(), self.online.parameters(), strict=True):
                    theirs.lerp_(ours, config.target_tau) if config.target_tau < 1 else theirs.copy_(ours)
        # A finite loss with a gradient that is not spoils the weights all the same
        return torch.where(norm.isfinite(), loss.detach(), math.nan)

    def _next_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Online and target values [B, 3, 3] of the rows after `rows`; a truncated segment bootstraps from its last row."""
        features = self.table[(rows + 1).to(self.device)]
        with torch.no_grad():
            return self.online(features), self.target_network(features)

    def _sampled_loss(self) -> Tensor:
        while self.replay.filled < self.config.batch_size:
            self.explore()
        self.explore()
        rows, held, actions, rewards = (t.to(self.device) for t in self.replay.sample(self.config.batch_size))
        each = torch.arange(len(rows), device=self.device)
        new = self.env.targets.to(self.device)[held, actions]
        online_next, target_next = self._next_values(rows)
        best = online_next[each, new].argmax(1)  # double DQN: the online network chooses, the target network values
        td_target = rewards + self.config.discount * target_next[each, new, best]
        values = self.online(self.table[rows])[each, held, actions]
        return huber_loss(values, td_target)

    def _full_loss(self) -> Tensor:
        rows = self.train_rows[torch.randint(len(self.train_rows), (self.config.batch_size,))]
        held = torch.arange(3)[None, :, None].expand(len(rows), 3, 3)
        actions = torch.arange(3)[None, None, :].expand(len(rows), 3, 3)
        rewards, new = rewards_of(self.env, rows[:, None, None].expand(len(rows), 3, 3), held, actions)
        online_next, target_next = self._next_values(rows)
        best = online_next.argmax(2)  # [B, 3] by position held next
        value = target_next.gather(2, best[:, :, None])[:, :, 0]
        after = value.gather(1, new.reshape(len(rows), 9).to(self.device)).view(-1, 3, 3)
        td_target = rewards.to(self.device) + self.config.discount * after
        return huber_loss(self.online(self.table[rows.to(self.device)]), td_target)

    def best_actions(self, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Greedy action by (bar, held position) for every segment of a block; the last row has no bar to earn."""
        out = []
        with torch.no_grad():
            for first, end in rows:
                if end - first >= 2:
                    values = self.online(self.table[first : end - 1])
                    if not bool(torch.isfinite(values).all()):
                        raise FloatingPointError("action values are not finite")
                    out.append(values.argmax(2).cpu().numpy())
        return out

    def state(self) -> dict[str, Tensor]:
        """Everything that the next update depends on, as tensors."""
        out = {f"network.{k}": v.clone() for k, v in self.online.state_dict().items()}
        out |= {f"target_network.{k}": v.clone() for k, v in self.target_network.state_dict().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            out |= {f"optimizer.{index}.{name}": torch.as_tensor(value).clone() for name, value in values.items()}
        out |= {f"replay.{k}": v.clone() for k, v in self.replay.state().items()}
        out |= {f"env.{k}": getattr(self.env, k).clone() for k in ("rows", "held", "ends")}
        out["rng.torch"] = torch.get_rng_state()
        return out

    def load(self, saved: Snapshot, updates: int) -> None:
        """Take `state()` back."""
        load_weights(self.online, saved.part("network."))
        load_weights(self.target_network, saved.part("target_network."))
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in saved.part("optimizer.").items():
            index, _, field = name.partition(".")
            moments.setdefault(int(index), {})[field] = value.clone()
        plain = self.optimizer.state_dict()
        self.optimizer.load_state_dict({"state": moments, "param_groups": plain["param_groups"]})
        self.replay.load(saved.part("replay."))
        for name, value in saved.part("env.").items():
            setattr(self.env, name, value.clone())
        torch.set_rng_state(saved.tensors["rng.torch"])
        self.updates = updates


@dataclass
class _Blocks:
    """A block's log returns and their time stamps by segment, for evaluation."""

    rows: NDArray[np.int64]
    returns: list[NDArray[np.float64]]
    times: list[NDArray[np.int64]]


def _block(rows: NDArray[np.int64], returns: Tensor, timestamps: NDArray[np.int64]) -> _Blocks:
    numbers, bars = returns.numpy(), [slice(a, b - 1) for a, b in rows if b - a >= 2]
    return _Blocks(rows, [numbers[bar] for bar in bars], [timestamps[bar] for bar in bars])


def train(
    config: DQNConfig,
    series: SeriesArrays,
    *,
    on_epoch: OnEpoch,
    on_checkpoint: OnCheckpoint,
    stop_requested: StopRequested = lambda: False,
    resume: Snapshot | None = None,
) -> TrainResult:
    """Train on the train block, choose by the validation block, report on the test block.

    Calls `on_checkpoint` after every `checkpoint_every` epochs and exactly once with `is_final`, however training ends.
    Raises ValueError when no series has two train rows, or `resume` belongs to other data.
    """
    torch.manual_seed(config.seed)
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    blocks = block_rows(series, config.split, series.contract.lookback_bars + 1)
    segments = segments_of(blocks["train"])
    if not len(segments):
        lengths = dict(zip(series.names, series.history_rows.tolist(), strict=True))
        raise ValueError(f"no series has two rows in the train block; rows by series: {lengths}")
    raw, returns = feature_table(series), log_returns(series)
    inside = torch.cat([torch.arange(int(a), int(b)) for a, b in segments])
    scaler = FeatureScaler.fit(raw[inside])
    table = scaler.apply(raw).to(device)
    scale = reward_scale_of(returns, blocks["train"])
    digest = table_digest(series)
    learner = Learner(config, table, returns, segments, scale, device)
    validation, test = (_block(rows, returns, series.timestamps) for rows in (blocks["val"], blocks["test"]))
    per_year = _bars_per_year(series)

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
            "best_epoch": best.epoch, "weights": which, "stop_reason": stop_reason, "reward_scale": scale,
        }  # fmt: skip
        scaling = {"scaler.mean": scaler.mean, "scaler.scale": scaler.scale}
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
        losses = torch.zeros((), dtype=torch.float64)
        while in_epoch < config.updates_per_epoch:
            if stop_requested():
                stop_reason = "interrupted"
                break
            loss = learner.update()
            losses = losses + loss.double().cpu() if device == "cpu" else losses + loss.double()
            in_epoch += 1
        loss_sum += float(losses)
        elapsed += time.perf_counter() - started
        if stop_reason == "interrupted" and math.isfinite(loss_sum):
            break
        try:
            if not math.isfinite(loss_sum):
                raise FloatingPointError("the loss is not finite")
            actions = learner.best_actions(validation.rows)
        except FloatingPointError as error:
            logger.error("dqn epoch %d: %s; the weights of epoch %d are kept", epoch + 1, error, epoch)
            stop_reason = "non_finite_loss"
            break
        epoch += 1
        score, values = None, {"epsilon": epsilon_at(learner.updates, config)}
        if actions:
            found = evaluate(
                actions, validation.returns, validation.times, learner.env.targets.numpy(), fee=config.fee,
                fill=config.fill, bars_per_year=per_year, seed=config.seed,
            )  # fmt: skip
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
    metrics, report = _final_report(learner, test, config, per_year, best)
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


def _final_report(
    learner: Learner, test: _Blocks, config: DQNConfig, per_year: float, best: BestEpoch
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metrics of the test block under both fills, the verdict, equity curves and positions."""
    targets = learner.env.targets.numpy()
    actions = learner.best_actions(test.rows)
    metrics: dict[str, Any] = {"validation_score": best.score}
    fills: tuple[Any, ...] = ("close", "next")
    for fill in fills:
        metrics[f"test_fill_{fill}"] = evaluate(
            actions, test.returns, test.times, targets, fee=config.fee, fill=fill, bars_per_year=per_year, seed=config.seed
        )
    lows = [metrics[f"test_fill_{fill}"]["net_return_per_bar_low"] for fill in fills]
    metrics["beats_flat"] = all(low is not None and low > 0 for low in lows)
    metrics["verdict"] = "beats flat" if metrics["beats_flat"] else "does not beat flat"
    return metrics, equity_curves(actions, test.returns, targets, config.fee, config.fill)


@dataclass(frozen=True)
class Decision:
    """What the agent does on the last complete bar of a series, by the position held now."""

    series: str
    timestamp: int  # microseconds since 1970 UTC
    actions: dict[str, str]  # position word -> action word
    values: dict[str, list[float]]  # position word -> Q of sell, hold, buy


def rebuilt(snapshot: Snapshot) -> tuple[PositionQNetwork, FeatureScaler]:
    """Network and scaler of a published agent. Raises CheckpointError when weights and config do not fit."""
    config = DQNConfig.model_validate(snapshot.metadata["config"])
    contract = FeatureContract.model_validate(snapshot.metadata["contract"])
    scaling, width = (
        [snapshot.tensors.get(f"scaler.{name}", torch.zeros(0)) for name in ("mean", "scale")],
        len(contract.features),
    )
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
    rows = [int(a + n - 1) for a, n in zip(series.offsets[:-1], series.history_rows, strict=True) if n]
    names = [name for name, n in zip(series.names, series.history_rows, strict=True) if n]
    with torch.no_grad():
        values = network(scaler.apply(feature_table(series)[rows]))
    words = ("short", "flat", "long")
    out = []
    for name, row, q in zip(names, rows, values, strict=True):
        actions = {word: ACTIONS[int(q[i].argmax())] for i, word in enumerate(words)}
        out.append(Decision(name, int(series.timestamps[row]), actions, {w: q[i].tolist() for i, w in enumerate(words)}))
    return out
