"""The promotion gate: challenger and champion on bars new to both, by the stated rule, recorded."""

import dataclasses
import json

import pytest
import torch
from synthetic import series_arrays, small_contract, write_market
from test_artifacts import publish, trained
from test_training_rules import CONFIGS, SERIES, Run

import tasks.promotion
from models.checkpoint import read_checkpoint_bytes, save_checkpoint
from models.comparison import Comparison, Incomparable, compare_forecasts, compare_policies, rows_from, untouched_from
from models.config import IngestConfig, Split
from tasks.artifacts import champion_version, run_key
from tasks.datasets import write_dataset
from tasks.expectations import validate_features
from tasks.promotion import challenge, decide, judge
from tasks.registry import history, promote
from tasks.staging import stage_parquet
from tasks.storage import LocalStore

COMPARE = {"tft": compare_forecasts, "dqn": compare_policies}


def comparison(low, high, measure="total pinball loss per window"):
    return Comparison(measure, 1.0, 1.0, (low + high) / 2, low, high, 100, 50, "2020", "2021", [0.0, 1.0])


@pytest.mark.parametrize(
    ("rule", "intervals", "promoted"),
    [
        ("better", [(0.1, 0.3)], True), ("better", [(-0.1, 0.3)], False), ("better", [(0.1, 0.3), (-0.1, 0.3)], False),
        ("not_worse", [(-0.1, 0.3)], True), ("not_worse", [(-0.3, -0.1)], False),
        ("not_worse", [(0.1, 0.2), (-0.3, -0.1)], False),
    ],
)  # fmt: skip
def test_rules_read_the_intervals(rule, intervals, promoted):
    decided, why = judge([comparison(*interval) for interval in intervals], rule)
    assert decided is promoted
    assert "95 % interval" in why


@pytest.mark.parametrize("rule", ["better", "not_worse"])
def test_an_agent_that_does_not_beat_flat_is_turned_away_by_either_rule(rule):
    flat = comparison(-0.1, 0.2, "net log return per bar, fill next, against flat")
    assert not judge([comparison(0.1, 0.2), flat], rule)[0]


def test_common_rows_come_after_what_either_model_learnt_from():
    short = series_arrays({"AAA": 150, "CCC": 90})
    bounds = [untouched_from(SERIES, Split()), untouched_from(short, Split(train=0.5, val=0.1))]
    rows = rows_from(SERIES, bounds)
    assert rows[0].tolist() == [187, 220], "85 % of 220 rows, later than 60 % of 150"
    assert rows[1].tolist() == [220 + 153, 400], "85 % of its own 180 rows, later than the other's latest bound"
    ended = untouched_from(series_arrays({"AAA": 215}), Split(train=0.9, val=0.1))
    late = rows_from(SERIES, [untouched_from(SERIES, Split()), ended])
    assert late.tolist() == [[215, 220], [400, 400]], "a model without a test block of its own learnt until its last row"


def snapshots(family, **change):
    run = Run(family, **change)
    return read_checkpoint_bytes(run.final, None)


LONG = series_arrays({"AAA": 420, "BBB": 380})


@pytest.mark.parametrize("family", ["tft", "dqn"])
def test_a_model_against_itself_is_exactly_even(family):
    one = snapshots(family, series=LONG)
    rows = rows_from(LONG, [untouched_from(LONG, CONFIGS[family].split)])
    for found in COMPARE[family](one, one, LONG, rows):
        if not found.measure.endswith("against flat"):
            assert (found.difference, found.low, found.high) == (0, 0, 0)
            assert found.moments >= 50


@pytest.mark.parametrize("family", ["tft", "dqn"])
def test_spoilt_weights_lose_and_the_sign_says_so(family):
    """Either way round: what is better for one is worse for the other by as much."""
    sound = snapshots(family, series=LONG)
    spoilt = snapshots(family, series=LONG)
    name = {"tft": "network.quantile_heads.bias", "dqn": "network.heads.bias"}[family]
    spoilt.tensors[name] += 3.0 if family == "tft" else torch.arange(9) % 3 * 50.0
    rows = rows_from(LONG, [untouched_from(LONG, CONFIGS[family].split)])
    there, back = COMPARE[family](sound, spoilt, LONG, rows)[0], COMPARE[family](spoilt, sound, LONG, rows)[0]
    assert there.difference == pytest.approx(-back.difference)
    assert there.difference != 0
    if family == "tft":
        assert there.low > 0
        assert back.high < 0
        assert len(there.curve) == there.moments
        assert there.curve[-1] == pytest.approx(there.difference * there.values)


