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


class UnfitSeriesError(ValueError):
    """Sound rows that a model cannot learn or forecast from; the message names the series."""


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
        cuts = [begin + np.floor(rows * share + 1e-9).astype(np.int64) for share in (split.train, split.train + split.val)]
    val = np.stack([cuts[0] + gap, cuts[1] - gap], axis=1)
    val[:, 1] = np.maximum(val[:, 0], val[:, 1])
    return {"train": np.stack([begin, cuts[0]], axis=1), "val": val, "test": np.stack([cuts[1], end], axis=1)}


def overlap(rows: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows [S, 2] that lie in both."""
    first = np.maximum(rows[:, 0], others[:, 0])
    return np.stack([first, np.maximum(first, np.minimum(rows[:, 1], others[:, 1]))], axis=1)


def _rows_before(series: SeriesArrays, date: datetime) -> NDArray[np.int64]:
    moment = date.astimezone(UTC) if date.tzinfo else date.replace(tzinfo=UTC)
    micros = np.int64(round(moment.timestamp() * 1e6))
    firsts, ends = series.offsets[:-1], series.offsets[:-1] + series.history_rows
    return np.array([np.searchsorted(series.timestamps[a:b], micros) for a, b in zip(firsts, ends, strict=True)], np.int64)


@dataclass(frozen=True)
class WindowBatch:
    """S starts x K consecutive windows that share their rows: window k of start s has its last history row at
    origins[s, k]. Rows after a series' end repeat its last one and are masked out."""

    series: NDArray[np.int64]  # [S] index of the series
    origins: NDArray[np.int64]  # [S, K] global row numbers
    valid: NDArray[np.bool_]  # [S, K]
    static: NDArray[np.float32]  # [S, 5]
    historical: NDArray[np.float32]  # [S, K + T - 1, 210]
    future: NDArray[np.float32]  # [S, K + H - 1, 10], from the row after the first origin on

    @property
    def windows(self) -> int:
        """Number of windows that count."""
        return int(self.valid.sum())


class WindowDataset:
    """Windows of `context` history rows and `horizon` target rows whose targets all lie in a block.

    Context may reach back before the block, never before its series. Nothing is copied until a batch is gathered.
    """

    def __init__(self, series: SeriesArrays, rows: NDArray[np.int64], context: int, horizon: int) -> None:
        self.series, self.context, self.horizon = series, context, horizon
        begin = series.offsets[:-1]
        first_origin = np.maximum(rows[:, 0] - 1, begin + context - 1)
        self.keep(first_origin, np.maximum(0, rows[:, 1] - horizon - first_origin))

    def keep(self, first_origin: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """From now on the windows are, of each series, these many consecutive ones from that origin on."""
        self.first_origin, self.counts, self.ends = first_origin, counts, np.cumsum(counts)
        self.last_origin = first_origin + counts - 1
        self._origin_of_zero = first_origin + counts - self.ends

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def short_series(self) -> dict[str, int]:
        """Series without a single window here, with their complete rows."""
        rows = self.series.history_rows
        return {n: int(rows[i]) for i, n in enumerate(self.series.names) if self.counts[i] == 0}

    def random_starts(self, count: int, windows: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """First origins [count, 2] as (series, row), uniform over windows; moved back so that `windows` fit."""
        window = generator.integers(0, len(self), count)
        starts = np.empty((2, count), np.int64)
        which, first = starts
        which[:] = self.ends.searchsorted(window, side="right")
        np.add(self._origin_of_zero[which], window, out=first)
        if windows > 1:
            latest = np.maximum(self.last_origin - windows + 1, self.first_origin)
            np.minimum(first, latest[which], out=first)
        return starts.T

    def sequential_starts(self, windows: int) -> NDArray[np.int64]:
        """First origins [n, 2] that pass every window once in order, up to `windows` at a time."""
        starts = [(s, self.first_origin[s] + k) for s in range(len(self.counts)) for k in range(0, int(self.counts[s]), windows)]
        return np.array(starts, np.int64).reshape(-1, 2)

    def batch(self, starts: NDArray[np.int64], windows: int) -> WindowBatch:
        """The windows from each of the starts [S, 2] on."""
        which, first = starts.T
        last = self.last_origin[which]
        origins = first[:, None] + np.arange(windows)
        valid = origins <= last[:, None]
        cut = [] if (complete := valid[:, -1]).all() else np.flatnonzero(~complete).tolist()
        series, context, horizon = self.series, self.context, self.horizon
        return WindowBatch(
            series=which,
            origins=np.minimum(origins, last[:, None]) if cut else origins,
            valid=valid,
            static=series.static[which],
            historical=_stretches(series.historical, first - (context - 1), context + windows - 1, cut, last),
            future=_stretches(series.future, first + 1, horizon + windows - 1, cut, last + horizon),
        )

    def target_rows(self, batch: WindowBatch) -> NDArray[np.int64]:
        """Global rows of the target values, [S, K, H]."""
        return batch.origins[:, :, None] + np.arange(1, self.horizon + 1)


def _stretches(
    table: NDArray[np.float32], first: NDArray[np.int64], rows: int, cut: list[int], last: NDArray[np.int64]
) -> NDArray[np.float32]:
    """`rows` rows of the table from each `first` on, [S, rows, columns]; for the starts in `cut`, rows after `last` repeat it.

    The rows of a start lie side by side and are copied at once, from a view of all stretches: an index per row takes twice as
    long.
    """
    stretches, (down, across) = len(table) - rows + 1, table.strides
    if stretches > 0:
        # What as_strided does, in a tenth of its time
        view = np.ndarray((stretches, rows, table.shape[1]), table.dtype, table, 0, (down, down, across))
        out = view[np.minimum(first, stretches - 1) if cut else first]
    else:
        out = np.empty((len(first), rows, table.shape[1]), table.dtype)
    for i in cut:
        found = table[first[i] : last[i] + 1]
        out[i, : len(found)], out[i, len(found) :] = found, found[-1]
    return out


def last_windows(series: SeriesArrays, context: int, horizon: int) -> WindowDataset:
    """One window per series for prediction: from its last complete row when rows ahead follow, else from the last row
    that still has `horizon` rows after it."""
    ends = series.offsets[1:]
    origin = np.minimum(series.offsets[:-1] + series.history_rows - 1, ends - horizon - 1)
    dataset = WindowDataset(series, np.stack([origin + 1, origin + 1 + horizon], axis=1), context, horizon)
    enough = (origin - series.offsets[:-1] + 1 >= context) & (origin >= series.offsets[:-1])
    dataset.keep(origin, enough.astype(np.int64))
    return dataset
