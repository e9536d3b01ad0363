"""Series as arrays, their train / validation / test blocks, and the windows over them. Parquet is read in
tasks/series.py; what a network does with a window stands in models/tft and models/dqn."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from models.config import Split
from models.features import FeatureContract

Block = Literal["train", "val", "test"]


@dataclass(frozen=True)
class SeriesArrays:
    """All series of a dataset, one after the other, each in rising time: N rows, S series.

    Row r of series s: offsets[s] <= r < offsets[s + 1]. The first `history_rows[s]` rows of a series are
    complete; rows after them (only in a source to predict from) hold key and `future` alone, zeros elsewhere.
    """

    contract: FeatureContract
    names: tuple[str, ...]
    offsets: NDArray[np.int64]  # [S + 1]
    history_rows: NDArray[np.int64]  # [S]
    timestamps: NDArray[np.int64]  # [N], microseconds since 1970 UTC
    price: NDArray[np.float64]  # [N]
    targets: NDArray[np.float64]  # [N, contract.target_names]
    static: NDArray[np.float32]  # [S, 5]
    historical: NDArray[np.float32]  # [N, 210], row-major
    future: NDArray[np.float32]  # [N, 10], row-major

    @property
    def series_of_row(self) -> NDArray[np.int64]:
        """Index of the series of every row, [N]."""
        return np.repeat(np.arange(len(self.names)), np.diff(self.offsets))

    def target(self, name: str | None) -> NDArray[np.float64]:
        """Values of one target column, [N]; None is the contract's first. Raises KeyError with the choices."""
        names = self.contract.target_names
        if name is not None and name not in names:
            raise KeyError(f"no target {name!r}; the contract has {', '.join(names)}")
        return self.targets[:, names.index(name) if name else 0]


def block_rows(series: SeriesArrays, split: Split, gap: int) -> dict[Block, NDArray[np.int64]]:
    """First and end row of every block by series, [S, 2] in global row numbers; an empty block has first == end.

    The train block ends at the share or the date; `gap` rows (the purge gap) are taken from the validation
    block on both sides, so that train and test stay as long as the split says.
    """
    begin, end = series.offsets[:-1], series.offsets[:-1] + series.history_rows
    if split.cut_dates:
        cuts = [begin + _rows_before(series, date) for date in split.cut_dates]
    else:
        rows = series.history_rows
        # Rounding guards against 0.7 + 0.15 = 0.8499999
        cuts = [
            begin + np.floor(rows * share + 1e-9).astype(np.int64) for share in (split.train, split.train + split.val)
        ]
    val = np.stack([cuts[0] + gap, cuts[1] - gap], axis=1)
    val[:, 1] = np.maximum(val[:, 0], val[:, 1])
    return {"train": np.stack([begin, cuts[0]], axis=1), "val": val, "test": np.stack([cuts[1], end], axis=1)}


def _rows_before(series: SeriesArrays, date: datetime) -> NDArray[np.int64]:
    moment = date.astimezone(UTC) if date.tzinfo else date.replace(tzinfo=UTC)
    micros = np.int64(round(moment.timestamp() * 1e6))
    firsts, ends = series.offsets[:-1], series.offsets[:-1] + series.history_rows
    return np.array(
        [np.searchsorted(series.timestamps[a:b], micros) for a, b in zip(firsts, ends, strict=True)], np.int64
    )
