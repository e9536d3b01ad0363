"""Building blocks of the Temporal Fusion Transformer (Lim et al. 2019, arXiv 1912.09363). Shapes in names:
B windows, R rows, V variables of a group, C variables of a chunk, D hidden size, H horizon, J keys."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VSN_CHUNK = 15
"""Variables per chunk. Part of the arithmetic (it sets the order of a sum), so one value for every setting."""


class Recompute:
    """Which regions of the network drop their activations and run again in backward, and how often each ran.

    `share` is the share of variable chunks; above 0 the GRN stacks, the LSTMs and the attention are regions too. Dropout
    masks come from the global generators only: those are restored for the second run, one of our own would not be.
    """

    def __init__(self, setting: str | float) -> None:
        self.share = {"none": 0.0, "full": 1.0}[setting] if isinstance(setting, str) else float(setting)
        self.calls: Counter[str] = Counter()

    def __call__(self, name: str, region: Callable[..., Tensor], *inputs: Tensor, chosen: bool = True) -> Tensor:
        """Run `region`, under recomputation when the setting says so."""

        def counted(*again: Tensor) -> Tensor:
            self.calls[name] += 1
            return region(*again)

        if self.share > 0 and chosen and torch.is_grad_enabled():
            return checkpoint(counted, *inputs, use_reentrant=False)
        return counted(*inputs)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout whose CPU mask is made of random bytes: p is rounded to 1/256, 3 to 4 times cheaper than F.dropout."""
    if not training or p == 0:
        return x
    if x.device.type != "cpu":
        return functional.dropout(x, p)
    cut = min(255, max(1, round(p * 256)))
    words = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
    keep = words.view(torch.uint8)[: x.numel()].view(x.shape) >= cut
    return x * keep * (256.0 / (256 - cut))


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
            hidden = hidden + self.context(context)
        gated = self.gate(self.second(functional.elu(hidden)))
        return self.norm((x if self.skip is None else self.skip(x)) + gated)


class GatedSkip(nn.Module):
    """LayerNorm(skip + GLU(x))."""

    def __init__(self, size: int, p: float) -> None:
        super().__init__()
        self.gate = GatedLinear(size, size, p)
        self.norm = nn.LayerNorm(size)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.norm(skip + self.gate(x))


def _uniform(*shape: int, fan_in: int) -> nn.Parameter:
    bound = 1 / math.sqrt(fan_in)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


