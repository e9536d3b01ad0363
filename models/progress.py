"""What a training loop tells while it runs and when it ends, for both families: epochs, checkpoints, the result,
and the memory of the best epoch. The loops themselves stand in models/tft and models/dqn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from models.checkpoint import Snapshot
from models.config import EarlyStopping
from models.manifest import StopReason


@dataclass(frozen=True)
class EpochRow:
    """One completed epoch. `score` is the validation score, higher is better (None without validation rows);
    `values` are further numbers by name, with their units in the name."""

    epoch: int
    train_loss: float
    score: float | None
    seconds: float
    values: dict[str, float] = field(default_factory=dict)


class OnCheckpoint(Protocol):
    """Called with what a checkpoint must hold, after epoch `epoch`'s last update and its evaluation.

    `weights` is the network alone with its scaler; `resume` is everything needed to continue bit-equal, given
    with every regular checkpoint and with the final one of an interrupted run.
    """

    def __call__(self, epoch: int, is_final: bool, weights: Snapshot, resume: Snapshot | None) -> None: ...


OnEpoch = Callable[[EpochRow], None]
StopRequested = Callable[[], bool]


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. `epochs` counts completed epochs; `metrics` are JSON values for the manifest; `report` holds
    arrays and tables for plots and for the files beside the report."""

    epochs: int
    stop_reason: StopReason
    best_epoch: int | None
    weights: Literal["best", "last"]
    history: tuple[EpochRow, ...]
    metrics: dict[str, Any]
    report: dict[str, Any]


@dataclass
class BestEpoch:
    """Best score so far and how long ago it was; its fields are part of the resume state."""

    score: float | None = None
    epoch: int | None = None
    waited: int = 0

    def update(self, epoch: int, score: float, rule: EarlyStopping) -> bool:
        """Take in an epoch's score; whether it is the best so far by more than `min_delta`."""
        if self.score is None or score > self.score + rule.min_delta:
            self.score, self.epoch, self.waited = score, epoch, 0
            return True
        self.waited += 1
        return False

    def exhausted(self, rule: EarlyStopping) -> bool:
        """Whether patience is used up (never with patience 0)."""
        return 0 < rule.patience <= self.waited
