"""Variable selection networks: where a TFT over many variables spends its time and its memory (docs/memory.md). Shapes in
names: R rows, V variables of a group, C variables of a chunk, D hidden size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from models.tft.layers import (
    GatedLinear,
    Recompute,
    add_into,
    autocast_dtype,
    full_precision,
    random_bytes,
    random_state,
    set_random_state,
)

VSN_CHUNK = {"cpu": 5, "cuda": 15}
"""Variables per chunk by device. Part of the arithmetic, so one value for every setting: on a CPU small enough for the
caches (benchmarks/README.md), on a GPU large enough to keep it busy."""


def _uniform(*shape: int, fan_in: int) -> nn.Parameter:
    bound = 1 / math.sqrt(fan_in)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


class VariableSelection(nn.Module):
    """Variable selection network: one GRN per scalar variable, weighted by a softmax over variables.

    The parameters are the textbook ones, stacked over variables. Since a scalar's embedding x w + b is affine in x, it is
    folded at run time into the layers that follow it: exact, and it halves the work (docs/tft.md).
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

    def forward(self, x_RV: Tensor, context_RD: Tensor | None, recompute: Recompute, name: str) -> tuple[Tensor, Tensor]:
        """Selected features [R, D] of scalar inputs [R, V], and the selection weights [R, V]."""
        with full_precision(x_RV):
            joint, first = self.folded(recompute)
        context = () if context_RD is None else (context_RD,)
        weights_RV = recompute(f"{name} weights", self._weights, x_RV, *joint, *context)
        parameters = (
            *first, self.second_weight, self.second_bias, self.gate_weight, self.gate_bias, self.embed_weight, self.embed_bias,
            self.norm_weight, self.norm_bias,
        )  # fmt: skip
        x_VR, weights_VR = x_RV.t().contiguous(), weights_RV.t().contiguous()
        p = self.p if self.training else 0.0
        if torch.is_grad_enabled():
            recompute.tidy(x_RV.device)
            selected_RD = WeightedGRNs.apply(recompute, name, p, x_VR, weights_VR, *parameters)  # type: ignore[no-untyped-call]
        else:
            selected_RD = _forward(recompute, name, p, x_VR, weights_VR, parameters, None)
        return selected_RD, weights_RV

    def folded(self, recompute: Recompute | None = None) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Weight and bias of the scalars themselves, embeddings folded in: of the joint first layer ([V, D], [D]) and its skip
        ([V, V], [V]), and of every variable's first layer ([V, D] each)."""
        layers = (self.joint_first_weight, self.joint_skip_weight, self.first_weight)
        embedding = torch.stack([self.embed_weight, self.embed_bias], 1)
        fold = torch.bmm if recompute is None else partial(_Fold.apply, recompute)
        first, skip, own = (fold(embedding, weight).unbind(1) for weight in layers)
        joint = (first[0], first[1].sum(0) + self.joint_first_bias, skip[0], skip[1].sum(0) + self.joint_skip_bias)
        return joint, (own[0], own[1] + self.first_bias)

    def _weights(
        self, x_RV: Tensor, first_VD: Tensor, first_D: Tensor, skip_VV: Tensor, skip_V: Tensor, context_RD: Tensor | None = None
    ) -> Tensor:
        """Selection weights [R, V], summing to 1 over the variables."""
        hidden = add_into(x_RV @ first_VD, first_D)
        if self.joint_context is not None and context_RD is not None:
            hidden = add_into(hidden, self.joint_context(context_RD))
        gated = self.joint_gate(self.joint_second(functional.elu_(hidden)))
        return torch.softmax(self.joint_norm(add_into(add_into(x_RV @ skip_VV, skip_V), gated)), dim=-1)


