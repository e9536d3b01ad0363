"""Rolling origin and several seeds: no model sees a row it is tested on, and the run's own model is never at stake."""

import dataclasses
from datetime import UTC, datetime

import numpy as np
import pytest
from synthetic import DAY, START, series_arrays
from test_training_rules import CONFIGS, SERIES, Run

import models.tft.rolling as rolling
import models.tft.training as training
from models.checkpoint import checkpoint_bytes
from models.config import Split
from models.tft.baselines import BASELINES
from models.tft.config import TFTConfig
from models.tft.rolling import Cut, cuts
from models.windows import WindowDataset, block_rows

T, H, GAP = 8, 3, 3
MANY = series_arrays({"AAA": 220, "BBB": 181, "CCC": 97, "DDD": 6})


def date(day):
    return datetime.fromtimestamp((START + day * DAY) / 1e6, UTC)


SPLITS = {
    "shares": Split(),
    "odd shares": Split(train=0.63, val=0.17),
    "no validation": Split(train=0.9, val=0.0),
    "dates": Split(cut_dates=(date(120), date(160))),
}


def faults(all_cuts, series=MANY):
    """What is wrong with evaluations given latest first: rows trained on or chosen by at or after the first row tested on,
    test blocks that overlap or leave rows out, by series."""
    found, end = set(), None
    for cut in all_cuts:
        blocks = block_rows(cut.series, cut.split, GAP)
        kinds = {name: WindowDataset(cut.series, rows, T, H) for name, rows in blocks.items()}
        for s in range(len(series.names)):
            first = int(blocks["test"][s, 0])
            for name in ("train", "val"):
                windows = kinds[name]
                if windows.counts[s] and windows.first_origin[s] + windows.counts[s] - 1 + H >= first:
                    found.add("look-ahead")
            if kinds["test"].counts[s] and kinds["test"].first_origin[s] + 1 < first:
                found.add("test before its block")
            if end is not None and blocks["test"][s, 1] != end[s]:
                found.add("overlap" if blocks["test"][s, 1] > end[s] else "hole")
        end = blocks["test"][:, 0]
    return found


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_every_cut_trains_before_its_test_rows_and_test_blocks_meet(split):
    made = list(cuts(MANY, split, 3))
    assert faults([Cut(MANY, split), *made]) == set()
    assert len(made) == 3 or split.cut_dates
    for cut in made:
        lengths = {name: (b[:, 1] - b[:, 0])[:3] for name, b in block_rows(cut.series, cut.split, 0).items()}
        own = {name: (b[:, 1] - b[:, 0])[:3] for name, b in block_rows(MANY, split, 0).items()}
        assert (lengths["train"] < own["train"]).all()
        if not split.cut_dates:
            assert np.abs(lengths["test"] - own["test"]).max() <= 1
            assert np.abs(lengths["val"] - own["val"]).max() <= 1


def test_cuts_by_date_end_where_nothing_is_left_and_move_by_the_test_span():
    made = list(cuts(MANY, SPLITS["dates"], 50))
    assert [cut.split.cut_dates for cut in made] == [(date(61), date(101)), (date(2), date(42))], "220 rows, 60 tested"
    assert made[0].dates(GAP) == {
        "train_until": "2010-03-02T00:00Z", "test_from": "2010-04-12T00:00Z", "test_until": "2010-06-09T00:00Z",
    }  # fmt: skip
    assert list(cuts(MANY, Split(cut_dates=(date(120), date(219))), 3)) == [], "no span to move by"
    assert list(cuts(MANY, Split(cut_dates=(date(120), date(300))), 3)) == [], "nothing tested"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lambda: [Cut(MANY, Split(train=0.55, val=0.15))], {"overlap"}),
        (lambda: [Cut(cut.series, Split(train=0.5, val=0.2)) for cut in cuts(MANY, Split(), 2)], {"overlap", "hole"}),
    ],
    ids=["series that go on", "shares of the whole"],
)  # fmt: skip
def test_planted_overlaps_are_caught(fault, expected):
    found = faults([Cut(MANY, Split()), *fault()])
    assert found
    assert found <= expected


