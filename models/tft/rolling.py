"""How much a TFT's skill depends on the time it was tested on and on its seed: more models of the same configuration, for
their metrics alone. They are trained after the run's own final checkpoint, and no file of theirs is kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np

from models.config import Split
from models.progress import StopRequested, TrainResult
from models.tft.baselines import BASELINES
from models.tft.config import TFTConfig
from models.windows import SeriesArrays, block_rows

logger = logging.getLogger(__name__)

Train = Callable[..., TrainResult]
Job = tuple[dict[str, Any], TFTConfig, SeriesArrays]
SKILLS = tuple(f"skill_vs_{name}" for name in BASELINES)


@dataclass(frozen=True)
class Cut:
    """One evaluation in the past: series that end where the test block of the next later one begins, and how to split them.

    The arrays are not copied: `history_rows` ends the series, and nothing in a training reads the target or the inputs of a
    row after that.
    """

    series: SeriesArrays
    split: Split

    def dates(self, gap: int) -> dict[str, str]:
        """Last instant trained on, first and last instant tested on, over all series."""
        blocks, times = block_rows(self.series, self.split, gap), self.series.timestamps
        spans = {name: rows[rows[:, 1] > rows[:, 0]] for name, rows in blocks.items()}
        out = {}
        if len(train := spans["train"]):
            out["train_until"] = _date(times[train[:, 1] - 1].max())
        if len(test := spans["test"]):
            out |= {"test_from": _date(times[test[:, 0]].min()), "test_until": _date(times[test[:, 1] - 1].max())}
        return out


def cuts(series: SeriesArrays, split: Split, count: int) -> Iterator[Cut]:
    """The `count` evaluations before the ordinary split, the latest first: every block moves back by the test block's share
    (or, with dates, by the time from the first test instant to the last row), so the train block shrinks and validation and
    test keep their length."""
    begin = series.offsets[:-1]
    here, gone, span = Cut(series, split), 1 - split.train - split.val, timedelta(0)
    if split.cut_dates:
        ends, first = begin + series.history_rows, block_rows(series, split, 0)["test"][:, 0]
        tested = first < ends
        if not tested.any():
            return
        micros = series.timestamps[ends[tested] - 1].max() - series.timestamps[first[tested]].min()
        span = timedelta(microseconds=int(micros))
        if not span:
            return
    for number in range(1, count + 1):
        # From the rows, not from a share: what is rounded there is rounded here too, and the blocks meet
        rows = block_rows(here.series, here.split, 0)["test"][:, 0] - begin
        if split.cut_dates:
            earlier = Split(cut_dates=(split.cut_dates[0] - number * span, split.cut_dates[1] - number * span))
        else:
            left = 1 - number * gone
            earlier = Split(train=(split.train - number * gone) / left, val=split.val / left)
        here = Cut(replace(series, history_rows=rows), earlier)
        train = block_rows(here.series, earlier, 0)["train"]
        if (train[:, 0] == train[:, 1]).all():
            return
        yield here


def more_models(
    config: TFTConfig, series: SeriesArrays, train: Train, own: dict[str, Any], stop_requested: StopRequested
) -> dict[str, Any]:
    """Metrics `rolling`, `seeds` and `spread` of `rolling_cuts` + `extra_seeds` trainings by `train`; `own` are the test
    metrics of the run itself, which counts in either spread.

    A training that fails leaves a row with `error`; a stop request leaves the rows there are. Either way `complete` is false.
    """
    gap = series.contract.lookback_bars + config.horizon
    alone = config.model_copy(update={"rolling_cuts": 0, "extra_seeds": 0, "checkpoint_every": config.epochs})
    earlier = cuts(series, config.split, config.rolling_cuts)
    seeds = [(config.seed + number) % 2**31 for number in range(1, config.extra_seeds + 1)]
    jobs: dict[str, Iterable[Job]] = {
        "rolling": ((cut.dates(gap), alone.model_copy(update={"split": cut.split}), cut.series) for cut in earlier),
        "seeds": (({"seed": seed}, alone.model_copy(update={"seed": seed}), series) for seed in seeds),
    }
    wanted = {"rolling": config.rolling_cuts, "seeds": config.extra_seeds}
    found = {kind: list(_rows(kind, jobs[kind], train, stop_requested)) for kind, count in wanted.items() if count}
    return {**found, "spread": {kind: _spread(own, rows, wanted[kind]) for kind, rows in found.items()}}


def _rows(kind: str, jobs: Iterable[Job], train: Train, stop_requested: StopRequested) -> Iterator[dict[str, Any]]:
    """One row per training, as far as it gets."""
    jobs = iter(jobs)
    for name, config, series in jobs:
        if stop_requested():
            return
        try:
            result = train(
                config, series, on_epoch=lambda row: None, on_checkpoint=lambda *a: None, stop_requested=stop_requested
            )
            if result.stop_reason == "interrupted":
                return
            row = {**name, **_row(result)}
        except Exception as error:
            # The model itself stands on disk, unpublished: it must not be lost with a further evaluation. A second stop
            # signal may come as an exception, though, and is none of ours.
            if stop_requested():
                raise
            logger.exception("%s %s failed", kind, name)
            row = {**name, "error": f"{type(error).__name__}: {error}"}
        logger.info("%s %s", kind, row)
        yield row


def _row(result: TrainResult) -> dict[str, Any]:
    """What is kept of a training. Raises ValueError without test windows, or when the metrics are not finite."""
    test = result.metrics.get("test")
    if test is None:
        raise ValueError("no test windows")
    numbers = {name: test[name] for name in ("pinball", *SKILLS, "coverage")}
    if not all(math.isfinite(x) for x in numbers.values()):
        raise ValueError("the metrics are not finite")
    return {**numbers, "windows": test["windows"], "epochs": result.epochs, "stop_reason": result.stop_reason}


def _spread(own: dict[str, Any], rows: list[dict[str, Any]], wanted: int) -> dict[str, Any]:
    """Mean, standard deviation (n - 1), least and most of every skill over the run itself and the rows."""
    sound = [own, *(row for row in rows if "error" not in row)]
    out: dict[str, Any] = {"models": len(sound), "complete": len(sound) == wanted + 1}
    for name in SKILLS:
        values = np.array([row[name] for row in sound])
        std = float(values.std(ddof=1)) if len(values) > 1 else 0.0
        out[name] = {"mean": float(values.mean()), "std": std, "min": float(values.min()), "max": float(values.max())}
    return out


def _date(micros: Any) -> str:
    return np.datetime_as_string(np.datetime64(int(micros), "us"), unit="m", timezone="UTC")
