"""Value types that travel between tasks and stand in the store: Dataset, Checkpoint, ModelManifest. The only
file that lists every model family. Loads without torch."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from models.dqn.config import DQNConfig
from models.features import FeatureContract
from models.tft.config import TFTConfig

Family = Literal["tft", "dqn"]
ModelConfig = Annotated[TFTConfig | DQNConfig, Field(discriminator="family")]
StopReason = Literal["all_epochs", "early_stopping", "non_finite_loss", "interrupted"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What a model, a version or a published file may be called (no slash, no leading dot)."""


class StoredFile(BaseModel):
    """One immutable object: its sha256 (hex) and its size in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0)


class Dataset(BaseModel):
    """A validated, immutable dataset: the content of dataset.json.

    `fingerprint` is of the contract and the rows, not of the files: the same rows in other files give the same
    dataset. `series` counts rows by series name, in stored order (sorted by name, then by time).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    fingerprint: str = Field(pattern=r"^[0-9a-f]{64}$")
    contract: FeatureContract
    rows: int = Field(ge=1)
    series: dict[str, int]
    first_timestamp: str = Field(description="ISO 8601, UTC.")
    last_timestamp: str = Field(description="ISO 8601, UTC.")
    files: dict[str, StoredFile] = Field(description="Parquet parts by name, in row order when sorted by name.")


class Checkpoint(BaseModel):
    """One saved weights file, on disk or in the store. `epoch` counts completed epochs."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    epoch: int = Field(ge=0)
    is_final: bool
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0)


class TFTSource(BaseModel):
    """The published TFT whose configuration an agent's forecasts are made with."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str
    version: int = Field(ge=1)
    manifest_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    config: TFTConfig


class ModelManifest(BaseModel):
    """The commit point of a published version: nothing is published before this object exists."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    version: int = Field(ge=1)
    family: Family
    run_key: str = Field(pattern=r"^[0-9a-f]{64}$")
    files: dict[str, StoredFile]
    final: str = Field(description="Name of the final checkpoint among `files`.")
    config: ModelConfig
    dataset: Dataset
    dataset_uri: str
    metrics: dict[str, Any] = Field(description="Own metrics of this run; a comparison stands in the alias history.")
    epochs: int = Field(ge=0, description="Completed epochs.")
    stop_reason: StopReason
    best_epoch: int | None
    weights: Literal["best", "last"] = Field(description="Which weights the final checkpoint holds.")
    tft: TFTSource | None = Field(None, description="Champion that the agent's forecasts are made like.")
    code_version: str
    versions: dict[str, str] = Field(description="Python and library versions of the training process.")