def test_a_planted_look_ahead_is_caught(monkeypatch):
    sound = block_rows

    def leaking(series, split, gap):
        blocks = sound(series, split, gap)
        blocks["train"] = np.stack([blocks["train"][:, 0], blocks["test"][:, 0] + 1], axis=1)
        return blocks

    made = list(cuts(MANY, Split(), 2))
    monkeypatch.setitem(globals(), "block_rows", leaking)
    assert "look-ahead" in faults(made)


def of_cut(cut, series=SERIES):
    return Run("tft", series=dataclasses.replace(series, history_rows=cut.series.history_rows), split=cut.split, epochs=1)


@pytest.mark.parametrize(("shift", "same"), [(0, True), (-1, False)])
def test_rows_after_a_cuts_end_change_nothing_and_its_test_rows_change_no_weight(shift, same):
    """`shift` -1 spoils the last test row too, and the metrics tell."""
    cut = next(cuts(SERIES, Split(), 1))
    test = block_rows(cut.series, cut.split, GAP)["test"]
    random = np.random.default_rng(0)

    def spoilt(first):
        targets, historical = SERIES.targets.copy(), SERIES.historical.copy()
        for s, end in enumerate(SERIES.offsets[1:]):
            targets[first[s] : end] *= np.exp(random.normal(0, 0.1, (end - first[s], 1)))
            historical[first[s] : end] = random.normal(size=(end - first[s], historical.shape[1]))
        return dataclasses.replace(SERIES, targets=targets, historical=historical)

    plain, later, tested = of_cut(cut), of_cut(cut, spoilt(test[:, 1] + shift)), of_cut(cut, spoilt(test[:, 0]))
    assert (plain.result.metrics["test"] == later.result.metrics["test"]) is same
    assert plain.final == later.final == tested.final
    assert plain.result.metrics["test"] != tested.result.metrics["test"]


@pytest.fixture(scope="module")
def plain():
    return Run("tft", epochs=2, checkpoint_every=1)


@pytest.fixture(scope="module")
def both(plain):
    return Run("tft", epochs=2, checkpoint_every=1, rolling_cuts=2, extra_seeds=2)


def own_part(metrics):
    return {name: value for name, value in metrics.items() if name not in ("rolling", "seeds", "spread")}


def weights_of(run):
    """The final file but for the two fields of its configuration."""
    config = {k: v for k, v in run.weights.metadata["config"].items() if k not in ("rolling_cuts", "extra_seeds")}
    return checkpoint_bytes(dataclasses.replace(run.weights, metadata={**run.weights.metadata, "config": config}))


def test_the_models_own_files_and_metrics_are_what_they_are_without(plain, both):
    assert both.files == plain.files
    assert weights_of(both) == weights_of(plain)
    assert own_part(both.result.metrics) == own_part(plain.result.metrics) == plain.result.metrics
    assert [row.epoch for row in both.epochs] == [1, 2], "epochs of the run itself alone"


def test_rows_are_those_of_trainings_by_hand_and_the_spread_is_theirs(plain, both):
    metrics = both.result.metrics
    expected = [of_two(split=cut.split, history_rows=cut.series.history_rows) for cut in cuts(SERIES, Split(), 2)]
    assert [row["pinball"] for row in metrics["rolling"]] == expected
    assert [row["pinball"] for row in metrics["seeds"]] == [of_two(seed=1), of_two(seed=2)]
    assert [row["seed"] for row in metrics["seeds"]] == [1, 2]
    assert [row["stop_reason"] for row in metrics["seeds"]] == ["all_epochs"] * 2
    assert metrics["rolling"][1]["test_until"] < metrics["rolling"][0]["test_until"]
    for kind in ("rolling", "seeds"):
        spread = metrics["spread"][kind]
        assert (spread["models"], spread["complete"]) == (3, True)
        for name in (f"skill_vs_{b}" for b in BASELINES):
            values = [plain.result.metrics["test"][name], *(row[name] for row in metrics[kind])]
            found = spread[name]
            assert [found[k] for k in ("mean", "std", "min", "max")] == pytest.approx(
                [np.mean(values), np.std(values, ddof=1), min(values), max(values)]
            )
            assert found["std"] > 0


