"""The Q network: 225 features in, one head of three action values for every position that may be held; and its passes
written out by hand, in memory that is allocated once (autograd takes longer than the matrix products themselves)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class PositionQNetwork(nn.Module):
    """Action values [B, 3 positions, 3 actions] of market features [B, F]; the position is a head, not an input, so one
    forward pass serves every position (design: the market does not react to the agent)."""

    def __init__(self, features: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in hidden_sizes:
            layers += [nn.Linear(features, width), nn.ReLU()]
            features = width
        self.body = nn.Sequential(*layers)
        self.heads = nn.Linear(features, 9)

    def forward(self, features: Tensor) -> Tensor:
        return self.heads(self.body(features)).view(-1, 3, 3)


def flatten(network: nn.Module) -> nn.Parameter:
    """One vector of all parameters, with one of all gradients as its `.grad`: the network's own become views of them."""
    parameters = list(network.parameters())
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
    flat.grad = torch.zeros_like(flat)
    sizes = [p.numel() for p in parameters]
    for p, values, gradient in zip(parameters, torch.split(flat.detach(), sizes), torch.split(flat.grad, sizes), strict=True):
        p.data, p.grad = values.view_as(p), gradient.view_as(p)
    return flat


class Passes:
    """Forward and backward of a flattened network on `rows` rows at a time; equal to autograd's to the bit. What `forward`
    returns is overwritten by the next one. Call under `torch.no_grad`."""

    def __init__(self, network: PositionQNetwork, rows: int) -> None:
        self.layers = [module for module in network.modules() if isinstance(module, nn.Linear)]
        self.inputs = [layer.weight.new_empty(rows, layer.in_features) for layer in self.layers]
        self.gradients = [torch.empty_like(x) for x in self.inputs]
        self.values = self.layers[-1].weight.new_empty(rows, 9)

    def forward(self, table: Tensor, rows: Tensor) -> Tensor:
        """Action values [B, 9] of those rows of the feature table."""
        torch.index_select(table, 0, rows, out=self.inputs[0])
        for layer, x, out in zip(self.layers, self.inputs, [*self.inputs[1:], self.values], strict=True):
            torch.addmm(layer.bias, x, layer.weight.t(), out=out)
            if out is not self.values:
                out.relu_()
        return self.values

    def backward(self, gradient: Tensor) -> None:
        """Write every parameter's gradient, given the loss's [B, 9] by the values of the last forward."""
        for layer, x, out in zip(reversed(self.layers), reversed(self.inputs), reversed(self.gradients), strict=True):
            torch.mm(gradient.t(), x, out=layer.weight.grad)
            torch.sum(gradient, 0, out=layer.bias.grad)
            if x is not self.inputs[0]:
                torch.mm(gradient, layer.weight, out=out)
                gradient = torch.ops.aten.threshold_backward.grad_input(out, x, 0, grad_input=out)
