"""What the times of a source's sorted rows say: order, each series' own bar interval, gaps, age of the last bar. Uses pyarrow."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.features import FeatureContract

UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
WEEK = 604_800_000_000
USUAL = 0.85
"""A bar is expected at a weekday and time that so large a share of the series' weeks hold, measured against its fullest times.
Above two thirds: a session that moves by an hour for the winter is not missed in its summer hour."""


class BarFacts(NamedTuple):
    """Per series, and over all rows: `disorder` counts rows that stand after a later one."""

    series: list[dict[str, Any]]  # name, interval_s, gaps, missing (bars in them), widest (text), last (microseconds)
    disorder: int


def interval_seconds(text: str) -> float:
    """Seconds of a bar interval such as `1d`, `60min` or `1h`. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h|d|w)", text)
    if not found:
        raise ValueError(f"bar_interval {text!r} is no number with s, min, h, d or w")
    return float(found[1]) * UNITS[found[2]]


def bar_facts(parts: Sequence[str], contract: FeatureContract, gap_bars: int) -> BarFacts:
    """Facts of every series. Raises nothing: what they mean is for the rules to say."""
    disorder = 0
    facts: list[dict[str, Any]] = []
    previous = ""
    for name, micros in _series_times(parts, contract):
        disorder += int((np.diff(micros) < 0).sum()) + int(bool(facts) and name < previous)
        previous = name
        interval, gaps = gaps_of(micros, gap_bars)
        widest = max(gaps, key=lambda gap: gap[2], default=None)
        facts.append({
            "name": name, "interval_s": interval, "gaps": len(gaps), "missing": sum(gap[2] for gap in gaps),
            "widest": "" if widest is None else f"{widest[2]} bars between {_text(widest[0])} and {_text(widest[1])}",
            "last": int(micros[-1]),
        })  # fmt: skip
    return BarFacts(facts, disorder)


def _text(micros: int) -> str:
    return np.datetime_as_string(np.datetime64(micros, "us"), unit="s") + "Z"


def gaps_of(micros: NDArray[np.int64], gap_bars: int) -> tuple[float | None, list[tuple[int, int, int]]]:
    """The usual interval in seconds (None below three bars), and gaps: last bar before, first bar after, bars missing.

    A bar is missing where the other weeks of the series hold one (so nights, weekends and closed sessions are no gaps) and more
    than `gap_bars` of them are missing in a row (so holidays are none). A single week does not say when it rests: no gaps.
    """
    if len(micros) < 3:
        return None, []
    steps = np.diff(np.sort(micros))
    steps = steps[steps > 0]
    if not len(steps):
        return None, []
    usual = int(np.median(steps))
    wide = np.flatnonzero(np.diff(micros) > usual * 1.5)
    if not len(wide):
        return usual / 1e6, []
    # Slots of a week, one usual interval long; a week holds at least one
    slots = max(1, round(WEEK / usual))
    slot_of = np.floor((micros % WEEK) * (slots / WEEK) + 1e-9).astype(np.int64) % slots
    filled = np.bincount(slot_of, minlength=slots) / len(np.unique(micros // WEEK))
    expected = filled >= USUAL * np.quantile(filled[filled > 0], 0.9)
    through = np.concatenate([[0], np.cumsum(expected)])
    gaps = []
    for at in wide:
        before, after = int(micros[at]), int(micros[at + 1])
        passed = round((after - before) / usual) - 1
        whole, rest = divmod(passed, slots)
        start = int(slot_of[at]) + 1
        end = start + rest
        missing = whole * int(through[-1]) + int(through[min(end, slots)] - through[min(start, slots)])
        if end > slots:
            missing += int(through[end - slots])
        if missing > gap_bars:
            gaps.append((before, after, missing))
    return usual / 1e6, gaps


def _series_times(parts: Sequence[str], contract: FeatureContract) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Name and times of every run of rows of one series, in stored order."""
    import pyarrow.parquet as pq

    name: Any = None
    held: list[NDArray[np.int64]] = []
    for part in parts:
        with pq.ParquetFile(part) as file:
            for batch in file.iter_batches(columns=[contract.entity, contract.timestamp]):
                batch = batch.drop_null()  # rows without a key are another rule's
                entities = np.asarray(batch[contract.entity].to_pylist(), object)
                micros = batch[contract.timestamp].cast("int64").to_numpy()
                bounds = [0, *(np.flatnonzero(entities[1:] != entities[:-1]) + 1).tolist(), len(entities)]
                for start, end in itertools.pairwise(bounds):
                    if start == end:
                        continue
                    if held and entities[start] != name:
                        yield str(name), np.concatenate(held)
                        held = []
                    name = entities[start]
                    held.append(micros[start:end])
    if held:
        yield str(name), np.concatenate(held)