def test_longer_context_of_the_champion_takes_only_windows_that_both_have():
    rows = rows_from(LONG, [untouched_from(LONG, Split())])
    rows[1, 0] = LONG.offsets[1] + 10  # the second series has too little history for the longer one there
    short, long = snapshots("tft", series=LONG), snapshots("tft", series=LONG, context=30)
    found = compare_forecasts(short, long, LONG, rows)[0]
    assert found.values == (63 - 2) + (380 - 30 - 2)
    with pytest.raises(Incomparable, match="another horizon: 3 against 2"):
        compare_forecasts(short, snapshots("tft", series=LONG, horizon=2), LONG, rows)
    with pytest.raises(Incomparable, match="time stamps"):
        compare_forecasts(short, long, LONG, rows_from(LONG, [dict.fromkeys(LONG.names, LONG.timestamps[400])]))
    other = dataclasses.replace(LONG, contract=small_contract(historical=19))
    with pytest.raises(Incomparable, match="other feature columns"):
        compare_forecasts(short, short, other, rows)


@pytest.fixture
def ladder(folder):
    """A store with a dataset and a way to publish real forecasters on it, by seed and epochs."""
    store = LocalStore(folder / "store")
    write_market(folder / "source", series={"AAA": 420, "BBB": 380}, static=3, historical=20, future=4)
    staged = stage_parquet(str(folder / "source"), small_contract(), IngestConfig(), folder / "staged")
    dataset, uri = write_dataset(staged, validate_features(staged), store)

    def publish_forecaster(seed, spoil=0.0, **change):
        config = CONFIGS["tft"].model_copy(update={"seed": seed, **change})
        weights = Run("tft", series=LONG, seed=seed, **change).weights
        weights.tensors["network.quantile_heads.bias"] += spoil
        contract = dataset.contract.model_dump(mode="json")
        weights.metadata.update(dataset=dataset.fingerprint, config=config.model_dump(mode="json"), contract=contract)
        run = trained(
            folder / str(seed), config=config, dataset=dataset, dataset_uri=uri, run_key=run_key(dataset, config, "tft"),
            model="tft", family="tft", metrics={},
        )  # fmt: skip
        final = save_checkpoint(folder / str(seed), "tft", 2, True, weights)
        return publish(store, run.model_copy(update={"checkpoints": (run.checkpoints[0], final)}))

    return store, publish_forecaster


def test_the_better_challenger_wins_the_worse_one_loses_and_both_are_on_record(ladder):
    store, publish_forecaster = ladder
    spoilt = publish_forecaster(0, spoil=3.0, promotion="better")
    assert challenge(store, spoilt, "better").why == "first version that qualifies"
    decision = challenge(store, publish_forecaster(1), "better")
    assert decision.promoted, decision.why
    (change,) = history(store, "tft")[1:]
    assert (change.from_version, change.to_version, change.rule) == (1, 2, "better")
    assert change.evidence[0]["low"] > 0
    assert "curve" not in change.evidence[0]
    worse = publish_forecaster(2, spoil=3.0)
    for _ in range(2):
        decision = challenge(store, worse, "not_worse")
        assert not decision.promoted
        assert "worse in total pinball" in decision.why
    assert champion_version(store, "tft") == 2
    record = json.loads(store.get("models/tft/history/refused/3-against-2.json"))
    assert (record["rule"], record["evidence"][0]["high"] < 0) == ("not_worse", True)
    assert "promotion" not in worse.metrics, "the manifest holds own metrics only"


def test_a_champion_that_changed_meanwhile_is_compared_again(ladder, monkeypatch):
    store, publish_forecaster = ladder
    manifests = [publish_forecaster(seed, spoil=spoil) for seed, spoil in ((0, 6.0), (1, 0.0), (2, 3.0))]
    promote(store, "tft", 1, why="first")
    asked = []
    sound = decide

    def overtaken(manifest, store, rule):
        decision = sound(manifest, store, rule)
        asked.append(decision.champion)
        if len(asked) == 1:
            assert decision.promoted, "better than the first"
            promote(store, "tft", 2, why="quicker")
        return decision

    monkeypatch.setattr(tasks.promotion, "decide", overtaken)
    assert not challenge(store, manifests[2], "better").promoted, "and worse than the one that came in between"
    assert asked == [1, 2]
    assert champion_version(store, "tft") == 2


def test_a_damaged_champion_is_no_reason_to_take_its_place(ladder, folder):
    store, publish_forecaster = ladder
    promote(store, "tft", publish_forecaster(0).version, why="first")
    path = folder / "store/models/tft/1/tft_final_epoch2.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    decision = challenge(store, publish_forecaster(1), "better")
    assert not decision.promoted
    assert "cannot be compared with champion 1: tft_final_epoch2" in decision.why.replace("models/tft/1/", "")
