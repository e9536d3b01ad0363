"""What an update moves on: double DQN (van Hasselt et al. 2016) with one head per held position, index replay and rewards
scaled by the train returns' deviation; or `backup: full`, fitted Q iteration over all position-action cells."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.checkpoint import Snapshot, load_weights
from models.dqn.config import DQNConfig
from models.dqn.market import FLAT, MarketEnv, targets_of_actions
from models.dqn.network import Passes, PositionQNetwork, flatten
from models.dqn.replay import IndexReplay

ROWS_AT_ONCE = 8192


def epsilon_at(update: int, config: DQNConfig) -> float:
    """Share of random actions at an absolute update: linear from start to end."""
    done = min(1.0, update / config.epsilon_decay_updates)
    return config.epsilon_start + done * (config.epsilon_end - config.epsilon_start)


def learning_rate_at(update: int, config: DQNConfig) -> float:
    """Adam's step size at an absolute update: linear over all epochs' updates."""
    done = min(1.0, update / (config.epochs * config.updates_per_epoch))
    return config.learning_rate + done * (config.final_learning_rate - config.learning_rate)


def huber(values: Tensor, td_target: Tensor) -> tuple[Tensor, Tensor]:
    """Mean Huber loss (delta 1) and its gradient by `values`; equal to torch's to the bit, in half the calls."""
    errors = values - td_target
    clipped = errors.clamp(-1, 1)
    loss = errors.sub_(clipped, alpha=0.5).mul_(clipped).mean()
    return loss, clipped.mul_(1 / clipped.numel())


