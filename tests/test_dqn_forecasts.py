"""The TFT as an input of the agent: no forecast knows what comes after its row, and it is worth something where only a history
tells of the next bar."""

import dataclasses

import numpy as np
import pytest
import torch
from synthetic import series_arrays
from test_dqn import OFF, fraction, market, trained
from test_training_rules import CONFIGS, SERIES, TRAINERS, Run, StopAfter

import models.dqn.forecasts as forecasts
import models.dqn.training as training
from models.checkpoint import CheckpointError, checkpoint_bytes, read_checkpoint_bytes
from models.comparison import compare_policies, rows_from, untouched_from
from models.dqn.config import DQNConfig
from models.dqn.forecasts import cut_instants, foreseen, known_before, walk_forward
from models.dqn.market import feature_table, market_of
from models.tft.config import TFTConfig
from models.windows import UnfitSeriesError, block_rows

TFT = CONFIGS["tft"].model_copy(update={"epochs": 1})
FOLDS = {"tft_folds": 3}
CONFIG = CONFIGS["dqn"].model_copy(update=FOLDS)
T, H = TFT.context, TFT.horizon


@pytest.fixture(scope="module")
def fed():
    return walk_forward(CONFIG, TFT, SERIES)


def changed_after(series, row):
    """Everything that is only known after its bar is another from every series' row after `row` on."""
    random, late = np.random.default_rng(1), np.concatenate([np.arange(n) > row for n in series.history_rows])
    arrays = {name: getattr(series, name).copy() for name in ("historical", "targets", "price")}
    for values in arrays.values():
        values[late] = np.abs(random.normal(30, 10, values[late].shape)) + 1
    return dataclasses.replace(series, **arrays)


def seen_until(values, row):
    """Forecasts of every series up to and including `row`."""
    return torch.cat([values[a : a + row + 1] for a in SERIES.offsets[:-1]])


def all_rows(series, instant, held, gap):
    return series


@pytest.mark.parametrize(("row", "planted"), [(100, False), (130, False), (130, True)])
def test_nothing_after_a_row_changes_its_forecast_or_an_earlier_one(row, planted, fed, monkeypatch):
    """The planted fault: a fold's TFT is trained on the rows that it forecasts too."""
    if planted:
        monkeypatch.setattr(forecasts, "known_before", all_rows)
        fed = walk_forward(CONFIG, TFT, SERIES)
    other = walk_forward(CONFIG, TFT, changed_after(SERIES, row))
    before, after = (seen_until(found.values, row) for found in (fed, other))
    assert before.isfinite().any()
    assert torch.equal(before.nan_to_num(-99), after.nan_to_num(-99)) is not planted
    assert not torch.equal(fed.values.nan_to_num(-99), other.values.nan_to_num(-99)), "later ones do change"


@pytest.mark.parametrize("val", [0.0, 0.15, 0.5])
@pytest.mark.parametrize("gap", [3, 40])
def test_no_fold_learns_from_the_purge_gap_before_its_rows_in_any_series(gap, val):
    cuts = cut_instants(CONFIG, SERIES)
    share = min(0.7 / (0.7 + val), 1 - 1e-9)
    for instant in cuts:
        known = known_before(SERIES, instant, 1 - share, gap)
        blocks = block_rows(known, TFT.split.model_copy(update={"train": share, "val": 1 - share - 1e-12}), gap)
        for s, first in enumerate(SERIES.offsets[:-1]):
            rows = np.flatnonzero(SERIES.timestamps[first : SERIES.offsets[s + 1]] >= instant)
            assert all(blocks[name][s, 1] <= max(first + rows[0] - gap, blocks[name][s, 0]) for name in ("train", "val"))
            assert blocks["train"][s, 1] <= max(first, first + rows[0] - gap)


def test_rows_without_a_forecast_are_in_no_block_and_the_report_counts_them(fed):
    cuts = cut_instants(CONFIG, SERIES)
    assert len(cuts) == 3
    assert cuts[-1] == SERIES.timestamps[170], "85 % of all rows lie before the 170th bar of two series of 220 and 180"
    market = market_of(CONFIG, SERIES, fed)
    for rows in market.blocks.values():
        for a, b in rows:
            assert market.table[a:b].isfinite().all()
            assert (SERIES.timestamps[a:b] >= cuts[0]).all()
    assert market.table.isnan().any(1).sum() == fed.told["rows_without_forecast"]
    assert (SERIES.timestamps >= cuts[0]).sum() - 2 * H == 400 - fed.told["rows_without_forecast"], (
        "the last ones lack rows ahead"
    )
    assert [fold["rows_forecast"] for fold in fed.told["folds"]] == [
        int(np.diff(foreseen(SERIES, TFT, a, b)).sum()) for a, b in zip(cuts, [*cuts[1:], None], strict=True)
    ]
    for wrong in ((CONFIG, None), (CONFIGS["dqn"], fed)):
        with pytest.raises(ValueError, match="walk_forward"):
            market_of(*wrong[:1], SERIES, *wrong[1:])


def test_off_by_default_no_tft_is_carried_or_read():
    run = Run("dqn")
    assert "tft" not in run.weights.metadata
    assert not [name for name in run.weights.tensors if name.startswith("tft.")]
    assert run.weights.tensors["network.body.0.weight"].shape[1] == len(SERIES.contract.features)
    assert "tft" not in run.result.metrics


