"""Replay by index: a transition is a row number, a position and an action, not a copy of features. 5 bytes each; the reward
follows from them (models/dqn/market.py)."""

from __future__ import annotations

import torch
from torch import Tensor


class IndexReplay:
    """A ring of transitions: row int32, cell int8 (3 x held position index + action)."""

    def __init__(self, capacity: int, device: str = "cpu") -> None:
        self.capacity, self.filled, self.next = capacity, 0, 0
        self.row = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.cell = torch.zeros(capacity, dtype=torch.int8, device=device)

    @property
    def bytes_per_transition(self) -> int:
        """Memory of one transition."""
        return self.row.element_size() + self.cell.element_size()

    def add(self, row: Tensor, cell: Tensor) -> None:
        """Append E transitions (E at most the capacity), over the oldest when full."""
        until_end = self.capacity - self.next
        for part in (slice(0, until_end), slice(until_end, None)):
            if count := len(row[part]):
                self.row[self.next : self.next + count] = row[part]
                self.cell[self.next : self.next + count] = cell[part]
                self.next = (self.next + count) % self.capacity
        self.filled = min(self.filled + len(row), self.capacity)

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """Row (int32) and cell (int64) of `count` transitions, drawn with replacement."""
        at = torch.randint(self.filled, (count,), device=self.row.device)
        return self.row.index_select(0, at), self.cell.index_select(0, at).long()

    def state(self) -> dict[str, Tensor]:
        """The filled part, for the resume state."""
        return {"row": self.row[: self.filled], "cell": self.cell[: self.filled], "next": torch.tensor(self.next)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take `state()` of a ring of the same capacity back."""
        self.filled, self.next = len(state["row"]), int(state["next"])
        self.row[: self.filled], self.cell[: self.filled] = state["row"], state["cell"]
