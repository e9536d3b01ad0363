"""The market as tensors: one feature table, log returns, and many copies that step together. Nothing here sees a row
after the one that an agent stands on; rewards are paid out by `step`.

A position is -1, 0 or 1 units of the asset (short, flat, long). Actions are sell, hold, buy: buy asks for +1, sell for -1
(0 when long_only), hold for the position held. A bar from row t to t + 1 pays position x log return minus
fee x |change of position|, divided by the standard deviation of the TRAIN returns.

fill "close": the order of row t is filled at the close of row t and earns from t to t + 1. fill "next": it is filled at the
close of row t + 1, so the bar from t to t + 1 still earns with the old position. The position that an agent sees is always
the one that its pending orders lead to, so that the state stays Markov."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.dqn.config import DQNConfig
from models.windows import Block, SeriesArrays, UnfitSeriesError, block_rows, overlap

if TYPE_CHECKING:
    from models.dqn.forecasts import ForecastInput

POSITIONS = (-1, 0, 1)
ACTIONS = ("sell", "hold", "buy")
FLAT = 1
CLIP = 10.0


@dataclass(frozen=True)
class FeatureScaler:
    """Mean and scale of the 225 features over the train rows; a constant column has scale 1."""

    mean: Tensor  # [F]
    scale: Tensor  # [F]

    def apply(self, table: Tensor) -> Tensor:
        """Standardised features, clipped to +-10: one wild value must not steer a trade."""
        return ((table - self.mean) / self.scale).clamp_(-CLIP, CLIP)

    @classmethod
    def fit(cls, table: Tensor) -> FeatureScaler:
        """Statistics of `table` [rows, F], in float64."""
        wide = table.double()
        mean, scale = wide.mean(0), wide.std(0, correction=0)
        flat = ~(scale > 1e-12 * wide.abs().amax(0).clamp(min=1e-30))
        scale = torch.where(flat, 1.0, scale)
        return cls(mean.float(), scale.float())


def feature_table(series: SeriesArrays) -> Tensor:
    """All features of every row, static then historical then future: [N, 225] float32."""
    static = series.static[series.series_of_row]
    return torch.from_numpy(np.concatenate([static, series.historical, series.future], axis=1, dtype=np.float32))


def log_returns(series: SeriesArrays) -> Tensor:
    """Log return from row t to t + 1, [N] float64; 0 on the last complete row of a series and after it.

    Raises UnfitSeriesError naming the series whose price is not above zero: such a thing cannot be traded.
    """
    out = np.zeros(len(series.price))
    for name, first, rows in zip(series.names, series.offsets[:-1], series.history_rows, strict=True):
        price = series.price[first : first + rows]
        if (wrong := int((price <= 0).sum())) > 0:
            raise UnfitSeriesError(f"series {name}: {wrong} of {rows} prices are not above zero; the DQN cannot trade it")
        out[first : first + rows - 1] = np.diff(np.log(price))
    return torch.from_numpy(out)


def table_digest(series: SeriesArrays) -> str:
    """sha256 of features and prices: row numbers mean nothing on other data."""
    total = hashlib.sha256()
    for array in (series.offsets, series.static, series.historical, series.future, series.price):
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def segments_of(rows: NDArray[np.int64]) -> Tensor:
    """Blocks [S, 2] that have a bar to trade (two rows or more), as a tensor."""
    return torch.from_numpy(rows[rows[:, 1] - rows[:, 0] >= 2])


def reward_scale_of(returns: Tensor, train_rows: NDArray[np.int64]) -> float:
    """Standard deviation of the log returns inside the train block; 1 when they are constant."""
    inside = torch.cat([returns[a : b - 1] for a, b in train_rows if b - a >= 2])
    scale = float(inside.std(correction=0))
    return scale if scale > 0 else 1.0


@dataclass(frozen=True)
class Market:
    """A dataset as agents meet it: what is measured (scaler, scale) is measured on the train block alone."""

    table: Tensor  # [N, F] float32, standardised
    returns: Tensor  # [N] float64, log return from row t to t + 1
    scaler: FeatureScaler
    scale: float  # of the rewards
    blocks: dict[Block, NDArray[np.int64]]  # first and end row by series, [S, 2]


def market_of(config: DQNConfig, series: SeriesArrays, forecasts: ForecastInput | None = None) -> Market:
    """With forecasts (models/dqn/forecasts.py) they are further columns, and the blocks end where they do.

    Raises UnfitSeriesError when no series has two train rows, or a price is not above zero; ValueError when the configuration
    asks for forecasts and none are given."""
    if (forecasts is None) != (config.tft_folds == 0):
        raise ValueError("forecasts and tft_folds go together: models.dqn.forecasts.walk_forward makes them")
    blocks = block_rows(series, config.split, series.contract.lookback_bars + 1)
    if forecasts is not None:
        blocks = {name: overlap(rows, forecasts.rows) for name, rows in blocks.items()}
    segments = segments_of(blocks["train"])
    if not len(segments):
        lengths = dict(zip(series.names, series.history_rows.tolist(), strict=True))
        raise UnfitSeriesError(f"no series has two rows in the train block; rows by series: {lengths}")
    raw, returns = feature_table(series), log_returns(series)
    if forecasts is not None:
        raw = torch.cat([raw, forecasts.values], 1)
    scaler = FeatureScaler.fit(raw[torch.cat([torch.arange(int(a), int(b)) for a, b in segments])])
    return Market(scaler.apply(raw), returns, scaler, reward_scale_of(returns, blocks["train"]), blocks)


def targets_of_actions(positions: Literal["long_only", "long_short"]) -> Tensor:
    """New position index by (held position index, action): [3, 3]; indices 0, 1, 2 are short, flat, long."""
    sell = FLAT if positions == "long_only" else 0
    return torch.tensor([[sell, held, 2] for held in range(3)])


def reward_table(
    returns: Tensor, targets: Tensor, *, fee: float, reward_scale: float, fill: Literal["close", "next"]
) -> Tensor:  # fmt: skip
    """Scaled reward of the bar from every row on, by cell (3 x held position index + action): [N, 9] float32."""
    held, new = torch.arange(3)[:, None].expand(3, 3).reshape(9), targets.reshape(9)
    earning = held if fill == "next" else new
    gain = (earning - FLAT) * returns[:, None] - fee * (new - held).abs()
    return (gain / reward_scale).float()


class MarketEnv:
    """`num_envs` copies of the market on the segments, stepped together without a word to the host. `rows` [E] and `held` [E]
    are their states, `rewards` [N, 9] what every row pays by cell.

    A copy at its segment's last row is truncated, not ended: it goes on flat at a random row of a random segment.
    """

    def __init__(
        self, returns: Tensor, segments: Tensor, targets: Tensor, *, fee: float, reward_scale: float,
        fill: Literal["close", "next"], num_envs: int, device: str = "cpu",
    ) -> None:  # fmt: skip
        rewards = reward_table(returns, targets, fee=fee, reward_scale=reward_scale, fill=fill)
        spans = [(int(first), int(end) - 1) for first, end in segments]
        bars = torch.cat([torch.arange(first, last) for first, last in spans])
        last_rows = torch.cat([torch.full((last - first,), last) for first, last in spans])
        self.rewards, self.next_held = rewards.to(device), targets.reshape(9).to(device)
        self.bars, self.last_rows = bars.to(device), last_rows.to(device)
        self.rows, self.ends = self._anywhere(num_envs)
        self.held = torch.full_like(self.rows, FLAT)

    def _anywhere(self, count: int) -> tuple[Tensor, Tensor]:
        """Random rows with a bar to earn, and the last rows of their segments."""
        at = torch.randint(len(self.bars), (count,), device=self.bars.device)
        return self.bars.index_select(0, at), self.last_rows.index_select(0, at)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled rewards [E] float32 and truncation flags [E]; moves every copy one bar on."""
        cells = 3 * self.held + actions
        rewards = self.rewards.view(-1).index_select(0, 9 * self.rows + cells)
        rows = self.rows + 1
        truncated = rows >= self.ends
        elsewhere, ends = self._anywhere(len(rows))
        self.rows, self.ends = torch.where(truncated, elsewhere, rows), torch.where(truncated, ends, self.ends)
        self.held = torch.where(truncated, FLAT, self.next_held.index_select(0, cells))
        return rewards, truncated
