"""Building blocks of the Temporal Fusion Transformer (Lim et al. 2019, arXiv 1912.09363). Shapes in names:
B windows, R rows, V variables of a group, C variables of a chunk, D hidden size, H horizon, J keys."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from models.memory import HeapHoles, large_tensor


class Recompute:
    """Which regions of the network drop their activations and run again in backward, and how often each ran.

    `share` is the share of the activations of the variable chunks (models/tft/selection.py); above 0 the selection weights,
    the GRN stacks, the LSTMs and the attention are regions too. Dropout masks come from the global generators only: those
    are restored for the second run, one of our own would not be. Before each region the heap is tidied and large tensors lie
    outside it, or its holes would take back a good part of what is saved.
    """

    def __init__(self, setting: str | float) -> None:
        # auto: whoever trains sets the share by the memory plan
        self.share = {"none": 0.0, "full": 1.0, "auto": 1.0}[setting] if isinstance(setting, str) else float(setting)
        self.calls: Counter[str] = Counter()
        self.holes = HeapHoles()

    def __call__(self, name: str, region: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run `region`, under recomputation when the setting says so."""

        def counted(*again: Tensor) -> Tensor:
            self.calls[name] += 1
            return region(*again)

        def tidied(*again: Tensor) -> Tensor:
            self.tidy(again[0].device)
            return counted(*again)

        if self.share > 0 and torch.is_grad_enabled():
            return checkpoint(tidied, *inputs, use_reentrant=False)
        return counted(*inputs)

    def tidy(self, device: torch.device) -> None:
        """Close the holes of the heap, if anything is recomputed and on a CPU."""
        if self.share > 0 and device.type == "cpu":
            self.holes()

    def empty(self, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor for activations or gradients; if anything is recomputed and on a CPU, a large one lies outside the heap."""
        if self.share > 0 and like.device.type == "cpu":
            return large_tensor(*shape, dtype=dtype or like.dtype)
        return like.new_empty(shape, dtype=dtype or like.dtype)


@contextlib.contextmanager
def gpu_tf32(on: bool) -> Iterator[None]:
    """float32 matrix products and LSTMs on a GPU with TF32's 10 bits of mantissa inside, or with all 23."""
    places: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn.rnn
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "tf32" if on else "ieee"
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def _autocast_device(x: Tensor) -> str:
    return "cpu" if x.is_meta else x.device.type  # a tensor without data stands for one on a CPU


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products of x: under autocast its own, else that of x."""
    kind = _autocast_device(x)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def full_precision(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Autocast off, for what must not run in half precision."""
    return contextlib.nullcontext() if autocast_dtype(x) == x.dtype else torch.autocast(_autocast_device(x), enabled=False)


def random_state(device: torch.device) -> Tensor:
    """The state of the global generator that dropout on this device draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Put that generator back to a state of `random_state`."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def random_bytes(*shape: int, device: torch.device) -> Tensor:
    """Random bytes drawn from the global generator of the device as 64-bit words: several times cheaper than floats."""
    size = math.prod(shape)
    words = torch.empty((size + 7) // 8, dtype=torch.int64, device=device).random_(-(2**63), None)
    return words.view(torch.uint8)[:size].view(shape)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout whose CPU mask is made of random bytes: p is rounded to 1/256, 3 to 4 times cheaper than F.dropout."""
    if not training or p == 0:
        return x
    if x.device.type != "cpu":
        return functional.dropout(x, p)
    cut = min(255, max(1, round(p * 256)))
    return (x * random_bytes(*x.shape, device=x.device).ge_(cut)).mul_(256.0 / (256 - cut))


def add_into(out: Tensor, x: Tensor) -> Tensor:
    """out + x, in the memory of `out` unless autocast made it narrower than the sum: one hole less in the heap."""
    return out.add_(x) if torch.promote_types(out.dtype, x.dtype) == out.dtype else out + x


class GatedLinear(nn.Module):
    """Dropout, then a linear layer whose one half gates the other (GLU)."""

    def __init__(self, inputs: int, outputs: int, p: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 2 * outputs)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return functional.glu(self.linear(dropout(x, self.p, self.training)), dim=-1)


class GatedResidual(nn.Module):
    """Gated residual network: LayerNorm(skip(x) + GLU(W2 ELU(W1 x + Wc context))), equations 2 to 5 of the paper."""

    def __init__(self, inputs: int, outputs: int, hidden: int, p: float, context: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.context = nn.Linear(hidden, hidden, bias=False) if context else None
        self.second = nn.Linear(hidden, hidden)
        self.gate = GatedLinear(hidden, outputs, p)
        self.skip = nn.Linear(inputs, outputs) if inputs != outputs else None
        self.norm = nn.LayerNorm(outputs)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        hidden = self.first(x)
        if self.context is not None and context is not None:
            hidden = add_into(hidden, self.context(context))
        gated = self.gate(self.second(functional.elu_(hidden)))
        return self.norm(add_into(gated, x if self.skip is None else self.skip(x)))


class GatedSkip(nn.Module):
    """LayerNorm(skip + GLU(x))."""

    def __init__(self, size: int, p: float) -> None:
        super().__init__()
        self.gate = GatedLinear(size, size, p)
        self.norm = nn.LayerNorm(size)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.norm(add_into(self.gate(x), skip))


class InterpretableAttention(nn.Module):
    """Multi-head attention whose heads share their values (equations 13 to 16), for the H decoder positions only: no other
    query reaches the output. No key bias: softmax would cancel it."""

    def __init__(self, size: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads, self.p = heads, p
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size, bias=False)
        self.value = nn.Linear(size, size // heads)
        self.out = nn.Linear(size // heads, size, bias=False)

    def forward(self, x_BJD: Tensor, horizon: int) -> tuple[Tensor, Tensor]:
        """Attended features [B, H, D] of the last `horizon` positions of [B, J, D], and mean weights [B, H, J]."""
        B, J, D = x_BJD.shape
        q = self.query(x_BJD[:, J - horizon :]).view(B, horizon, self.heads, -1).transpose(1, 2)
        k = self.key(x_BJD).view(B, J, self.heads, -1).transpose(1, 2)
        scores = q @ k.transpose(2, 3) / math.sqrt(D // self.heads)
        ahead = torch.ones(horizon, J, dtype=torch.bool, device=x_BJD.device).triu(J - horizon + 1)
        scores = scores.masked_fill(ahead, float("-inf"))
        weights = torch.softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)), dim=-1)
        mean_BHJ = dropout(weights, self.p, self.training).mean(1)
        return self.out(mean_BHJ @ self.value(x_BJD)), mean_BHJ
