"""The market as a Gymnasium environment, for agents of other libraries to be compared on it (optional extra `gym`).
Bar by bar it pays and shows what models/dqn/market.py does."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from models.dqn.config import DQNConfig
from models.dqn.market import ACTIONS, CLIP, FLAT, Market, reward_table, segments_of, targets_of_actions
from models.windows import Block

Observation = NDArray[np.float32]


class GymMarket(gymnasium.Env[Observation, np.int64]):
    """One block of a market. Observation: the standardised features of row t, then the held position (-1, 0, 1), [F + 1]
    float32. Actions: 0 sell, 1 hold, 2 buy. Rewards are divided by `market.scale`. A segment's end truncates.

    Raises ValueError when the block has no bar to trade.
    """

    def __init__(self, market: Market, config: DQNConfig, block: Block = "train") -> None:
        targets = targets_of_actions(config.positions)
        rewards = reward_table(market.returns, targets, fee=config.fee, reward_scale=market.scale, fill=config.fill)
        spans = [(int(first), int(end) - 1) for first, end in segments_of(market.blocks[block])]
        if not spans:
            raise ValueError(f"the {block} block has no bar to trade")
        self._table, self._rewards, self._next_held = market.table.numpy(), rewards.numpy(), targets.reshape(9).tolist()
        self._last_row = {row: last for first, last in spans for row in range(first, last)}
        self._rows = list(self._last_row)
        self._row, self._held, self._end = self._rows[0], FLAT, self._last_row[self._rows[0]]
        self.observation_space = Box(-CLIP, CLIP, (self._table.shape[1] + 1,), np.float32)
        self.action_space = Discrete(len(ACTIONS))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Flat at a random row of the block, or at `options["row"]`. Raises KeyError for a row without a bar to trade."""
        super().reset(seed=seed)
        row = (options or {}).get("row")
        self._row = self._rows[self.np_random.integers(len(self._rows))] if row is None else row
        self._held, self._end = FLAT, self._last_row[self._row]
        return self._observation(), {"row": self._row}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """One bar on; never terminated: a market does not end with its data."""
        cell = 3 * self._held + int(action)
        reward = float(self._rewards[self._row, cell])
        self._row, self._held = self._row + 1, self._next_held[cell]
        return self._observation(), reward, False, self._row >= self._end, {"row": self._row}

    def _observation(self) -> Observation:
        """An array of its own every time: a replay may keep it."""
        out = np.empty(self._table.shape[1] + 1, np.float32)
        out[:-1], out[-1] = self._table[self._row], self._held - FLAT
        return out