class _Fold(torch.autograd.Function):
    """torch.bmm, whose second factor's gradient lies where Recompute.empty says."""

    @staticmethod
    def forward(ctx: Any, recompute: Recompute, embedding: Tensor, weight: Tensor) -> Tensor:
        ctx.recompute = recompute
        ctx.save_for_backward(embedding, weight)
        return torch.bmm(embedding, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        embedding, weight = ctx.saved_tensors
        dweight = torch.bmm(embedding.mT, dout, out=ctx.recompute.empty(weight, *weight.shape))
        return None, torch.bmm(dout, weight.mT), dweight


class WeightedGRNs(torch.autograd.Function):
    """Weighted sum over variables [R, D] of their GRNs, with a backward pass written by hand.

    Variables run in chunks through buffers that stay in the caches. What a chunk does not keep for the backward pass (STAGES)
    is made again there by the same operations on the same inputs, dropout masks by the random state of the forward pass, so
    that recomputing equals keeping to the bit. One backward pass only (no gradients of gradients).
    """

    @staticmethod
    def forward(ctx: Any, recompute: Recompute, name: str, p: float, x_VR: Tensor, s_VR: Tensor, *parameters: Tensor) -> Tensor:
        kept: dict[str, Tensor] = {}
        ctx.recompute, ctx.name, ctx.p, ctx.matmul = recompute, name, p, autocast_dtype(x_VR)
        ctx.random_state = random_state(x_VR.device)
        total_RD = _forward(recompute, name, p, x_VR, s_VR, parameters, kept)
        ctx.names = tuple(kept)
        ctx.save_for_backward(x_VR, s_VR, *parameters, *kept.values())
        return total_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_RD: Tensor) -> tuple[Tensor | None, ...]:
        x_VR, s_VR = ctx.saved_tensors[:2]
        parameters, kept = ctx.saved_tensors[2:12], dict(zip(ctx.names, ctx.saved_tensors[12:], strict=True))
        w1, we, scale, shift = (parameters[i] for i in (0, 6, 8, 9))
        ctx.recompute.tidy(x_VR.device)
        dout_RD = dout_RD.contiguous()
        chunks = _chunks(x_VR, ctx.p, parameters, ctx.matmul)
        dropped = _dropped(ctx.recompute.share, len(chunks))
        R, D = x_VR.shape[1], we.shape[1]
        dx_VR = torch.zeros_like(x_VR) if ctx.needs_input_grad[3] else None
        grads = [ctx.recompute.empty(t, *t.shape) for t in parameters]
        dw1, db1, dw2, db2, dwg, dbg, dwe, dbe, dscale, dshift = grads
        # Of the selection weights: dout . (normed scale + shift); the first part is added chunk by chunk
        ds_VR = shift @ dout_RD.t()
        torch.matmul(s_VR, dout_RD, out=dshift)
        mean_VR = (scale @ dout_RD.t()).div_(D)
        scratch = _scratch(x_VR)
        later_state = random_state(x_VR.device)
        if ctx.p and dropped["keep"]:
            set_random_state(x_VR.device, ctx.random_state)
        for i in _visited(x_VR, len(chunks), dropped):
            chunk = chunks[i]
            at, k = chunk.at, chunk.boost
            C = len(chunk.x)
            have = {name: whole[_from(chunks, dropped[name], at)] for name, whole in kept.items() if i >= dropped[name]}
            if i < max(dropped.values()):
                ctx.recompute.calls[f"{ctx.name} vsn"] += 1
            made = chunk.run(have, scratch, scratch)
            h1, h2, gates, normed, rstd = (made[name] for name in ("h1", "h2", "gates", "normed", "rstd"))
            if i + 1 == dropped["keep"]:
                set_random_state(x_VR.device, later_state)
            s_CR, gate = s_VR[at], gates[..., D:]
            # LayerNorm: dpre = s rstd (m - mean(m) - normed mean(m normed)) with m = dout scale
            q = torch.mul(normed, dout_RD, out=scratch("q", C, R, D))
            d = torch.mul(q, scale[at, None], out=scratch("d", C, R, D))
            along_CR = d.sum(-1)
            torch.bmm(s_CR.unsqueeze(1), q, out=dscale[at].unsqueeze(1))
            ds_VR[at] += along_CR
            torch.mul(normed, (along_CR / -D).unsqueeze(-1), out=d)
            d.addcmul_(dout_RD, scale[at, None]).sub_(mean_VR[at].unsqueeze(-1)).mul_((rstd * s_CR).unsqueeze(-1))
            x_and_one = torch.stack([chunk.x, torch.ones_like(chunk.x)], 1)
            dwe[at], dbe[at] = torch.bmm(x_and_one, d).unbind(1)
            if dx_VR is not None:
                dx_VR[at] += torch.mul(d, we[at, None], out=q).sum(-1)
            # Gated linear unit: a sigmoid(b)
            dgates = scratch("dgates", C, R, 2 * D, dtype=ctx.matmul)
            torch.mul(d, gate, out=dgates[..., :D])
            torch.mul(dgates[..., :D], gates[..., :D], out=q)
            torch.addcmul(q, q, gate.to(q.dtype), value=-1, out=dgates[..., D:])
            torch.sum(dgates, 1, dtype=dbg.dtype, out=dbg[at])
            _product(dwg[at], h2.transpose(1, 2), dgates, k)
            _product(d, dgates, chunk.wg.transpose(1, 2), k)
            if "keep" in made:
                d.mul_(made["keep"])
            torch.sum(d, 1, out=db2[at])
            dh2 = d.to(ctx.matmul)
            _product(dw2[at], h1.transpose(1, 2), dh2)
            _product(q, dh2, chunk.w2.transpose(1, 2))
            torch.ops.aten.elu_backward.grad_input(q, 1.0, 1.0, 1.0, True, h1.to(q.dtype), grad_input=d)
            dw1[at], db1[at] = torch.bmm(x_and_one, d).unbind(1)
            if dx_VR is not None:
                dx_VR[at] += torch.mul(d, w1[at, None], out=q).sum(-1)
        return None, None, None, dx_VR, ds_VR, *grads


