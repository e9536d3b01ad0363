"""Settings of the Temporal Fusion Transformer. Loads without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from models.config import RunConfig


class TFTConfig(RunConfig):
    """Train the network that forecasts quantiles of one target over the next bars."""

    family: Literal["tft"] = "tft"
    target: str | None = Field(None, description="Target column; none takes the contract's first.")
    context: int = Field(60, ge=2, description="History rows a forecast sees, in bars.")
    horizon: int = Field(10, ge=1, description="Bars forecast ahead.")
    quantiles: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        (0.1, 0.5, 0.9), min_length=1, description="Rising fractions in (0, 1)."
    )
    anchor: Literal["auto", "none", "difference", "ratio", "linear"] = Field(
        "auto", description="Forecast the level, the change from the last value or from a linear forecast; auto: ratio or linear."
    )
    hidden_size: int = Field(32, ge=1, description="Width of every layer.")
    num_heads: int = Field(4, ge=1, description="Attention heads; must divide hidden_size.")
    grn_layers: int = Field(3, ge=0, description="Gated residual layers per feature encoder; 0 is the paper's.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Share of activations dropped in training.")
    batch_size: int = Field(16, ge=1, description="Independent window starts per update.")
    windows_per_start: int = Field(8, ge=1, description="Consecutive windows from each start; they share rows.")
    updates_per_epoch: int = Field(30, ge=1, description="Optimizer updates per epoch.")
    learning_rate: float = Field(1e-3, gt=0, description="AdamW step size.")
    weight_decay: float = Field(1e-4, ge=0, description="AdamW weight decay.")
    gradient_clip: float = Field(1.0, gt=0, description="Largest gradient norm.")
    precision: Literal["float32", "tf32", "bfloat16"] = Field(
        "float32", description="Of matrix products in updates: float32, tf32 (on a GPU) or bfloat16; weights stay float32."
    )
    gradient_checkpointing: Literal["none", "full", "auto"] | Annotated[float, Field(ge=0, le=1)] = Field(
        "none",
        description="Recompute activations in backward: none, full, a share of those of the VSN, auto (memory_budget).",
    )
    memory_budget: str | None = Field(
        None,
        pattern=r"^\d+(\.\d+)? ?[KMGT]i?B$",
        description="With auto: the most that an update may take, like 4GiB.",
    )

    conformal: bool = Field(
        False, description="Widen or narrow the quantiles by validation-block errors (conformalised quantile regression)."
    )
    quantisation: Literal["none", "int8"] = Field("none", description="Weights of the final file: float32, or int8 with scales.")
    quantisation_epochs: int = Field(2, ge=0, description="With int8: epochs of fine-tuning with rounded weights at the end.")
    rolling_cuts: int = Field(0, ge=0, description="Earlier train / val / test blocks to evaluate further models on.")
    extra_seeds: int = Field(0, ge=0, description="Further seeds to evaluate on the ordinary split.")

    @model_validator(mode="after")
    def _fits(self) -> TFTConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}")
        if (self.gradient_checkpointing == "auto") != (self.memory_budget is not None):
            raise ValueError("gradient_checkpointing auto and memory_budget go together: give both or neither")
        if any(a >= b for a, b in zip(self.quantiles, self.quantiles[1:], strict=False)):
            raise ValueError(f"quantiles must rise: {self.quantiles}")
        test = 1 - self.split.train - self.split.val
        if self.rolling_cuts and not self.split.cut_dates and (test < 1e-9 or self.split.train - self.rolling_cuts * test < 1e-9):
            raise ValueError(f"{self.rolling_cuts} cuts back by a test share of {test:g} leave nothing to train on or to test")
        return self