class VariableSelection(nn.Module):
    """Variable selection network: one GRN per scalar variable, weighted by a softmax over variables.

    The parameters are the textbook ones, stacked over variables. Since a scalar's embedding x w + b is affine in x, it is
    folded at run time into the layers that follow it: exact, and it halves the work (docs/tft.md). Variables run in
    chunks with a running weighted sum, so that nothing of size rows x variables x hidden outlives its chunk.
    """

    def __init__(self, variables: int, size: int, p: float, context: bool) -> None:
        super().__init__()
        V, D = variables, size
        self.p = p
        self.embed_weight, self.embed_bias = _uniform(V, D, fan_in=1), _uniform(V, D, fan_in=1)
        self.first_weight, self.first_bias = _uniform(V, D, D, fan_in=D), _uniform(V, D, fan_in=D)
        self.second_weight, self.second_bias = _uniform(V, D, D, fan_in=D), _uniform(V, D, fan_in=D)
        self.gate_weight, self.gate_bias = _uniform(V, D, 2 * D, fan_in=D), _uniform(V, 2 * D, fan_in=D)
        self.norm_weight, self.norm_bias = nn.Parameter(torch.ones(V, D)), nn.Parameter(torch.zeros(V, D))
        self.joint_first_weight, self.joint_first_bias = _uniform(V, D, D, fan_in=V * D), _uniform(D, fan_in=V * D)
        self.joint_context = nn.Linear(D, D, bias=False) if context else None
        self.joint_second = nn.Linear(D, D)
        self.joint_gate = GatedLinear(D, V, p)
        self.joint_skip_weight, self.joint_skip_bias = _uniform(V, D, V, fan_in=V * D), _uniform(V, fan_in=V * D)
        self.joint_norm = nn.LayerNorm(V)

    def selection(self, x_RV: Tensor, context_RD: Tensor | None) -> Tensor:
        """Selection weights [R, V], summing to 1 over the variables."""
        hidden = x_RV @ torch.einsum("vd,vde->ve", self.embed_weight, self.joint_first_weight)
        hidden = hidden + torch.einsum("vd,vde->e", self.embed_bias, self.joint_first_weight) + self.joint_first_bias
        if self.joint_context is not None and context_RD is not None:
            hidden = hidden + self.joint_context(context_RD)
        skip = x_RV @ torch.einsum("vd,vdu->vu", self.embed_weight, self.joint_skip_weight)
        skip = skip + torch.einsum("vd,vdu->u", self.embed_bias, self.joint_skip_weight) + self.joint_skip_bias
        gated = self.joint_gate(self.joint_second(functional.elu(hidden)))
        return torch.softmax(self.joint_norm(skip + gated), dim=-1)

    def forward(self, x_RV: Tensor, context_RD: Tensor | None, recompute: Recompute, name: str) -> tuple[Tensor, Tensor]:
        """Selected features [R, D] of scalar inputs [R, V], and the selection weights [R, V]."""
        weights_RV = self.selection(x_RV, context_RD)
        folded_weight = torch.bmm(self.embed_weight.unsqueeze(1), self.first_weight).squeeze(1)
        folded_bias = torch.bmm(self.embed_bias.unsqueeze(1), self.first_weight).squeeze(1) + self.first_bias
        # Split once: slicing a parameter per chunk would make a zero gradient of its whole size for every chunk
        stacked = (
            folded_weight, folded_bias, self.second_weight, self.second_bias, self.gate_weight, self.gate_bias,
            self.embed_weight, self.embed_bias, self.norm_weight, self.norm_bias,
        )  # fmt: skip
        pieces = [torch.split(t, VSN_CHUNK) for t in stacked]
        x_VR, weights_VR = (torch.split(t.t().contiguous(), VSN_CHUNK) for t in (x_RV, weights_RV))
        chosen = round(recompute.share * len(x_VR))
        total: Tensor | None = None
        for i, (x_CR, w_CR) in enumerate(zip(x_VR, weights_VR, strict=True)):
            part = recompute(f"{name} vsn", self._chunk, x_CR, w_CR, *(p[i] for p in pieces), chosen=i < chosen)
            total = part if total is None else total + part
        assert total is not None
        return total, weights_RV

    def _chunk(
        self, x_CR: Tensor, selection_CR: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, wg: Tensor, bg: Tensor,
        we: Tensor, be: Tensor, scale: Tensor, shift: Tensor,
    ) -> Tensor:  # fmt: skip
        """Weighted sum [R, D] of the chunk's GRN outputs."""
        x_CR1 = x_CR.unsqueeze(-1)
        hidden = functional.elu(torch.addcmul(b1.unsqueeze(1), x_CR1, w1.unsqueeze(1)))
        hidden = torch.baddbmm(b2.unsqueeze(1), hidden, w2)
        gated = functional.glu(torch.baddbmm(bg.unsqueeze(1), dropout(hidden, self.p, self.training), wg), dim=-1)
        embedded = torch.addcmul(be.unsqueeze(1), x_CR1, we.unsqueeze(1))
        normed = functional.layer_norm(embedded + gated, (we.shape[-1],))
        # sum_c s (n scale + shift): scale and shift are per variable, so both fit one weighted sum over the chunk
        weighted = torch.addcmul(shift.unsqueeze(1), normed, scale.unsqueeze(1))
        return torch.einsum("cr,crd->rd", selection_CR, weighted)


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
        weights = torch.softmax(scores.masked_fill(ahead, float("-inf")), dim=-1)
        mean_BHJ = dropout(weights, self.p, self.training).mean(1)
        return self.out(mean_BHJ @ self.value(x_BJD)), mean_BHJ
