"""Replay by index: a transition is a row number, not a copy of its features. 11 bytes each."""

from __future__ import annotations

import torch
from torch import Tensor


class IndexReplay:
    """A ring of transitions: row int32, position int8, action int8, reward float32, truncated bool."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.filled, self.next = capacity, 0, 0
        self.row = torch.zeros(capacity, dtype=torch.int32)
        self.held = torch.zeros(capacity, dtype=torch.int8)
        self.action = torch.zeros(capacity, dtype=torch.int8)
        self.reward = torch.zeros(capacity, dtype=torch.float32)
        self.truncated = torch.zeros(capacity, dtype=torch.bool)

    @property
    def bytes_per_transition(self) -> int:
        """Memory of one transition."""
        return sum(t.element_size() for t in (self.row, self.held, self.action, self.reward, self.truncated))

    def add(self, row: Tensor, held: Tensor, action: Tensor, reward: Tensor, truncated: Tensor) -> None:
        """Append E transitions, over the oldest when full."""
        at = (torch.arange(len(row)) + self.next) % self.capacity
        self.row[at], self.held[at] = row.int(), held.to(torch.int8)
        self.action[at], self.reward[at], self.truncated[at] = action.to(torch.int8), reward, truncated
        self.next = (self.next + len(row)) % self.capacity
        self.filled = min(self.filled + len(row), self.capacity)

    def sample(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Row, position, action (int64) and reward of `count` transitions, drawn with replacement."""
        at = torch.randint(self.filled, (count,))
        return self.row[at].long(), self.held[at].long(), self.action[at].long(), self.reward[at]

    def state(self) -> dict[str, Tensor]:
        """The filled part, for the resume state."""
        n = self.filled
        return {
            "row": self.row[:n], "held": self.held[:n], "action": self.action[:n], "reward": self.reward[:n],
            "truncated": self.truncated[:n], "next": torch.tensor(self.next),
        }  # fmt: skip

    def load(self, state: dict[str, Tensor]) -> None:
        """Take `state()` of a ring of the same capacity back."""
        self.filled, self.next = len(state["row"]), int(state["next"])
        for name in ("row", "held", "action", "reward", "truncated"):
            getattr(self, name)[: self.filled] = state[name]
