"""Int8 weights for the TFT: symmetric, a float32 scale per output channel (of every variable, where weights are stacked over
variables), learnt with fake quantisation. Biases, norms and embeddings stay float32; so does all arithmetic (docs/tft.md)."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.checkpoint import CheckpointError
from models.progress import StopRequested
from models.tft.config import TFTConfig
from models.tft.network import TemporalFusionTransformer
from models.windows import WindowDataset

logger = logging.getLogger(__name__)

LEVELS = 127
INPUTS = 1
"""The inputs' dimension both of a stack [V, in, out] and of a linear layer's or an LSTM's [out, in]: what a scale spans."""
RATE = 0.1
"""Part of the learning rate: what is left to do is to settle on the grid."""
STREAM = 8  # sets the fine-tuning's starts apart from those of the epochs before


def matrices(network: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that become int8: weights of linear layers and LSTMs, and those stacked over variables."""
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, module in network.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 or (parameter.dim() == 2 and isinstance(module, nn.Linear | nn.LSTM))
    }


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 values of a weight and their scales: the largest magnitude of a channel becomes 127, so nothing is clipped."""
    scale = (weight.abs().amax(INPUTS, keepdim=True) / LEVELS).clamp_min(torch.finfo(weight.dtype).tiny)
    return (weight / scale).round_().clamp_(-LEVELS, LEVELS).to(torch.int8), scale


def restored(values: Tensor, scale: Tensor) -> Tensor:
    """The float weight that int8 values stand for."""
    return values.to(scale.dtype).mul_(scale)


def packed(network: nn.Module) -> dict[str, Tensor]:
    """The network's weights on the CPU for a file: `<name>.int8` and `<name>.scale` for matrices, the others as they are."""
    chosen = matrices(network)
    out: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        if name in chosen:
            values, scale = quantised(tensor)
            out |= {f"{name}.int8": values.cpu(), f"{name}.scale": scale.cpu()}
        else:
            out[name] = tensor.detach().cpu().clone()
    return out


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Float weights of a file's tensors; those of a file without int8 come back unchanged. Raises CheckpointError when a
    scale is missing or does not fit its values."""
    names = [name.removesuffix(".int8") for name in tensors if name.endswith(".int8")]
    parts = {f"{name}.{part}" for name in names for part in ("int8", "scale")}
    out = {name: tensor for name, tensor in tensors.items() if name not in parts}
    for name in names:
        values, scale = tensors[f"{name}.int8"], tensors.get(f"{name}.scale")
        fits = scale is not None and scale.dim() == values.dim() and scale.numel() * values.shape[INPUTS] == values.numel()
        if scale is None or not fits or values.dtype != torch.int8 or scale.dtype != torch.float32:
            raise CheckpointError(f"weight {name}: int8 values and scales do not belong together")
        out[name] = restored(values, scale)
    return out


class FakeQuantisation:
    """Lets a network compute with its int8 weights while its float ones learn. The gradients of the rounded weights are taken
    for those of the float ones (straight through).

    The rounded values stand in the parameters themselves during a pass, so that every way to read them sees the same: folded
    embeddings, LSTMs, recomputed regions. The float weights wait in buffers made once.
    """

    def __init__(self, network: nn.Module) -> None:
        self.kept = [(parameter, torch.empty_like(parameter)) for parameter in matrices(network).values()]

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Int8 weights inside the block, the float ones again after it, whatever it raises."""
        with torch.no_grad():
            for parameter, kept in self.kept:
                kept.copy_(parameter)
                parameter.copy_(restored(*quantised(kept)))
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, kept in self.kept:
                    parameter.copy_(kept)


@dataclass(frozen=True)
class Tuned:
    """A fine-tuned network's tensors for the file, the share of its parameters that are int8, and its validation pinball
    losses (None without validation windows) before and after."""

    tensors: dict[str, Tensor]
    share: float
    pinball_float: float | None
    pinball_int8: float | None

    def metrics(self, file_ratio: float) -> dict[str, Any]:
        """What the manifest says of it; `delta` is the relative loss, above 0 is worse."""
        before, after = self.pinball_float, self.pinball_int8
        delta = None if before is None or after is None else (after - before) / max(before, 1e-12)
        return {
            "parameters_int8": self.share, "file_ratio": file_ratio, "pinball_fp32": before, "pinball_int8": after,
            "delta": delta,
        }  # fmt: skip


def fine_tune(
    network: TemporalFusionTransformer, optimizer: torch.optim.Optimizer, config: TFTConfig, training: WindowDataset,
    gradients: Callable[[Any], Tensor], score: Callable[[], float] | None, stop_requested: StopRequested,
) -> Tuned | None:  # fmt: skip
    """The network after `quantisation_epochs` epochs with int8 weights, or None when a stop was requested.

    By `final_weights` the best epoch by `score` (epoch 0 is the network as it came, rounded) or the last one; an epoch whose
    loss is not finite ends it. Takes the optimizer over with moments of zero: only the weights decide the outcome.
    """
    torch.manual_seed(config.seed)
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * RATE
    for moments in optimizer.state.values():
        for tensor in moments.values():
            tensor.zero_()
    fake = FakeQuantisation(network)

    def scored() -> float | None:
        if score is None:
            return None
        with fake():
            return score()

    before = None if score is None else -score()
    chosen, best = packed(network), scored()
    for epoch in range(config.quantisation_epochs):
        network.train()
        random = np.random.default_rng([config.seed, epoch, STREAM])
        starts = training.random_starts(config.updates_per_epoch * config.batch_size, config.windows_per_start, random)
        losses: list[Tensor] = []
        for batch in starts.reshape(config.updates_per_epoch, config.batch_size, 2):
            if stop_requested():
                return None
            optimizer.zero_grad(set_to_none=True)
            with fake():
                loss = gradients(batch)
            norm = nn.utils.clip_grad_norm_(network.parameters(), config.gradient_clip)
            optimizer.step()
            losses.append(torch.where(norm.isfinite(), loss, math.nan))
        total = float(torch.stack(losses).double().sum())
        found = scored() if math.isfinite(total) else None
        if not math.isfinite(total) or (found is not None and not math.isfinite(found)):
            logger.error("tft int8 epoch %d: the loss is not finite; the weights before it are kept", epoch + 1)
            break
        logger.info("tft int8 epoch %d: loss %.6f, score %s", epoch + 1, total / config.updates_per_epoch, found)
        if config.final_weights == "last" or found is None or best is None or not found <= best:
            chosen, best = packed(network), found
    rounded = sum(parameter.numel() for parameter in matrices(network).values())
    share = rounded / sum(parameter.numel() for parameter in network.parameters())
    return Tuned(chosen, share, before, None if best is None else -best)
