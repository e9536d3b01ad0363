"""What the report says a trained TFT looked at: every row and window of the test block once, the same bytes each time."""

import io

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from synthetic import series_arrays
from test_training_rules import Run

import models.tft.evaluation as evaluation
from models.config import Split
from models.tft.config import TFTConfig
from models.tft.evaluation import Interpretation, interpretation
from models.tft.network import TemporalFusionTransformer
from models.tft.scaling import Scaler
from models.windows import WindowDataset, block_rows
from tasks.interpretation import interpretation_parquet
from tasks.plots import _other_trainings, plots_of
from tasks.report import flat_metrics

T, H = 8, 3
SERIES = series_arrays({"AAA": 220, "BBB": 180, "CCC": 6})
GROUPS = ("static", "historical", "future")


@pytest.fixture(scope="module")
def fitted():
    """A network, its scaler and the windows of a test block with one series too short for any."""
    torch.manual_seed(3)
    config = TFTConfig(context=T, horizon=H, hidden_size=8, num_heads=2, grn_layers=1, dropout=0.5, device="cpu")
    blocks = block_rows(SERIES, Split(), 3)
    network = TemporalFusionTransformer(config, SERIES.contract.sizes)
    scaler = Scaler.fit(SERIES, blocks["train"], SERIES.target(None), "auto", H)
    return network, scaler, WindowDataset(SERIES, blocks["test"], T, H)


def one_by_one(network, scaler, windows):
    """The oracle: every window by itself, every row by its number."""
    rows, total = {group: {} for group in GROUPS}, np.zeros((H, T + H))
    network.eval()
    for series, origin in windows.sequential_starts(1):
        batch = windows.batch(np.array([[series, origin]]), 1)
        found = network.interpret(*scaler.inputs(batch, scaler.rows_of(SERIES)))
        rows["static"][series] = found.static[0].numpy()
        rows["historical"] |= dict(zip(range(origin - T + 1, origin + 1), found.historical[0].numpy(), strict=True))
        rows["future"] |= dict(zip(range(origin + 1, origin + H + 1), found.future[0].numpy(), strict=True))
        total += found.attention[0].numpy()
    return {group: np.stack(list(by_row.values())) for group, by_row in rows.items()}, total / len(windows)


def agrees(found, fitted):
    weights, attention = one_by_one(*fitted)
    same = np.allclose(found.attention, attention, atol=1e-6)
    for group in GROUPS:
        same &= np.allclose(found.means[group], weights[group].mean(0), atol=1e-6)
        same &= np.allclose(found.percentiles[group], np.quantile(weights[group], (0.1, 0.5, 0.9), axis=0), atol=1e-6)
    return same


@pytest.mark.parametrize("run", [512, 7, 2])
def test_every_row_and_window_counts_once_however_the_block_is_cut(fitted, run, monkeypatch):
    monkeypatch.setattr(evaluation, "RUN_WINDOWS", run)
    fitted[0].train()
    found = interpretation(*fitted, "cpu")
    assert fitted[0].training, "the mode from before is back"
    assert found.windows == len(fitted[2]) == int(fitted[2].counts.sum())
    assert agrees(found, fitted)
    assert found.attention.sum(1) == pytest.approx(np.ones(H))
    assert all(x.sum() == pytest.approx(1) for x in found.means.values())


@pytest.mark.parametrize("fault", ["last run alone", "a row twice", "dropout on"])
def test_the_oracle_catches_a_planted_fault(fitted, fault, monkeypatch):
    monkeypatch.setattr(evaluation, "RUN_WINDOWS", 512 if fault == "last run alone" else 7)
    runs = evaluation._runs
    if fault == "last run alone":
        monkeypatch.setattr(evaluation, "_runs", lambda windows: list(runs(windows))[-1:])
    elif fault == "a row twice":
        monkeypatch.setattr(evaluation, "_runs", lambda windows: [batch for batch in runs(windows) for _ in range(2)])
    else:
        monkeypatch.setattr(fitted[0], "eval", lambda: fitted[0].train())
    found = interpretation(*fitted, "cpu")
    monkeypatch.undo()
    assert not agrees(found, fitted)


def test_percentiles_of_many_rows_keep_every_kth_one_across_runs(fitted, monkeypatch):
    whole = interpretation(*fitted, "cpu")
    monkeypatch.setattr(evaluation, "PERCENTILE_ROWS", 30)
    thinned = interpretation(*fitted, "cpu")
    monkeypatch.setattr(evaluation, "RUN_WINDOWS", 7)
    cut = interpretation(*fitted, "cpu")
    assert not np.array_equal(thinned.percentiles["historical"], whole.percentiles["historical"])
    for group in GROUPS:
        assert np.allclose(cut.percentiles[group], thinned.percentiles[group], atol=1e-6), group
        assert np.allclose(thinned.means[group], whole.means[group], atol=1e-12), group