class Learner:
    """Networks, optimizer, replay and environment of one run: what `update` moves on and a resume state holds. Everything lies
    on the device, and an update reads nothing back from it."""

    def __init__(self, config: DQNConfig, table: Tensor, returns: Tensor, segments: Tensor, scale: float, device: str) -> None:
        self.config, self.table, self.device = config, table, device
        self.online = PositionQNetwork(table.shape[1], config.hidden_sizes).to(device)
        self.target_network = PositionQNetwork(table.shape[1], config.hidden_sizes).to(device)
        self.target_network.load_state_dict(self.online.state_dict())
        self.flat, self.flat_target = flatten(self.online), flatten(self.target_network)
        kind = torch.optim.AdamW if config.weight_decay else torch.optim.Adam
        self.optimizer = kind([self.flat], lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)
        self.env = MarketEnv(
            returns, segments, targets_of_actions(config.positions), fee=config.fee, reward_scale=scale, fill=config.fill,
            num_envs=config.num_envs, device=device,
        )  # fmt: skip
        self.replay = IndexReplay(config.replay_size, device)
        self.passes, self.target_passes = (Passes(n, config.batch_size) for n in (self.online, self.target_network))
        self.exploring = Passes(self.online, config.num_envs)
        self.gradient = torch.zeros(config.batch_size, 9, device=device)
        self.first_cell = 3 * FLAT if config.positions == "long_only" else 0
        self.all_cells = torch.arange(self.first_cell, 9, device=device).expand(config.batch_size, -1)
        self.updates = 0
        # The target network's values of every row pay when an interval asks for more rows than there are
        pays = config.target_tau == 1 and len(self.env.bars) < config.batch_size * config.target_update
        self.cached = torch.zeros(len(table), 9, device=device) if pays else None
        self._fill_cache()

    @torch.no_grad()
    def _fill_cache(self) -> None:
        if self.cached is not None:
            size = self.config.batch_size
            for rows in torch.split(self.env.bars + 1, size):
                # Always batches of one size: the products of another one may differ in the last bit
                some = rows[torch.arange(size, device=self.device) % len(rows)]
                self.cached[some] = self.target_passes.forward(self.table, some)

    @torch.no_grad()
    def explore(self) -> None:
        """One bar in every copy of the market: epsilon-greedy, one coin per copy. A copy that explores starts from a random
        position too: the market would pay it the same, and flat is otherwise held after a restart alone."""
        env, count = self.env, self.config.num_envs
        values = self.exploring.forward(self.table, env.rows).view(-1, 3, 3)
        greedy = values.argmax(2).gather(1, env.held[:, None])[:, 0]
        coin = torch.rand(count, device=self.device) < epsilon_at(self.updates, self.config)
        cells = torch.randint(self.first_cell, 9, (count,), device=self.device)
        env.held = torch.where(coin, cells // 3, env.held)
        actions = torch.where(coin, cells % 3, greedy)
        self.replay.add(env.rows, 3 * env.held + actions)
        env.step(actions)

    def _batch(self) -> tuple[Tensor, Tensor]:
        """Rows [B] and cells [B, K]: one replayed cell a row, or with `backup: full` all of a random row."""
        config, bars = self.config, self.env.bars
        if config.backup == "full":
            at = torch.randint(len(bars), (config.batch_size,), device=self.device)
            return bars.index_select(0, at), self.all_cells
        while self.replay.filled < config.batch_size:
            self.explore()
        if self.updates % config.updates_per_bar == 0:
            self.explore()
        rows, cells = self.replay.sample(config.batch_size)
        return rows, cells[:, None]

    @torch.no_grad()
    def update(self) -> Tensor:
        """One optimizer step; its loss, not synchronised. NaN when loss or gradient are not finite."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.updates, config)
        rows, cells = self._batch()
        td_target = self.td_target(rows, cells)
        values = self.passes.forward(self.table, rows).gather(1, cells)
        loss, errors = huber(values, td_target)
        self.passes.backward(self.gradient.zero_().scatter_(1, cells, errors))
        norm = torch.linalg.vector_norm(self.flat.grad)
        # Divides the gradient, in Adam's own pass over it
        self.optimizer.grad_scale = (norm / config.gradient_clip).clamp_(min=1)  # type: ignore[attr-defined]
        self.optimizer.step()
        self.updates += 1
        if self.updates % config.target_update == 0:
            self.renew_target()
        # A finite loss with a gradient that is not spoils the weights all the same: 0 times infinity is NaN
        return torch.add(loss, norm, alpha=0)

    @torch.no_grad()
    def renew_target(self) -> None:
        """Move the target network to the online one, wholly or by `target_tau`."""
        tau = self.config.target_tau
        self.flat_target.lerp_(self.flat, tau) if tau < 1 else self.flat_target.copy_(self.flat)
        self._fill_cache()

    @torch.no_grad()
    def td_target(self, rows: Tensor, cells: Tensor) -> Tensor:
        """Reward plus discounted value of the best next action, [B, K]: the online network chooses it, the target network
        values it. A truncated segment bootstraps from its last row."""
        best = self.passes.forward(self.table, rows + 1).view(-1, 3, 3).argmax(2, keepdim=True)
        if self.cached is None:
            values = self.target_passes.forward(self.table, rows + 1)
        else:
            values = self.cached.index_select(0, rows + 1)
        after = values.view(-1, 3, 3).gather(2, best)[:, :, 0]
        rewards = self.env.rewards.index_select(0, rows).gather(1, cells)
        return rewards + self.config.discount * after.gather(1, self.env.next_held.take(cells))

    @torch.no_grad()
    def best_actions(self, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Greedy action by (bar, held position) for every segment of a block; the last row has no bar to earn."""
        out = []
        for first, end in rows:
            if end - first >= 2:
                values = torch.cat([self.online(part) for part in torch.split(self.table[first : end - 1], ROWS_AT_ONCE)])
                if not bool(torch.isfinite(values).all()):
                    raise FloatingPointError("action values are not finite")
                out.append(values.argmax(2).cpu().numpy())
        return out

    def state(self) -> dict[str, Tensor]:
        """Everything that the next update depends on, as tensors."""
        parts = {
            "network": self.online.state_dict(), "target_network": self.target_network.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"].get(0, {}), "replay": self.replay.state(),
            "env": {name: getattr(self.env, name) for name in ("rows", "held", "ends")},
            "rng": {"torch": torch.get_rng_state(), **({"cuda": torch.cuda.get_rng_state()} if self.device == "cuda" else {})},
        }  # fmt: skip
        return {f"{part}.{name}": value.cpu().clone() for part, values in parts.items() for name, value in values.items()}

    def load(self, saved: Snapshot, updates: int) -> None:
        """Take `state()` back."""
        load_weights(self.online, saved.part("network."))
        load_weights(self.target_network, saved.part("target_network."))
        moments = {name: value.clone() for name, value in saved.part("optimizer.").items()}
        plain = self.optimizer.state_dict()
        self.optimizer.load_state_dict({"state": {0: moments} if moments else {}, "param_groups": plain["param_groups"]})
        self.replay.load(saved.part("replay."))
        for name, value in saved.part("env.").items():
            setattr(self.env, name, value.to(self.device, copy=True))
        torch.set_rng_state(saved.tensors["rng.torch"])
        if self.device == "cuda" and "rng.cuda" in saved.tensors:
            torch.cuda.set_rng_state(saved.tensors["rng.cuda"])
        self.updates = updates
        self._fill_cache()
