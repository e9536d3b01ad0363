"""Features that know the future, by statistics: a sample of rows is asked whether a column tells of the NEXT bars what nobody
could know. The exact test, by building the features again, stands in tasks/truncation.py. Uses pyarrow and pandas.

Momentum, reversal and trend are honest: they tell of the next bar only what past bars tell. So next bars count by what is new
in them: the residual of their return after a regression on the ten returns before. An honest column has next to nothing to do
with that, whatever it has to do with the past; a bar that slipped into a moving average of twenty shows in the average's last
change. Rank correlations (Spearman), since one wild bar must not decide; standard errors that let all series move together at
one instant and sums over several bars overlap (clusters of time, Cameron and Miller 2015, A Practitioner's Guide to
Cluster-Robust Inference); limits that hold for all columns together (Bonferroni)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.features import FeatureContract
from models.windows import SeriesArrays
from tasks.expectations import DataContractError, DataReport

if TYPE_CHECKING:
    from tasks.staging import StagedFiles

HORIZONS = {1: 0.10, 5: 0.15, 20: 0.25}
"""Bars ahead, and the correlation with them that is still plausible: 0.1 with one bar is the best that signals are known for
(Grinold and Kahn, Active Portfolio Management: 0.05 is good, 0.1 exceptional)."""
FALSE_ALARM = 1e-3  # chance that honest columns, all together, are flagged once
SAMPLE_ROWS = 10_000
BLOCKS = 4  # row groups that are read
LAGS = 10
FEWEST_CLUSTERS = 20

Floats = NDArray[np.float64]


class Leak(NamedTuple):
    """A column and how it knows the future: rank correlation of its value, or of its change since the bar before, with what is
    new in the next `bars` bars; beside it the largest one with past bars."""

    feature: str
    of: str  # "value" or "change"
    bars: int
    next: float
    past: float
    z: float  # standard errors
    rows: int

    def __str__(self) -> str:
        ahead = "the next bar" if self.bars == 1 else f"the next {self.bars} bars"
        what = self.feature if self.of == "value" else f"change of {self.feature}"
        return f"{what}: correlation {self.next:+.2f} with {ahead}, {self.past:.2f} with past ones ({self.rows} rows)"


class Block(NamedTuple):
    """Rows of consecutive bars, n of them; `features` gives the columns [k, F] of k of the rows."""

    starts: NDArray[np.int64]  # first row of every series in it
    times: NDArray[np.int64]  # [n] microseconds
    price: Floats  # [n]
    features: Callable[[NDArray[np.int64]], NDArray[np.floating[Any]]]


class _Sample(NamedTuple):
    values: Floats  # [k, F]
    changes: Floats  # [k, F]
    ahead: dict[int, Floats]  # by horizon, [k]; NaN where the series ends
    behind: dict[int, Floats]
    times: NDArray[np.int64]  # [k]
    bar: float  # usual microseconds between bars
    news: float  # share of the return that past returns do not tell, in standard deviations


def check_leaks(staged: StagedFiles, report: DataReport) -> DataReport:
    """The report with a line for every check of leaks that the configuration asks for. Raises DataContractError, with the lines
    so far, when the policy is to refuse, and BuilderError."""
    contract, config = staged.contract, staged.config
    policy = config.policy("leak")
    if config.leak_check:
        names = (*contract.groups()["historical"], *contract.groups()["future"])
        found = find_leaks(read_blocks(staged.parts, contract), names)
        report = with_line(report, policy, "no feature tells of bars to come", list(map(str, found)))
    if config.builder is not None:
        from tasks.truncation import find_look_ahead

        looks = find_look_ahead(config.builder, contract)
        report = with_line(report, policy, "features do not change when later bars are taken away", list(map(str, looks)))
    return report


def with_line(
    report: DataReport, policy: str, rule: str, found: Sequence[str], note: str = "", judged: bool = True
) -> DataReport:
    """The report with one line more: a warning when anything was found, `info` when there was nothing to judge by. Raises
    DataContractError when what was found is to be refused."""
    result = "FAILED" if found and policy == "refuse" else "warning" if found else "passed" if judged else "info"
    told = "; ".join([*found[:20], *([note] if note else [])])
    table = [*report.table, {"rule": rule, "policy": policy, "result": result, "columns": told, "rows": len(found)}]
    if result == "FAILED":
        shown = "\n  ".join(found[:30])
        raise DataContractError(f"not {rule}: {len(found)} columns:\n  {shown}\nmend the source, or let it pass with warn", table)
    return report._replace(table=table)


def find_leaks(blocks: Iterable[Block], names: Sequence[str], rows: int = SAMPLE_ROWS, seed: int = 0) -> list[Leak]:
    """Columns that know the future, the strongest first. Price must be a bar's last one; `names` are those of the features."""
    random = np.random.default_rng(seed)
    blocks = list(blocks)
    samples = [s for s in (_sample(b, rows // max(1, len(blocks)), random) for b in blocks) if s is not None]
    if not samples:
        return []
    news = float(np.mean([s.news for s in samples]))
    bar = float(np.median([s.bar for s in samples]))
    times = np.concatenate([s.times for s in samples])
    tests = 2 * len(names) * len(HORIZONS)
    found: dict[str, Leak] = {}
    for of in ("value", "change"):
        scores = _scores(np.concatenate([s.values if of == "value" else s.changes for s in samples]))
        past = np.zeros(len(names))
        for bars in HORIZONS:
            towards = np.concatenate([s.behind[bars] for s in samples])
            past = np.maximum(past, news * np.abs(_correlations(scores, towards, times, 1.0)[0]))
        for bars, plausible in HORIZONS.items():
            # Sums over h bars overlap: instants within three times that are one observation
            width = 1.0 if bars == 1 else 3 * bars * bar
            towards = np.concatenate([s.ahead[bars] for s in samples])
            rho, z, clusters, known = _correlations(scores, towards, times, width)
            if clusters < FEWEST_CLUSTERS:
                continue
            bound = np.minimum(np.maximum(plausible, past / 2), 2.5 * plausible)
            flagged = (np.abs(z) > _critical(FALSE_ALARM / tests, clusters)) & (np.abs(news * rho) >= bound)
            for i in map(int, np.flatnonzero(flagged)):
                leak = Leak(names[i], of, bars, float(news * rho[i]), float(past[i]), float(z[i]), known)
                if names[i] not in found or abs(leak.z) > abs(found[names[i]].z):
                    found[names[i]] = leak
    return sorted(found.values(), key=lambda leak: (-abs(leak.next), leak.feature))


def read_blocks(parts: Sequence[str], contract: FeatureContract, seed: int = 0) -> Iterator[Block]:
    """Some row groups of the parts, chosen at random; features are those of the row, calendar ones those of the row after, as a
    forecast uses them."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    groups: list[tuple[str, int]] = []
    for part in parts:
        with pq.ParquetFile(part) as file:
            groups += [(part, i) for i in range(file.num_row_groups)]
    chosen = np.random.default_rng(seed).permutation(len(groups))[:BLOCKS]
    historical, future = contract.groups()["historical"], contract.groups()["future"]
    for part, group in (groups[i] for i in sorted(chosen)):

        def read(columns: Sequence[str], part: str = part, group: int = group) -> Any:
            with pq.ParquetFile(part) as file:
                return file.read_row_group(group, columns=list(columns))

        def features(rows: NDArray[np.int64], read: Any = read) -> NDArray[np.floating[Any]]:
            table = read([*historical, *future])  # one group at a time is held
            ahead = np.minimum(rows + 1, table.num_rows - 1)
            return np.stack([table[n].to_numpy()[at] for of, at in ((historical, rows), (future, ahead)) for n in of], axis=1)

        table = read([contract.entity, contract.timestamp, contract.price])
        entity = table[contract.entity].combine_chunks()
        changes = pc.fill_null(pc.not_equal(entity[1:], entity[:-1]), True).to_numpy(zero_copy_only=False)
        yield Block(
            starts=np.concatenate([[0], np.flatnonzero(changes) + 1]).astype(np.int64),
            times=table[contract.timestamp].cast("int64").to_numpy(),
            price=table[contract.price].to_numpy(),
            features=features,
        )


def blocks_of(series: SeriesArrays) -> list[Block]:
    """All rows of series that are arrays already."""

    def features(rows: NDArray[np.int64]) -> Floats:
        ahead = np.minimum(rows + 1, len(series.price) - 1)
        return np.concatenate([series.historical[rows], series.future[ahead]], axis=1, dtype=np.float64)

    return [Block(series.offsets[:-1], series.timestamps, series.price, features)]


def _sample(block: Block, count: int, random: np.random.Generator) -> _Sample | None:
    """Some rows of a block with what is new before and after them; None when no series in it is long enough."""
    n = len(block.price)
    series = np.zeros(n, np.int64)
    series[block.starts[1:]] = 1
    series = np.cumsum(series)
    place = np.arange(n) - block.starts[series]
    left = np.append(block.starts[1:], n)[series] - 1 - np.arange(n)
    returns = _returns(block.price, series, place)
    fresh, news = _news(returns, place)
    total = np.cumsum(fresh)
    rows = np.flatnonzero((place >= 1) & (left >= 1) & np.isfinite(returns))
    if len(rows) < 2:
        return None
    rows = np.sort(random.permutation(rows)[:count])

    def summed(bars: int, ahead: bool) -> Floats:
        first, last = (rows, rows + bars) if ahead else (rows - bars, rows)
        inside = left[rows] >= bars if ahead else place[rows] >= bars
        return np.where(inside, total[np.minimum(last, n - 1)] - total[np.maximum(first, 0)], np.nan)

    values, before = np.split(block.features(np.concatenate([rows, rows - 1])).astype(np.float64), 2)
    steps = np.diff(block.times)[place[1:] > 0]
    return _Sample(
        values=values, changes=values - before, times=block.times[rows],
        ahead={h: summed(h, True) for h in HORIZONS}, behind={h: summed(h, False) for h in HORIZONS},
        bar=float(np.median(steps)), news=news,
    )  # fmt: skip


def _returns(price: Floats, series: NDArray[np.int64], place: NDArray[np.int64]) -> Floats:
    """Return of the bar that ends at each row in units of its series' own spread, 0 at a series' first row and NaN for a series
    without any; of a price at or below zero the change is taken instead of the log."""
    n = int(series[-1]) + 1
    positive = np.ones(n, bool)
    positive[series[~(price > 0)]] = False
    level = np.where(positive[series], np.log(np.where(price > 0, price, 1.0)), price)
    out = np.diff(level, prepend=level[0])
    out[place == 0] = 0.0
    count = np.bincount(series, minlength=n) - 1
    spread = np.sqrt(np.bincount(series, out**2, n) / np.maximum(count, 1))
    usable = (count >= 8) & (spread > 0)
    scaled = out / np.where(usable, spread, 1.0)[series]
    return np.where(usable[series], np.clip(scaled, -5, 5), np.nan)


def _news(returns: Floats, place: NDArray[np.int64]) -> tuple[Floats, float]:
    """Residuals of the returns after a regression on the ten before, and their spread as a share of the returns'."""
    r = np.nan_to_num(returns)
    lagged = np.zeros((len(r), LAGS))
    for lag in range(1, min(LAGS + 1, len(r))):
        lagged[lag:, lag - 1] = r[:-lag]
        lagged[place <= lag, lag - 1] = 0.0
    fit = (place > LAGS) & np.isfinite(returns)
    weights = np.linalg.lstsq(lagged[fit], r[fit], rcond=None)[0] if fit.sum() > 10 * LAGS else np.zeros(LAGS)
    fresh = np.where(place > 0, r - lagged @ weights, 0.0)
    return fresh, float(np.sqrt((fresh[fit] ** 2).mean() / (r[fit] ** 2).mean())) if fit.any() else 1.0


def _scores(values: Floats) -> Floats:
    """Ranks of every column of [k, F], ties shared, with mean 0 and spread 1; a constant column is 0."""
    import pandas as pd

    ranks = pd.DataFrame(values).rank().to_numpy()
    ranks = ranks - ranks.mean(axis=0)
    spread = ranks.std(axis=0)
    return ranks / np.where(spread > 0, spread, 1.0)


def _correlations(scores: Floats, towards: Floats, times: NDArray[np.int64], width: float) -> tuple[Floats, Floats, int, int]:
    """Rank correlation of every column of `scores` [k, F] with `towards` [k], its standard errors from zero, clusters and rows.
    Rows within `width` microseconds are one cluster."""
    known = np.isfinite(towards)
    rows = int(known.sum())
    if rows < 2:
        return np.zeros(scores.shape[1]), np.zeros(scores.shape[1]), 0, rows
    instants = np.floor((times[known] - times[known].min()) / width).astype(np.int64)
    order = np.argsort(instants, kind="stable")
    products = (scores[known] * _scores(towards[known][:, None]))[order]
    starts = np.flatnonzero(np.diff(instants[order], prepend=-1))
    error = np.sqrt((np.add.reduceat(products, starts, axis=0) ** 2).sum(axis=0))  # where nothing is known: no mean is taken off
    total = products.sum(axis=0)
    return total / rows, total / np.where(error > 0, error, 1.0), len(starts), rows


def _critical(chance: float, clusters: int) -> float:
    """Two-sided limit of Student's t with clusters - 1 degrees of freedom (Abramowitz and Stegun 26.7.5, two terms)."""
    z, n = NormalDist().inv_cdf(1 - chance / 2), clusters - 1
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