class FedRun(Run):
    """A training with forecasts in its state."""

    def __init__(self, given, **change):
        sound = TRAINERS["dqn"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(TRAINERS, "dqn", lambda *a, **k: sound(*a, forecasts=given, **k))
            super().__init__("dqn", **{**FOLDS, **change})


@pytest.mark.parametrize("looks", [0, 13])
def test_stopped_and_resumed_with_kept_folds_equals_never_stopped(looks, fed):
    kept = {}
    whole = FedRun(walk_forward(CONFIG, TFT, SERIES, keep=lambda fold, made: kept.update({fold: checkpoint_bytes(made)})))
    stopped = FedRun(fed, stop_requested=StopAfter(looks))
    assert stopped.result.stop_reason == "interrupted"
    again = {fold: read_checkpoint_bytes(data, None) for fold, data in kept.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forecasts, "_trained", None)  # none is trained a second time
        same = walk_forward(CONFIG, TFT, SERIES, kept=again)
    torch.manual_seed(5)
    state = stopped.resume[looks // CONFIG.updates_per_epoch]
    assert FedRun(same, resume=state).sha256 == whole.sha256 == FedRun(fed).sha256
    other = walk_forward(CONFIG, TFT.model_copy(update={"seed": 1}), SERIES)
    with pytest.raises(ValueError, match="other features or prices"):
        FedRun(other, resume=state)
    assert FedRun(other).sha256 != whole.sha256


def test_a_stop_while_folds_are_trained_keeps_the_ones_that_are_done():
    kept = []
    assert walk_forward(CONFIG, TFT, SERIES, keep=lambda fold, made: kept.append(fold), stop_requested=StopAfter(4)) is None
    assert kept == [1]


def test_a_loaded_agent_decides_with_the_tft_in_its_own_file(fed):
    snapshot = read_checkpoint_bytes(FedRun(fed).final, None)
    begin, short = SERIES.offsets[:-1], SERIES.history_rows - H
    now = dataclasses.replace(SERIES, history_rows=short)  # the last rows hold what is known ahead alone
    found = training.decide(snapshot, now)
    network, scaler = training.rebuilt(snapshot)
    last = (begin + short - 1).tolist()
    wanted = network(
        scaler.apply(training.agent_table(snapshot, SERIES, feature_table(SERIES), np.stack([last, np.add(last, 1)], 1))[0])[last]
    )
    assert [d.timestamp for d in found] == SERIES.timestamps[last].tolist()
    assert np.allclose([list(d.values.values()) for d in found], wanted.detach().numpy(), atol=1e-5)
    # What the agent was tested with is what it decides with
    assert torch.allclose(
        training.agent_table(snapshot, SERIES, feature_table(SERIES), fed.rows)[0][last, -3 * H :], fed.values[last], atol=1e-6
    )
    with pytest.raises(UnfitSeriesError, match=r"AAA, BBB .*3 rows ahead"):
        training.decide(snapshot, SERIES)
    snapshot.metadata.pop("tft")
    with pytest.raises(CheckpointError, match="no TFT"):
        training.decide(snapshot, now)


def test_agents_with_and_without_forecasts_are_compared_after_what_the_tft_learnt_from(fed):
    longer = series_arrays({"AAA": 420, "BBB": 380})
    ours, theirs = (read_checkpoint_bytes(run.final, None) for run in (FedRun(fed), Run("dqn")))
    ours.metadata["tft"]["since"] = since = int(longer.timestamps[300])
    rows = rows_from(longer, [untouched_from(SERIES, CONFIG.split)])
    found = compare_policies(ours, theirs, longer, rows)[0]
    assert found.values == (420 - H - 300 - 1) + (380 - H - 300 - 1)
    assert found.first == np.datetime_as_string(np.datetime64(since, "us"), unit="m", timezone="UTC")


def test_one_fold_too_many_folds_and_folds_too_short_are_refused():
    with pytest.raises(ValueError, match="least is 2"):
        DQNConfig(tft_folds=1)
    with pytest.raises(UnfitSeriesError, match="lower tft_folds"):
        cut_instants(CONFIG.model_copy(update={"tft_folds": 500}), SERIES)
    with pytest.raises(UnfitSeriesError, match=r"TFT fold 1: .*lower tft_folds"):
        walk_forward(CONFIG.model_copy(update={"tft_folds": 60}), TFT, SERIES)


def delayed_market(rows=2400, delay=3, seed=0):
    """The next bar goes the way that a coin fell `delay` bars ago; a row shows its own coin and noise."""
    random = np.random.default_rng(seed)
    coin = random.choice([-1.0, 1.0], rows)
    returns = 0.01 * np.concatenate([np.zeros(delay), coin[:-delay]]) + random.normal(0, 0.002, rows)
    series = market(np.concatenate([coin[:, None], random.normal(size=(rows, 3))], 1), returns)
    return dataclasses.replace(series, targets=series.price[:, None].copy())


def test_an_edge_that_only_a_history_shows_is_traded_with_forecasts_alone():
    series, options = delayed_market(), {"fee": 5e-4, "epochs": 1, "split": {"train": 0.7, "val": 0.1}}
    tft = TFTConfig(
        context=6, horizon=1, hidden_size=8, num_heads=1, grn_layers=0, dropout=0.0, epochs=4, updates_per_epoch=50,
        batch_size=16, windows_per_start=16, learning_rate=1e-2, early_stopping=OFF, device="cpu",
    )  # fmt: skip
    fed = walk_forward(DQNConfig(tft_folds=2, device="cpu", split=options["split"]), tft, series)
    assert fraction(trained(series, forecasts=fed, tft_folds=2, **options)) > 0.6
    assert fraction(trained(series, **options)) < 0.2
