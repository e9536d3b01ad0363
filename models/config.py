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


Policy = Literal["refuse", "quarantine", "warn"]
POLICIES: dict[str, tuple[Policy, ...]] = {
    "null": ("refuse", "quarantine"),
    "nan": ("refuse", "quarantine"),
    "posinf": ("refuse", "quarantine"),
    "neginf": ("refuse", "quarantine"),
    "overflow": ("refuse", "quarantine"),
    "exact_duplicate": ("refuse", "quarantine"),
    "conflicting_key": ("refuse", "quarantine"),
    "static_change": ("refuse", "quarantine"),
    "future_time": ("refuse", "quarantine", "warn"),
    "unsorted": ("warn", "refuse", "quarantine"),
    "not_positive": ("warn", "refuse", "quarantine"),
    "gap": ("warn", "refuse"),
    "bar_interval": ("refuse", "warn"),
    "stale": ("refuse", "warn"),
    "leak": ("warn", "refuse"),
    "drift": ("warn", "refuse"),
    "suite": ("refuse", "warn"),
}
"""What may be done about each rule; the first is done by default. A missing number can never be warned about alone: nothing
could be trained on it."""


class FeatureBuilder(BaseModel):
    """How the features of a source are built, to find out whether they look ahead."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    run: str = Field(
        min_length=1,
        description="module:function from a pandas table of bars to one of features; or a command with {bars} and {features}, "
        "the Parquet files it reads and writes.",
    )
    bars: str = Field(min_length=1, description="Parquet file or folder with the bars: the contract's key, what run needs.")
    cuts: int = Field(3, ge=1, description="Random instants at which the bars are made to end.")


class IngestConfig(BaseModel):
    """How Parquet becomes a dataset."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    on_bad_rows: Literal["refuse", "quarantine"] = Field(
        "refuse", description="refuse the source, or set bad rows aside with the reason and keep the rest."
    )
    rules: dict[str, Policy] = Field({}, description="What to do about a rule, where on_bad_rows does not suit.")
    stale_after_days: float | None = Field(None, gt=0, description="Oldest that a series' last bar may be; none: any age.")
    gap_bars: int = Field(10, ge=1, description="Usual bars that may be missing in a row before it is a gap.")
    suites: tuple[str, ...] = Field((), description="Great Expectations suites (JSON) or project folders to run as well.")
    leak_check: bool = Field(True, description="Ask a sample of rows whether a feature tells of bars to come.")
    builder: FeatureBuilder | None = Field(None, description="Build the features again from fewer bars and compare.")
    drift_threshold: float = Field(0.25, gt=0, description="PSI beyond which a feature is no longer like the champion's.")
    memory_limit: str = Field("2GiB", pattern=r"^\d+(\.\d+)?\s?(MB|GB|MiB|GiB)$", description="DuckDB memory limit.")
    threads: int = Field(2, ge=1, description="DuckDB threads.")
    spill_folder: str | None = Field(None, description="Where rows are sorted and spilt; none: the system's temporary folder.")

    @model_validator(mode="after")
    def _known_policies(self) -> IngestConfig:
        for rule, policy in self.rules.items():
            if rule not in POLICIES:
                raise ValueError(f"no rule {rule!r}; there are {', '.join(POLICIES)}")
            if policy not in POLICIES[rule]:
                raise ValueError(f"rule {rule} can be {' or '.join(POLICIES[rule])}, not {policy}")
        return self

    def policy(self, rule: str) -> Policy:
        """What to do about a rule."""
        allowed = POLICIES[rule]
        if rule in self.rules:
            return self.rules[rule]
        return "quarantine" if allowed[0] == "refuse" and self.on_bad_rows in allowed[1:] else allowed[0]
