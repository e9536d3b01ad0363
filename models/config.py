"""What every run shares: seeds, split, early stopping; and how to ingest. What only one family knows stands in
its own config.py. Loads without torch. Credentials and endpoints never stand here: a config is published."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from models.features import canonical_json


class EarlyStopping(BaseModel):
    """Stop when the validation score has not improved for `patience` epochs."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    patience: int = Field(5, ge=0, description="Epochs without improvement before stopping; 0 never stops early.")
    min_delta: float = Field(0.0, ge=0, description="Smallest improvement that counts, in the score's own unit.")


class Split(BaseModel):
    """Train, validation and test blocks by time, per series."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    train: float = Field(0.70, gt=0, lt=1, description="Share of each series' rows to train on.")
    val: float = Field(0.15, ge=0, lt=1, description="Share for validation; the rest is the test block.")
    cut_dates: tuple[datetime, datetime] | None = Field(
        None, description="Instead of shares: first instant of validation and of test (UTC when no zone is given)."
    )

    @model_validator(mode="after")
    def _shares_fit(self) -> Split:
        if self.train + self.val > 1:
            raise ValueError(f"train + val is {self.train + self.val:g}, more than the whole series")
        if self.cut_dates and self.cut_dates[0] >= self.cut_dates[1]:
            raise ValueError("cut_dates must rise: validation starts before test")
        return self


class RunConfig(BaseModel):
    """Settings of every training run. Subclasses add what their family needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of every random number in the run.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes the GPU when there is one.")
    epochs: int = Field(10, ge=1, description="Most epochs to train.")
    checkpoint_every: int = Field(5, ge=1, description="Epochs between saved checkpoints.")
    early_stopping: EarlyStopping = Field(EarlyStopping(), description="When to stop before the last epoch.")
    final_weights: Literal["best", "last"] = Field("best", description="Which epoch's weights the final file holds.")
    keep_checkpoints: int | None = Field(
        None, ge=0, description="Regular checkpoints that are published beside the final one, the latest; none: all."
    )
    split: Split = Field(Split(), description="Train, validation and test blocks.")
    promotion: Literal["better", "not_worse", "always", "never"] = Field(
        "better", description="When a new version becomes champion: by a comparison on bars new to both, always, or never."
    )

    def canonical(self) -> str:
        """Canonical JSON: part of the run key."""
        return canonical_json(self.model_dump(mode="json"))


class IngestConfig(BaseModel):
    """How Parquet becomes a dataset."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    on_bad_rows: Literal["refuse", "quarantine"] = Field(
        "refuse", description="refuse the source, or set bad rows aside with the reason and keep the rest."
    )
    memory_limit: str = Field("2GiB", pattern=r"^\d+(\.\d+)?\s?(MB|GB|MiB|GiB)$", description="DuckDB memory limit.")
    threads: int = Field(2, ge=1, description="DuckDB threads.")