def of_two(history_rows=None, **change):
    series = SERIES if history_rows is None else dataclasses.replace(SERIES, history_rows=history_rows)
    return Run("tft", series=series, epochs=2, checkpoint_every=2, **change).result.metrics["test"]["pinball"]


def test_a_failing_training_leaves_a_row_with_its_error_and_the_model_whole(plain, monkeypatch, caplog):
    sound = training.train

    def train(config, series, **options):
        if config.split != Split():
            raise ValueError("no series is long enough")
        return sound(config, series, **options)

    monkeypatch.setattr(training, "train", train)
    run = Run("tft", epochs=2, checkpoint_every=1, rolling_cuts=1, extra_seeds=1)
    assert (run.files, weights_of(run)) == (plain.files, weights_of(plain))
    assert run.result.metrics["rolling"][0]["error"] == "ValueError: no series is long enough"
    assert "pinball" in run.result.metrics["seeds"][0]
    assert {kind: s["complete"] for kind, s in run.result.metrics["spread"].items()} == {"rolling": False, "seeds": True}
    assert "no series is long enough" in caplog.text


@pytest.mark.parametrize("updates", [1, 8])
def test_a_stop_during_further_trainings_ends_them_alone(plain, both, updates, monkeypatch):
    """6 updates a training: the stop comes in the first further one or in the second."""
    calls, further = [], []
    sound = rolling.more_models

    def more_models(*arguments):
        further.append(1)
        return sound(*arguments)

    monkeypatch.setattr(training, "more_models", more_models)

    def stop_requested():
        calls.extend(further)
        return len(calls) > updates

    run = Run("tft", epochs=2, checkpoint_every=1, rolling_cuts=2, extra_seeds=1, stop_requested=stop_requested)
    assert (run.result.stop_reason, run.files) == ("all_epochs", plain.files)
    assert weights_of(run) == weights_of(plain)
    done = 1 if updates == 8 else 0
    assert run.result.metrics["rolling"] == both.result.metrics["rolling"][:done]
    assert run.result.metrics["seeds"] == []
    assert {k: (s["models"], s["complete"]) for k, s in run.result.metrics["spread"].items()} == {
        "rolling": (1 + done, False), "seeds": (1, False),
    }  # fmt: skip


def test_a_stop_that_comes_as_an_error_is_handed_on(monkeypatch):
    stopped = []

    def train(*arguments, **options):
        stopped.append(1)
        raise RuntimeError("stopped by SIGTERM")

    monkeypatch.setattr(training, "train", train)
    with pytest.raises(RuntimeError, match="SIGTERM"):
        Run("tft", epochs=1, rolling_cuts=1, stop_requested=lambda: bool(stopped))


def test_an_interrupted_run_trains_no_further_models(monkeypatch):
    monkeypatch.setattr(training, "more_models", lambda *arguments: pytest.fail("called"))
    run = Run("tft", rolling_cuts=1, stop_requested=lambda: True)
    assert run.result.stop_reason == "interrupted"


@pytest.mark.parametrize(("split", "most"), [(Split(), 4), (Split(train=0.8, val=0.2), 0), (Split(train=0.5, val=0.0), 0)])
def test_more_cuts_than_there_are_rows_for_are_refused(split, most):
    TFTConfig(rolling_cuts=most, split=split)
    with pytest.raises(ValueError, match="leave nothing to train on"):
        TFTConfig(rolling_cuts=most + 1, split=split)
    assert CONFIGS["tft"].rolling_cuts == CONFIGS["tft"].extra_seeds == 0