def _forward(
    recompute: Recompute, name: str, p: float, x_VR: Tensor, s_VR: Tensor, parameters: Sequence[Tensor],
    kept: dict[str, Tensor] | None,
) -> Tensor:  # fmt: skip
    """The weighted sum [R, D]. What is kept for the backward pass is put into `kept` by name; None keeps nothing."""
    scale, shift = parameters[8:]
    chunks = _chunks(x_VR, p, parameters, autocast_dtype(x_VR))
    dropped = _dropped(1.0 if kept is None else recompute.share, len(chunks))
    scratch = _scratch(x_VR)
    with full_precision(x_VR):
        total_RD = s_VR.t() @ shift
        for i in _visited(x_VR, len(chunks), dropped):
            chunk = chunks[i]
            recompute.calls[f"{name} vsn"] += 1

            def into(name: str, *shape: int, dtype: torch.dtype | None = None, i: int = i, at: slice = chunk.at) -> Tensor:
                if kept is None or i < dropped[name]:
                    return scratch(name, *shape, dtype=dtype)
                if name not in kept:
                    # One block over all chunks: many small ones would break up the heap
                    variables = len(x_VR) - chunks[dropped[name]].at.start
                    kept[name] = recompute.empty(x_VR, variables, *shape[1:], dtype=dtype)
                return kept[name][_from(chunks, dropped[name], at)]

            normed = chunk.run({}, into, scratch)["normed"]
            scaled = torch.mul(normed, scale[chunk.at, None], out=scratch("scaled", *chunk.shape))
            for c, s_R in enumerate(s_VR[chunk.at]):
                total_RD.addcmul_(scaled[c], s_R.unsqueeze(-1))
    return total_RD


STAGES: tuple[tuple[tuple[str, ...], float], ...] = (
    (("normed", "rstd", "h1"), 2 / 5.25),
    (("gates",), 2 / 5.25),
    (("h2", "keep"), 1.25 / 5.25),
)
"""What recomputation drops, cheapest first: element-wise results, then one matrix product, then the other with the dropout mask;
and each stage's part of a chunk's float32 activations."""


def _dropped(share: float, chunks: int) -> dict[str, int]:
    """How many of the first chunks do not keep each tensor, so that about `share` of all activations is dropped."""
    out: dict[str, int] = {}
    for names, part in STAGES:
        out |= dict.fromkeys(names, round(min(1.0, max(0.0, share) / part) * chunks))
        share -= part
    return out


def _visited(x: Tensor, chunks: int, dropped: dict[str, int]) -> Iterable[int]:
    """The chunks to run: all, in order; of tensors without data one of each kind, which is all that a memory plan sees."""
    return range(chunks) if not x.is_meta else sorted({0, *dropped.values()} & set(range(chunks)))


def _from(chunks: list[_Chunk], first: int, at: slice) -> slice:
    """A chunk's place in a tensor that begins with chunk number `first`."""
    start = chunks[first].at.start
    return slice(at.start - start, at.stop - start)


class _Allocate(Protocol):
    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor: ...


