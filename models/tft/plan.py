"""How much memory a training update takes, layer by layer, before anything is trained: the update itself, run on tensors
that have shapes and no data. Numbers are bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.memory import LiveTensors, parse_size
from models.tft.config import TFTConfig
from models.tft.loss import pinball
from models.tft.network import TemporalFusionTransformer

ADAM_STATES = 2
LSTM_KEPT = 18.4
"""What an LSTM keeps for its backward pass on a CPU (oneDNN), in sizes of its output with the width rounded up to 16: measured
with `LiveTensors` for widths 8 to 128, 8 to 60 steps. What cuDNN keeps has not been measured."""


class MemoryBudgetError(ValueError):
    """A memory budget that not even the leanest update fits."""


@dataclass(frozen=True)
class LayerMemory:
    """One layer: its parameters, their gradients and Adam moments, and what it keeps from the forward for the backward pass."""

    layer: str
    parameters: int
    gradients: int
    optimizer: int
    kept: int


@dataclass(frozen=True)
class MemoryPlan:
    """A training update of `starts` x `windows` windows. `peak` is everything alive at the worst moment, `passing` what is
    alive then beside parameters, gradients, Adam moments, batch and kept activations: buffers of the pass in progress."""

    share: float
    starts: int
    windows: int
    layers: tuple[LayerMemory, ...]
    batch: int
    passing: int
    peak: int

    @property
    def fixed(self) -> int:
        """Parameters, gradients and Adam moments."""
        return sum(row.parameters + row.gradients + row.optimizer for row in self.layers)

    @property
    def kept(self) -> int:
        """Activations kept from the forward pass."""
        return sum(row.kept for row in self.layers)

    def rows(self) -> list[dict[str, str | float]]:
        """The plan as a table in MiB, largest layers first, with the totals last."""
        table: list[dict[str, str | float]] = [
            {
                "layer": row.layer, "parameters": row.parameters / 2**20, "gradients": row.gradients / 2**20,
                "adam": row.optimizer / 2**20, "kept": row.kept / 2**20,
            }
            for row in sorted(self.layers, key=lambda row: -(row.kept + row.parameters))
        ]  # fmt: skip
        total = {name: sum(float(row[name]) for row in table) for name in ("parameters", "gradients", "adam", "kept")}
        return [*table, {"layer": "all layers", **total}]


def fitting_plan(config: TFTConfig, sizes: tuple[int, int, int]) -> MemoryPlan:
    """The plan that training follows: the config's own share of recomputation, or with `auto` the smallest one, in
    tenths, that fits `memory_budget`; if none does, fewer starts at a time (gradients are summed up to the full batch).

    Raises MemoryBudgetError with both numbers when a single start with everything recomputed is still too much.
    """
    setting, starts = config.gradient_checkpointing, config.batch_size
    if config.memory_budget is None:
        share = {"none": 0.0, "full": 1.0}[setting] if isinstance(setting, str) else setting
        return plan(config, sizes, share, starts)
    budget = parse_size(config.memory_budget)
    while True:
        least = plan(config, sizes, 1.0, starts)
        if least.peak <= budget or starts == 1:
            break
        starts = (starts + 1) // 2
    if least.peak > budget:
        peak, fixed = (f"{size / 2**20:.0f} MiB" for size in (least.peak, least.fixed))
        raise MemoryBudgetError(
            f"one window start with everything recomputed takes {peak}, {fixed} of it for weights, gradients and Adam moments; "
            f"memory_budget is {config.memory_budget}: raise it or lower hidden_size"
        )
    low, high = 0, 10  # tenths; the peak falls as the share rises
    while low < high:
        middle = (low + high) // 2
        tried = plan(config, sizes, middle / 10, starts)
        if tried.peak <= budget:
            high, least = middle, tried
        else:
            low = middle + 1
    return least


def plan(config: TFTConfig, sizes: tuple[int, int, int], share: float, starts: int) -> MemoryPlan:
    """The plan of an update over `starts` window starts at a time, `share` of the variable chunks' activations recomputed."""
    T, H, K = config.context, config.horizon, config.windows_per_start
    settings = config.model_copy(update={"gradient_checkpointing": share})
    # Beside rounded weights the float ones wait: as much again as a moment, if every weight were rounded
    states = ADAM_STATES + (config.quantisation == "int8")
    with torch.device("meta"), LiveTensors() as live:
        live.layer = "parameters"
        network = TemporalFusionTransformer(settings, sizes)
        live.layer = "optimizer"
        moments = [torch.empty_like(p) for p in network.parameters() for _ in range(states)]
        live.layer = "batch"
        inputs = torch.empty(starts, sizes[0]), torch.empty(starts, K + T - 1, sizes[1]), torch.empty(starts, K + H - 1, sizes[2])
        target = torch.empty(starts, K, H)
        live.layer = "gradients"
        if starts < config.batch_size:  # the gradients of the starts before stand beside the pass
            for parameter in network.parameters():
                parameter.grad = torch.empty_like(parameter)
        for lstm in (network.lstm_encoder, network.lstm_decoder):
            lstm.forward = partial(_lstm_footprint, lstm)  # type: ignore[method-assign, assignment]
        live.layer = "loss"
        _tag_layers(network, live)
        with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bfloat16"):
            quantiles = network(*inputs)
        loss = pinball(quantiles, target, config.quantiles).mean()
        kept = Counter(live.live)
        live.layer = "backward"
        for parameter in network.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: live.move(p.grad, "gradients"))  # type: ignore[no-untyped-call]
        torch.autograd.backward(loss)
        # Adam works in place on CPU and GPU; clipping makes one number per parameter
    del moments
    parameters: Counter[str] = Counter()
    for name, parameter in network.named_parameters():
        parameters[_layer(name)] += parameter.numel() * parameter.element_size()
    layers = tuple(
        LayerMemory(name, parameters[name], parameters[name], states * parameters[name], kept[name])
        for name in [*dict.fromkeys([*parameters, *kept])]
        if name not in ("parameters", "optimizer", "batch")
    )
    weights = sum(parameters.values())
    # After the first update gradients, moments and weights stand together without any activation
    peak = max(live.peak, (2 + states) * weights + live.live["batch"])
    batch = live.at_peak["batch"]
    passing = peak - weights * (1 + states) - live.at_peak["gradients"] - batch - sum(row.kept for row in layers)
    return MemoryPlan(share, starts, K, layers, batch, max(0, passing), peak)