@pytest.fixture(scope="module")
def runs():
    return [Run("tft", epochs=1), Run("tft", epochs=1), Run("tft", epochs=1, seed=5)]


def test_parquet_has_the_same_bytes_for_the_same_seed_and_others_for_another(runs):
    first, again, other = (interpretation_parquet(run.result.report["interpretation"]) for run in runs)
    assert first == again
    assert first != other
    table = pq.read_table(io.BytesIO(first)).to_pylist()
    found = runs[0].result.report["interpretation"]
    selection = [row for row in table if row["kind"] == "selection"]
    assert [row["variable"] for row in selection] == [name for group in GROUPS for name in found.names[group]]
    for row in selection:
        place = found.names[row["group"]].index(row["variable"])
        assert row["weight"] == found.means[row["group"]][place]
        assert [row[p] for p in ("p10", "p50", "p90")] == found.percentiles[row["group"]][:, place].tolist()
        assert row["horizon_step"] is row["position"] is None
    attention = {(row["horizon_step"], row["position"]): row["weight"] for row in table if row["kind"] == "attention"}
    assert len(table) == len(selection) + len(attention) == len(selection) + H * (T + H)
    assert attention[1, 1 - T] == found.attention[0, 0]
    assert attention[2, 0] == found.attention[1, T - 1]
    assert attention[H, H] == found.attention[-1, -1]


def test_attention_sees_no_bar_after_the_one_it_forecasts(runs):
    found = runs[0].result.report["interpretation"].attention
    for h in range(1, H + 1):
        assert found[h - 1, T + h :] == pytest.approx(0.0)
        assert (found[h - 1, : T + h - 1] > 0).all()


def test_without_a_test_block_there_is_nothing_to_interpret():
    run = Run("tft", epochs=1, split=Split(train=0.8, val=0.2))
    assert "interpretation" not in run.result.report
    assert [title for title, _ in plots_of(run.result)] == ["Training"]


def test_report_plots_what_was_looked_at_and_the_skill_by_step(runs):
    plots = dict(plots_of(runs[0].result))
    windows = runs[0].result.metrics["windows"]["test"]
    by_step = {f"{name} by step on the test block" for name in ("Skill", "Coverage")}
    assert {f"Attention, mean of {windows} test windows", "Calibration on the test block", *by_step} <= set(plots)
    test = runs[0].result.metrics["test"]
    lowest, *_, highest = test["share_below"].values()
    assert highest - lowest == pytest.approx(test["coverage"])
    assert np.mean(test["pinball_by_step"]) == pytest.approx(test["pinball"])
    for row in test["baselines"].values():
        assert np.mean(row["pinball_by_step"]) == pytest.approx(row["pinball"])
    assert dict(plots_of(runs[1].result)) == plots


def test_earlier_cuts_and_other_seeds_stand_beside_the_run_and_a_failed_one_is_left_out():
    skills = {"skill_vs_naive": 0.25, "skill_vs_linear": -0.5}
    metrics = {
        "test": skills, "rolling": [{"test_from": "2012-03-01T00:00Z", **skills}], "seeds": [{"seed": 7, "error": "out of luck"}],
    }  # fmt: skip
    [(title, svg)] = _other_trainings(metrics)
    assert title == "Skill of this run and of earlier cuts"
    for word in ("this run", "2012-03-01", "skill vs linear"):
        assert word in svg


def test_a_long_attention_profile_is_a_small_plot(runs):
    random = np.random.default_rng(0).random((100, 2100))
    found = Interpretation(9, {}, {}, {}, random / random.sum(1, keepdims=True))
    run = runs[0].result
    report = {"interpretation": found}
    svg = dict(plots_of(type(run)(run.epochs, run.stop_reason, None, "last", (), {}, report)))[
        "Attention, mean of 9 test windows"
    ]
    assert len(svg) < 60_000


def test_lists_of_rows_have_a_line_per_number_in_the_metrics_table():
    rows = flat_metrics({"rolling": [{"pinball": 1.0, "test_from": "2012"}, {"pinball": 2.0}], "steps": [1.0, 2.0]})
    assert rows == [("rolling.1.pinball", "1"), ("rolling.1.test_from", "2012"), ("rolling.2.pinball", "2"), ("steps", "1, 2")]