def _scratch(like: Tensor) -> _Allocate:
    """Buffers by name, made for the first (largest) chunk and used again by every later one."""
    made: dict[str, Tensor] = {}

    def allocate(name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if name not in made:
            made[name] = like.new_empty(math.prod(shape), dtype=dtype or like.dtype)
        return made[name][: math.prod(shape)].view(shape)

    return allocate


def _product(out: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> None:
    """factor (a @ b) into `out`, whatever its dtype."""
    if out.dtype == a.dtype:
        torch.baddbmm(out, a, b, beta=0, alpha=factor, out=out)
    else:
        out.copy_(torch.bmm(a, b)).mul_(factor)


def _chunks(x_VR: Tensor, p: float, parameters: Sequence[Tensor], matmul: torch.dtype) -> list[_Chunk]:
    # Dropout of a share p that is a multiple of 1/256, so that one random byte per element decides
    cut = min(255, max(1, round(p * 256))) if p else 0
    size = VSN_CHUNK.get(x_VR.device.type, VSN_CHUNK["cpu"])
    out = []
    for start in range(0, len(x_VR), size):
        at = slice(start, min(start + size, len(x_VR)))
        w1, b1, w2, b2, wg, bg, we, be = (t[at] for t in parameters[:8])
        out.append(_Chunk(at, x_VR[at], cut, w1, b1, w2.to(matmul), b2.to(matmul), wg.to(matmul), bg.to(matmul), we, be))
    return out


@dataclass(frozen=True)
class _Chunk:
    """The GRNs of a few variables, embeddings folded in: inputs [C, R], weights stacked over C. Matrix products run in the
    dtype of `w2` and `wg`, everything else in that of `x`."""

    at: slice
    x: Tensor
    cut: int  # a random byte below it drops the element
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    wg: Tensor
    bg: Tensor
    we: Tensor
    be: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        return *self.x.shape, self.we.shape[1]

    @property
    def boost(self) -> float:
        """What elements that dropout keeps are multiplied by."""
        return 256.0 / (256 - self.cut)

    def run(self, have: dict[str, Tensor], into: _Allocate, scratch: _Allocate) -> dict[str, Tensor]:
        """Everything the backward pass needs, made into `into` unless we `have` it: `keep` (where dropout keeps an element),
        `h1` (ELU output), `h2` (second layer, masked), `gates` ([a | sigmoid(b)]), `normed` [C, R, D] and `rstd` [C, R]."""
        C, R, D = self.shape
        made, matmul, x_CR1 = dict(have), self.w2.dtype, self.x.unsqueeze(-1)
        if self.cut and "keep" not in made:
            random = random_bytes(C, R, D, device=self.x.device)
            # Bytes 0 and 1: operations on booleans take many times as long
            made["keep"] = torch.ge(random, self.cut, out=into("keep", C, R, D, dtype=torch.uint8))
        if "h1" not in made:
            h1 = made["h1"] = into("h1", C, R, D, dtype=matmul)
            wide = h1 if matmul == self.x.dtype else scratch("d", C, R, D)
            torch.addcmul(self.b1[:, None], x_CR1, self.w1[:, None], out=wide)
            # ELU as max(x, 0) + (2 ** (min(x, 0) / ln 2) - 1): a third of the time of its expm1
            below = torch.clamp(wide, max=0, out=scratch("q", C, R, D)).mul_(1 / math.log(2)).exp2_().sub_(1)
            wide.clamp_(min=0).add_(below)
            if wide is not h1:
                h1.copy_(wide)
        if "h2" not in made:
            h2 = made["h2"] = into("h2", C, R, D, dtype=matmul)
            torch.baddbmm(self.b2[:, None], made["h1"], self.w2, out=h2)
            if self.cut:
                h2.mul_(made["keep"])
        if "gates" not in made:
            gates = made["gates"] = into("gates", C, R, 2 * D, dtype=matmul)
            torch.baddbmm(self.bg[:, None], made["h2"], self.wg, alpha=self.boost, out=gates)
            gates[..., D:].sigmoid_()
        if "normed" not in made:
            normed, gates = into("normed", C, R, D), made["gates"]
            torch.mul(gates[..., :D], gates[..., D:], out=normed)
            normed.addcmul_(x_CR1, self.we[:, None]).add_(self.be[:, None])
            normed.sub_(normed.mean(-1, keepdim=True))
            squares = torch.mul(normed, normed, out=scratch("q", C, R, D))
            rstd = torch.mean(squares, -1, out=into("rstd", C, R)).add_(1e-5).rsqrt_()
            made["normed"], made["rstd"] = normed.mul_(rstd.unsqueeze(-1)), rstd
        return made
