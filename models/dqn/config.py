"""Settings of the DQN trading agent. Loads without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from models.config import RunConfig


class DQNConfig(RunConfig):
    """Train the network that buys, sells or holds."""

    family: Literal["dqn"] = "dqn"
    positions: Literal["long_only", "long_short"] = Field("long_short", description="Whether sell may go short.")
    fill: Literal["close", "next"] = Field("close", description="Order filled at the bar's close or one bar later.")
    fee: float = Field(5e-4, ge=0, lt=1, description="Cost per unit of position change, fraction of price.")
    discount: float = Field(0.9, ge=0, lt=1, description="Weight of the next time step's value.")
    hidden_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field((256, 256), description="Widths of hidden layers.")
    batch_size: int = Field(128, ge=1, description="Transitions per update.")
    updates_per_epoch: int = Field(200, ge=1, description="Gradient updates per epoch.")
    replay_size: int = Field(100_000, ge=1, description="Transitions kept.")
    num_envs: int = Field(64, ge=1, description="Market copies stepped together.")
    updates_per_bar: int = Field(1, ge=1, description="Updates for every bar that the copies go on.")
    backup: Literal["sampled", "full"] = Field(
        "sampled", description="Replayed transitions, or all position-action cells of a row (fitted Q iteration)."
    )
    target_update: int = Field(20, ge=1, description="Updates between copies to the target network.")
    target_tau: float = Field(1.0, gt=0, le=1, description="Share of each target update; 1 copies.")
    learning_rate: float = Field(2e-3, gt=0, description="Adam step size at the first update.")
    final_learning_rate: float = Field(1e-4, gt=0, description="Step size at the last update (linear between).")
    epsilon_start: float = Field(1.0, ge=0, le=1, description="Share of random actions at the first update.")
    epsilon_end: float = Field(0.05, ge=0, le=1, description="Share of random actions after the decay.")
    epsilon_decay_updates: int = Field(400, ge=1, description="Updates over which epsilon falls.")
    gradient_clip: float = Field(10.0, gt=0, description="Largest gradient norm.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay; 0 is Adam.")
    tft_folds: int = Field(
        0,
        ge=0,
        description="TFTs like the champion, each trained on earlier rows alone, whose forecasts join the state; 0: none.",
    )
    tft_model: str = Field("tft", description="With tft_folds: the model whose champion that is.")

    @model_validator(mode="after")
    def _fits(self) -> DQNConfig:
        least = max(self.batch_size, self.num_envs)
        if self.backup == "sampled" and self.replay_size < least:
            raise ValueError(f"replay_size is {self.replay_size}, less than batch_size or num_envs ({least})")
        if self.tft_folds == 1:
            raise ValueError("tft_folds 1 leaves the train block without forecasts: the least is 2")
        return self
