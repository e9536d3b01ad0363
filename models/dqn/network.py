"""The Q network: 225 features in, one head of three action values for every position that may be held."""

from __future__ import annotations

from collections.abc import Sequence

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
