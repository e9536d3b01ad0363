"""The update as a textbook has it: nn.Linear, autograd, Adam parameter by parameter. What models/dqn/learner.py must equal to
the bit, and what it is faster than."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from models.dqn.config import DQNConfig
from models.dqn.learner import Learner, learning_rate_at
from models.dqn.market import Market, segments_of
from models.dqn.network import PositionQNetwork


class PlainLearner(Learner):
    """A learner whose networks are ordinary modules; environment, replay and exploration are those of `Learner`."""

    def __init__(self, config: DQNConfig, table: Tensor, returns: Tensor, segments: Tensor, scale: float, device: str) -> None:
        super().__init__(config, table, returns, segments, scale, device)
        own = []
        for flattened in (self.online, self.target_network):
            network = PositionQNetwork(table.shape[1], config.hidden_sizes).to(device)
            network.load_state_dict(flattened.state_dict())
            own.append(network)
        self.online, self.target_network = own
        kind = torch.optim.AdamW if config.weight_decay else torch.optim.Adam
        self.optimizer = kind(
            self.online.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )  # without `fused`, what pip installs would take longer still
        self.exploring = self  # type: ignore[assignment]

    def forward(self, table: Tensor, rows: Tensor) -> Tensor:
        """Action values [B, 9] of those rows of the feature table."""
        return self.online(table[rows]).view(-1, 9)

    @torch.no_grad()
    def renew_target(self) -> None:
        tau = self.config.target_tau
        for kept, new in zip(self.target_network.parameters(), self.online.parameters(), strict=True):
            kept.lerp_(new, tau) if tau < 1 else kept.copy_(new)

    def update(self) -> Tensor:
        """One optimizer step; its loss."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.updates, config)
        rows, cells = self._batch()
        with torch.no_grad():
            best = self.online(self.table[rows + 1]).argmax(2, keepdim=True)
            after = self.target_network(self.table[rows + 1]).gather(2, best)[:, :, 0]
        rewards, held = self.env.rewards[rows].gather(1, cells), self.env.next_held[cells]
        loss = huber_loss(self.forward(self.table, rows).gather(1, cells), rewards + config.discount * after.gather(1, held))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.online.parameters(), config.gradient_clip)
        self.optimizer.step()
        self.updates += 1
        if self.updates % config.target_update == 0:
            self.renew_target()
        return loss.detach()


class Speed(NamedTuple):
    """Seconds of an update, ours and the plain one."""

    ours: float
    plain: float

    @property
    def ratio(self) -> float:
        """How many times as fast ours is."""
        return self.plain / max(self.ours, 1e-9)


def speed(config: DQNConfig, market: Market, device: str) -> Speed:
    """Both kinds of update on a run's data, in turn, two rounds after one that warms up. Draws random numbers.

    CPU seconds on a CPU, so that other work on the machine does not count; on a GPU seconds until it is done.
    """
    table, segments = market.table.to(device), segments_of(market.blocks["train"])
    made = [kind(config, table, market.returns, segments, market.scale, device) for kind in (Learner, PlainLearner)]
    clock = time.process_time if device == "cpu" else time.perf_counter
    updates = min(config.target_update, 20)
    seconds: list[list[float]] = [[], []]
    for number in range(3):
        for learner, spent in zip(made, seconds, strict=True):
            started = clock()
            losses = [learner.update() for _ in range(updates if number else 3)]
            float(losses[-1])
            if number:
                spent.append((clock() - started) / updates)
    ours, plain = (sum(spent) / len(spent) for spent in seconds)
    return Speed(ours, plain)
