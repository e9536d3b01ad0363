"""Pinball loss and the summaries made of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pinball(forecast: Tensor, target: Tensor, quantiles: Sequence[float]) -> Tensor:
    """Pinball loss of every element, in the target's own unit: forecast [..., Q], target [...] -> [..., Q]
    (Koenker & Bassett 1978). `quantiles` are fractions in (0, 1), in the order of the forecast's last axis."""
    levels = torch.tensor(quantiles, dtype=forecast.dtype, device=forecast.device)
    error = target.unsqueeze(-1) - forecast
    return torch.maximum(levels * error, (levels - 1) * error)