class _Kept(torch.autograd.Function):
    """As an LSTM: outputs of the right shapes, and a workspace kept until the backward pass."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, hidden: Tensor, cell: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = -(-x_BTD.shape[2] // 16) * 16
        workspace = x_BTD.new_empty(round((LSTM_KEPT - 1) * x_BTD.shape[0] * x_BTD.shape[1] * wide))
        ctx.save_for_backward(x_BTD, hidden, cell, *weights, workspace)
        return torch.empty_like(x_BTD), torch.empty_like(hidden), torch.empty_like(cell)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors[:-1])


def _lstm_footprint(lstm: nn.LSTM, x_BTD: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    # Without data torch runs an LSTM step by step, which takes seconds and keeps other tensors than the real one
    output, hidden, cell = _Kept.apply(x_BTD, *state, *lstm.parameters())  # type: ignore[no-untyped-call]
    return output, (hidden, cell)


def _layer(parameter: str) -> str:
    return parameter.split(".")[0].replace("_", " ")


def _tag_layers(network: nn.Module, live: LiveTensors) -> None:
    """Tensors made in a child's forward, the recomputed one too, count under its name."""

    def enter(name: str, stack: list[str]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            stack.append(live.layer)
            live.layer = name

        return hook

    def leave(stack: list[str]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            live.layer = stack.pop()

        return hook

    for name, child in network.named_children():
        stack: list[str] = []
        # Hooks see calls of a module; the contexts are a dict of modules that is itself never called
        for module in child.values() if isinstance(child, nn.ModuleDict) else (child,):
            module.register_forward_pre_hook(enter(name.replace("_", " "), stack))
            module.register_forward_hook(leave(stack))
