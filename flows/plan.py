"""`forecastle plan`: what an update of the TFT holds in memory, layer by layer, and the GPUs it fits, before anything is
trained."""

from __future__ import annotations

import tomllib
from datetime import date
from pathlib import Path

from pydantic import BaseModel

from models.features import MARKET_FEATURES, FeatureContract
from models.tft.config import TFTConfig

# What a CUDA process takes beside its tensors, and what of the memory fragmentation leaves free
CONTEXT_MIB, MARGIN, USABLE = 600, 1.10, 0.95


class GPU(BaseModel):
    """A GPU that the plan fits, and what an hour of it cost when the price was read."""

    name: str
    memory_gib: float
    usd_per_hour: float | None = None
    price_read: date | None = None


class MemoryReport(BaseModel):
    """A memory plan in MiB. `peak_mib` is everything alive at once; `passing_mib` are buffers of the pass in progress."""

    recomputed_share: float
    starts_at_a_time: int
    windows_per_start: int
    peak_mib: float
    fixed_mib: float
    kept_mib: float
    passing_mib: float
    batch_mib: float
    layers: list[dict[str, str | float]]
    gpus: list[GPU]

    def for_people(self) -> str:
        """The tables as text."""
        names = ("parameters", "gradients", "adam", "kept")
        lines = [f"{'MiB':24}" + "".join(f"{name:>12}" for name in names)]
        lines += [f"{row['layer']:24}" + "".join(f"{float(row[name]):12.2f}" for name in names) for row in self.layers]
        lines += [
            f"\nbatch {self.batch_mib:.2f} MiB, buffers of the pass in progress {self.passing_mib:.2f} MiB",
            f"peak of an update: {self.peak_mib:.0f} MiB ({self.starts_at_a_time} starts x {self.windows_per_start} windows at a "
            f"time, {self.recomputed_share:.0%} of the variable selection's activations recomputed)",
        ]
        selection = sum(float(row["kept"]) for row in self.layers if str(row["layer"]).endswith(" selection"))
        if selection > 2**10:
            lines.append(
                f"{selection / 2**10:.1f} GiB of it are activations of the variable selection networks: no leak, though a plan "
                "without them would call it one. --config.gradient-checkpointing (full, a share, auto) lowers them."
            )
        if self.gpus:
            lines.append("\nfits on:")
        for gpu in self.gpus:
            price = "no price" if gpu.usd_per_hour is None else f"{gpu.usd_per_hour:.2f} $/h (read {gpu.price_read})"
            lines.append(f"  {gpu.name:16}{gpu.memory_gib:6.0f} GiB  {price}")
        return "\n".join(lines)


def plan(
    *,
    config: TFTConfig = TFTConfig(),
    contract: str | None = None,
    memory_budget: str | None = None,
    gpus: Path = Path(__file__).with_name("gpus.toml"),
) -> MemoryReport:
    """What an update of the TFT holds in memory, layer by layer; nothing is read, trained or written.

    Args:
        config: The settings to plan for.
        contract: TOML file with the feature contract; none takes 5 / 210 / 10 columns.
        memory_budget: The most an update may take, like 4GiB: chooses what to recompute, as gradient_checkpointing auto
            does in training.
        gpus: TOML file of GPUs with their memory and dated prices, in place of the one that comes along.
    """
    from models.tft.plan import fitting_plan

    if memory_budget is not None:
        changed = {**config.model_dump(), "gradient_checkpointing": "auto", "memory_budget": memory_budget}
        config = TFTConfig.model_validate(changed)
    found = fitting_plan(config, (FeatureContract.from_toml(contract) if contract else MARKET_FEATURES).sizes)
    mib = found.peak / 2**20
    known = [GPU(**row) for row in tomllib.loads(gpus.read_text())["gpu"]]
    return MemoryReport(
        recomputed_share=found.share,
        starts_at_a_time=found.starts,
        windows_per_start=found.windows,
        peak_mib=mib,
        fixed_mib=found.fixed / 2**20,
        kept_mib=found.kept / 2**20,
        passing_mib=found.passing / 2**20,
        batch_mib=found.batch / 2**20,
        layers=found.rows(),
        gpus=[gpu for gpu in known if mib * MARGIN + CONTEXT_MIB <= gpu.memory_gib * 2**10 * USABLE],
    )
