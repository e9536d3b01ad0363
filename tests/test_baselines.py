"""What a TFT is measured against: baselines without look-ahead and with known answers; calibrated quantiles."""

import dataclasses
from statistics import NormalDist

import numpy as np
import pytest
import torch
from synthetic import series_arrays
from test_training_rules import SERIES, Run

from models.checkpoint import Snapshot, checkpoint_bytes, read_checkpoint_bytes
from models.config import Split
from models.tft import baselines
from models.tft.baselines import BASELINES, FEWEST, Past, linear_inputs, linear_models
from models.tft.calibration import conformal_shift, shifted
from models.tft.config import TFTConfig
from models.tft.evaluation import Forecasts, block_metrics, covered, pinball_numpy
from models.tft.scaling import Scaler
from models.tft.training import forecast
from models.windows import block_rows

LEVELS = (0.1, 0.5, 0.9)
H = 5
every_baseline = pytest.mark.parametrize("name", list(BASELINES))
every_anchor = pytest.mark.parametrize("anchor", ["none", "difference", "ratio"])


def series_of(*targets):
    """Series that hold these targets."""
    plain = series_arrays({f"S{i}": len(t) for i, t in enumerate(targets)})
    return dataclasses.replace(plain, targets=np.concatenate(targets)[:, None].astype(float))


def walk(rows, volatility=0.02, seed=0):
    return np.exp(3 + np.cumsum(np.random.default_rng(seed).normal(0, 1, rows) * volatility))


def past_of(series, train, anchor="ratio"):
    return Past.of(series, np.array(train), series.target(None), anchor)


def forecasts(name, past, which, origins, levels=LEVELS, horizon=H):
    return BASELINES[name](past, np.array(which), np.array(origins), levels, horizon)


def loss_of(name, past, origins, target):
    """Pinball loss [n, H, Q] of windows of series 0."""
    found = forecasts(name, past, np.zeros(len(origins), int), origins)
    return pinball_numpy(found, target[origins[:, None] + np.arange(1, H + 1)], LEVELS)


# --- no look-ahead -------------------------------------------------------------------------------------------------


def changed_from(series, row):
    targets = series.targets.copy()
    targets[row:] = np.abs(np.random.default_rng(9).normal(50, 20, targets[row:].shape)) + 1
    return dataclasses.replace(series, targets=targets)


@every_baseline
@every_anchor
def test_rows_after_the_origin_change_no_forecast(name, anchor):
    plain, train, origins = series_of(walk(300)), [[0, 210]], [210, 230, 249]
    changed = changed_from(plain, 250)
    a, b = (past_of(s, train, anchor) for s in (plain, changed))
    assert np.array_equal(forecasts(name, a, [0] * 3, origins), forecasts(name, b, [0] * 3, origins))
    # Planted: every value is that of the next row
    a, b = (dataclasses.replace(p, values=np.roll(p.values, -1)) for p in (a, b))
    assert not np.array_equal(forecasts(name, a, [0] * 3, origins), forecasts(name, b, [0] * 3, origins))


@every_baseline
@every_anchor
def test_rows_after_the_train_block_change_no_statistic(name, anchor):
    """Seen by origins inside the block, whose own past stays the same."""
    plain, origins = series_of(walk(300)), [100, 180]
    changed = changed_from(plain, 210)

    def both(end):
        return [forecasts(name, past_of(s, [[0, end]], anchor), [0, 0], origins) for s in (plain, changed)]

    assert np.array_equal(*both(210))
    assert not np.array_equal(*both(211))  # planted: one row too many


def test_targets_after_the_train_block_change_no_coefficient():
    plain = series_of(walk(300))
    models = []
    for series, end in ((plain, 210), (changed_from(plain, 210), 210), (plain, 211)):
        past = past_of(series, [[0, end]])
        models.append(linear_models(past, linear_inputs(past), LEVELS, H, np.array([0]))[0])
    for field in dataclasses.fields(models[0]):
        ours, other, one_more = (getattr(m, field.name) for m in models)
        assert np.array_equal(ours, other), field.name
        assert not np.array_equal(ours, one_more), field.name


def test_inputs_of_a_row_are_lags_and_means_up_to_it():
    values = np.random.default_rng(0).normal(size=200)
    found = linear_inputs(past_of(series_of(np.zeros(7), values), [[0, 0], [7, 207]], "none"))
    for row in (0, 3, 30, 199):
        lags = [values[max(row - lag, 0)] for lag in baselines.LAGS]
        means = [values[max(row + 1 - width, 0) : row + 1].mean() for width in baselines.MEANS]
        assert found[7 + row] == pytest.approx([*lags, *means], abs=1e-12)


# --- known answers -------------------------------------------------------------------------------------------------


def test_ridge_gains_on_an_autoregression_what_theory_says():
    """AR(1): errors are normal, naive's with variance 2 (1 - f^h) / (1 - f^2), the best forecast's (1 - f^2h) / (1 - f^2)."""
    f, rows = 0.7, 16_000
    noise, values = np.random.default_rng(1).normal(size=rows), np.zeros(rows)
    for t in range(1, rows):
        values[t] = f * values[t - 1] + noise[t]
    past = past_of(series_of(values), [[0, rows // 2]], "none")
    origins = np.arange(rows // 2, rows - H)
    h = np.arange(1, H + 1)
    density = np.array([NormalDist().pdf(NormalDist().inv_cdf(q)) for q in LEVELS])
    variance = {"naive": 2 * (1 - f**h), "linear": 1 - f ** (2 * h)}
    total = {}
    for name, v in variance.items():
        loss = loss_of(name, past, origins, values).mean(0)
        assert loss == pytest.approx(np.sqrt(v / (1 - f**2))[:, None] * density, rel=0.05), name
        total[name] = loss.sum()
    margin = 1 - np.sqrt(variance["linear"]).sum() / np.sqrt(variance["naive"]).sum()
    assert 1 - total["linear"] / total["naive"] == pytest.approx(margin, abs=0.01)


def test_ewma_gains_on_volatility_clusters_and_nothing_on_a_plain_walk():
    rows = 8000
    clusters = np.where(np.arange(rows) // 200 % 2, 0.03, 0.006)
    gain = {}
    for kind, volatility in {"clusters": clusters, "plain": 0.02}.items():
        prices = walk(rows, volatility, seed=3)
        past, origins = past_of(series_of(prices), [[0, 5600]]), np.arange(5600, rows - H)
        size = prices[origins][:, None, None]
        losses = {name: (loss_of(name, past, origins, prices) / size)[..., [0, 2]].mean() for name in ("naive", "ewma")}
        gain[kind] = 1 - losses["ewma"] / losses["naive"]
    assert gain["clusters"] > 0.10
    assert -0.03 < gain["plain"] < 0.005


def test_ewma_band_by_hand():
    """Volatility starts from the train block's mean square; standardised changes use that of their own origin."""
    prices = walk(400, seed=5)
    past, origin = past_of(series_of(prices), [[0, 280]]), 350
    logs = np.log(prices)
    variance = [np.mean(np.diff(logs[:280]) ** 2)]
    for change in np.diff(logs):
        variance.append(0.94 * variance[-1] + 0.06 * change**2)
    sigma = np.sqrt(variance)
    found = forecasts("ewma", past, [0], [origin])[0]
    for h in (1, 3, H):
        z = np.quantile((logs[h:280] - logs[: 280 - h]) / (sigma[: 280 - h] * np.sqrt(h)), LEVELS)
        assert found[h - 1] == pytest.approx(prices[origin] * np.exp(z * sigma[origin] * np.sqrt(h)), rel=1e-12)


@every_anchor
def test_naive_band_by_hand(anchor):
    prices = walk(400, seed=5)
    found = forecasts("naive", past_of(series_of(prices), [[0, 280]], anchor), [0], [350])[0]
    values = np.log(prices) if anchor == "ratio" else prices
    for h in (1, 3, H):
        level = values[350] + np.quantile(values[h:280] - values[: 280 - h], LEVELS)
        assert found[h - 1] == pytest.approx(np.exp(level) if anchor == "ratio" else level, rel=1e-12)


# --- short, unseen and constant series -----------------------------------------------------------------------------


@every_anchor
def test_short_and_unseen_series_take_the_pooled_statistics(anchor):
    series = series_of(walk(3), walk(600, seed=1), walk(90, seed=2), walk(500, seed=4))
    a, b, c, d, _ = series.offsets
    # Shorter than the horizon, long, too short for a regression of its own, without a train row
    train = [[a, a + 3], [b, b + 400], [c, c + 60], [d, d]]
    past = past_of(series, train, anchor)
    for name in BASELINES:
        found = forecasts(name, past, [0, 1, 2, 3], [a + 2, b + 500, c + 70, d + 300])
        assert np.isfinite(found).all(), name
        assert (np.diff(found, axis=-1) >= 0).all(), name
    inputs = linear_inputs(past)
    models = linear_models(past, inputs, LEVELS, H, np.arange(4))
    assert models[0] is models[2]
    assert models[2] is models[3]
    assert models[1] is not models[3]
    changes = [past.values[p + 1 : q] - past.values[p : q - 1] for p, q in (train[1], train[2])]
    band = np.quantile(np.concatenate(changes), LEVELS)
    unseen = forecasts("naive", past, [3], [d + 300])[0, 0]
    assert unseen == pytest.approx(past.restore(past.values[d + 300] + band), rel=1e-12)
    origins = np.array([b + 500, c + 70, d + 300])
    levels = forecasts("ewma", past, [1, 2, 3], origins)[:, 0]
    moves = (np.log(levels) if anchor == "ratio" else levels) - past.values[origins, None]
    own, short, unseen = moves / baselines.volatility(past, baselines._train_variances(past))[origins, None]
    assert short == pytest.approx(unseen, rel=1e-9)
    assert own != pytest.approx(unseen, rel=1e-3)


def test_a_series_has_its_own_regression_from_the_fewest_origins_on():
    series = series_of(walk(300), walk(300, seed=1))
    for rows, own in ((FEWEST + H, True), (FEWEST + H - 1, False)):
        past = past_of(series, [[0, 250], [300, 300 + rows]])
        models = linear_models(past, linear_inputs(past), LEVELS, H, np.array([0, 1]))
        alone = linear_models(past, linear_inputs(past), LEVELS, H, np.array([1]))[1]
        assert np.array_equal(models[1].weights, alone.weights)
        past.values[:250] *= 1.5  # another series' rows are in the pool alone
        again = linear_models(past, linear_inputs(past), LEVELS, H, np.array([1]))[1]
        assert np.array_equal(again.weights, alone.weights) == own


@every_baseline
def test_without_a_train_block_longer_than_the_horizon_is_refused(name):
    with pytest.raises(ValueError, match="longer than the horizon"):
        forecasts(name, past_of(series_of(walk(50)), [[0, H]]), [0], [40])


@every_baseline
@every_anchor
def test_a_constant_series_is_forecast_as_that_constant(name, anchor):
    found = forecasts(name, past_of(series_of(np.full(300, 7.25)), [[0, 210]], anchor), [0], [250])
    assert found == pytest.approx(np.full((1, H, 3), 7.25), rel=1e-9)


@every_baseline
@every_anchor
@pytest.mark.parametrize("flat", [slice(0, 600), slice(100, 500), slice(500, 900)])
def test_a_flat_stretch_leaves_bounded_bands(name, anchor, flat):
    """The last changes of a stretch meet a volatility that has all but died."""
    prices, origins = walk(900, seed=6), [610, 700, 850]
    prices[flat] = prices[flat.start]
    found = forecasts(name, past_of(series_of(prices), [[0, 600]], anchor), [0] * 3, origins, (0.001, 0.5, 0.999))
    assert np.isfinite(found).all()
    assert (np.abs(found / prices[origins, None, None]) < 10).all()


@every_baseline
@every_anchor
def test_quantiles_rise(name, anchor):
    levels = (0.01, 0.1, 0.5, 0.51, 0.9, 0.99)
    past = past_of(series_of(walk(500), walk(60, seed=2)), [[0, 350], [500, 520]], anchor)
    found = forecasts(name, past, [0] * 100 + [1] * 20, [*range(360, 460), *range(530, 550)], levels)
    assert (np.diff(found, axis=-1) >= 0).all()
    assert (np.diff(found, axis=-1) > 0).mean() > 0.9


# --- the report ----------------------------------------------------------------------------------------------------


def test_metrics_hold_every_baseline_beside_the_forecast():
    series = series_of(walk(400), walk(400, seed=1))
    config = TFTConfig(context=12, horizon=H, device="cpu")
    train, target = np.array([[0, 280], [400, 680]]), series.target(None)
    which, origins = np.repeat([0, 1], 50), np.r_[300:350, 700:750]
    actual = target[origins[:, None] + np.arange(1, H + 1)]
    past = Past.of(series, train, target, "ratio")
    quantiles = {name: forecasts(name, past, which, origins) for name in BASELINES}
    for name, mine in quantiles.items():
        found = Forecasts(mine, actual, mine, actual, which, origins)
        metrics = block_metrics(found, series, train, target, config, "ratio")
        assert metrics[f"skill_vs_{name}"] == 0.0
        assert metrics["q_risk"] == metrics["baselines"][name]["q_risk"]
        assert metrics["coverage"] == metrics["baselines"][name]["coverage"]
        assert metrics["coverage_by_step"] == pytest.approx(
            [((actual[:, h] >= mine[:, h, 0]) & (actual[:, h] <= mine[:, h, 2])).mean() for h in range(H)]
        )
        assert np.mean(metrics["coverage_by_step"]) == pytest.approx(metrics["coverage"])
        for other, theirs in quantiles.items():
            losses = [pinball_numpy(q, actual, LEVELS) for q in (mine, theirs)]
            assert metrics[f"{other}_pinball"] == metrics["baselines"][other]["pinball"] == losses[1].mean()
            assert metrics[f"skill_vs_{other}"] == pytest.approx(1 - losses[0].mean() / losses[1].mean(), abs=1e-12)
            for s, row in enumerate(metrics["by_series"].values()):
                one, two = (x[which == s].mean() for x in losses)
                assert row[f"skill_vs_{other}"] == pytest.approx(1 - one / two, abs=1e-12)


# --- calibration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "offset"), [(0.5, 0.0), (2.0, 0.0), (1.0, 0.7)])
def test_calibration_brings_coverage_to_its_level(width, offset):
    """Bands too narrow, too wide and beside the point, of normal values whose spread grows with the step."""
    random, seen, unseen = np.random.default_rng(0), 3000, 6000
    spread = np.sqrt(np.arange(1, H + 1))
    centre = random.normal(size=(seen + unseen, 1))
    actual = centre + spread * random.normal(size=(seen + unseen, H))
    z = np.array([NormalDist().inv_cdf(q) for q in LEVELS])
    raw = centre[..., None] + offset + width * spread[:, None] * z
    shift = conformal_shift(raw[:seen], actual[:seen], LEVELS)
    after = shifted(raw[seen:], shift)
    # Coverage moves with the calibration rows as with the test rows
    for got, q in ((covered(after, actual[seen:]), 0.8), *((actual[seen:] <= after[..., i], q) for i, q in enumerate(LEVELS))):
        bound = 4 * np.sqrt(q * (1 - q) * (1 / seen + 1 / unseen))
        assert (np.abs(got.mean(0) - q) < bound).all(), q
    before = covered(raw[seen:], actual[seen:]).mean(0)
    assert (np.abs(before - 0.8) > 4 * np.sqrt(0.16 * (1 / seen + 1 / unseen)))[0 if offset else slice(None)].all()


@pytest.mark.parametrize(
    ("windows", "level", "place"),
    [(9, 0.9, 9), (9, 0.5, 5), (9, 0.1, 1), (10, 0.9, 10), (10, 0.1, 1), (11, 0.1, 1), (19, 0.1, 2), (25, 0.1, 2), (25, 0.9, 24),
     (3, 0.9, 3), (3, 0.1, 1), (99, 0.55, 55)],
)  # fmt: skip
def test_shift_is_the_error_at_the_finite_sample_place(windows, level, place):
    """ceil((n + 1) q), floor below one half; (99 + 1) x 0.55 is 55.00000000000001 to a computer."""
    errors = np.random.default_rng(0).permutation(np.arange(1.0, windows + 1))
    shift = conformal_shift(np.full((windows, 1, 1), 10.0), 10 + errors[:, None], [level])
    assert shift.tolist() == [[place]]


def test_shifted_quantiles_never_cross():
    quantiles = np.sort(np.random.default_rng(0).normal(size=(50, H, 3)), axis=-1)
    shift = np.tile([0.0, 1.5, -2.0], (H, 1))
    assert (np.diff(quantiles + shift, axis=-1) < 0).any()
    assert (np.diff(shifted(quantiles, shift), axis=-1) >= 0).all()
    assert np.array_equal(shifted(quantiles, np.zeros((H, 3))), quantiles)


@pytest.fixture(scope="module")
def runs():
    """The same training with calibration off and on."""
    return {conformal: Run("tft", conformal=conformal, checkpoint_every=1) for conformal in (False, True)}


def test_calibration_adds_one_tensor_to_the_final_file_and_nothing_else(runs):
    off, on = (read_checkpoint_bytes(runs[c].final, None) for c in (False, True))
    assert set(on.tensors) - set(off.tensors) == {"conformal.shift"}
    assert on.tensors["conformal.shift"].shape == (3, 3)
    assert on.tensors["conformal.shift"].abs().sum() > 0
    tensors = {name: t for name, t in on.tensors.items() if name != "conformal.shift"}
    metadata = {**on.metadata, "config": {**on.metadata["config"], "conformal": False}}
    assert checkpoint_bytes(Snapshot(tensors, metadata)) == runs[False].final
    assert runs[True].files == runs[False].files


def test_forecasts_apply_the_shift_in_normalised_units(runs):
    snapshot = read_checkpoint_bytes(runs[True].final, None)
    tensors = {name: t for name, t in snapshot.tensors.items() if name != "conformal.shift"}
    before, after = forecast(Snapshot(tensors, snapshot.metadata), SERIES), forecast(snapshot, SERIES)
    assert snapshot.metadata["anchor"] == "ratio"
    frame = Scaler.from_checkpoint(snapshot.tensors, snapshot.metadata).frame(SERIES, SERIES.target(None))
    for s, (a, b) in enumerate(zip(before, after, strict=True)):
        level, spread, growth = frame.at(np.array(SERIES.offsets[s + 1] - 4))
        assert level == SERIES.target(None)[SERIES.offsets[s + 1] - 4]
        plain, moved = (np.log(f.quantiles / level) / (spread * growth)[:, None] for f in (a, b))
        assert moved == pytest.approx(shifted(plain, snapshot.tensors["conformal.shift"].numpy()), abs=1e-9)
        assert not np.array_equal(a.quantiles, b.quantiles)
    off = forecast(read_checkpoint_bytes(runs[False].final, None), SERIES)
    assert all(np.array_equal(a.quantiles, b.quantiles) for a, b in zip(before, off, strict=True))


def test_metrics_say_coverage_before_and_after_calibration(runs):
    off, on = (runs[c].result.metrics for c in (False, True))
    assert on["test"]["coverage_raw"] == off["test"]["coverage"]
    assert on["test"]["coverage"] != on["test"]["coverage_raw"]
    assert on["val"] == off["val"]
    assert "coverage_raw" not in off["test"] | on["val"]
    assert on["test"]["naive_pinball"] == off["test"]["naive_pinball"]


def test_shift_is_learnt_from_the_validation_block_alone(runs):
    blocks = block_rows(SERIES, Split(), 3)

    def shift_with_spoilt(rows):
        targets = SERIES.targets.copy()
        targets[rows] *= 1.05
        run = Run("tft", series=dataclasses.replace(SERIES, targets=targets), conformal=True, final_weights="last")
        return read_checkpoint_bytes(run.final, None).tensors["conformal.shift"]

    plain = shift_with_spoilt(slice(0, 0))
    assert torch.equal(plain, shift_with_spoilt(np.concatenate([np.arange(a, b) for a, b in blocks["test"]])))
    assert not torch.equal(plain, shift_with_spoilt(np.arange(blocks["val"][0, 1] - 2, blocks["val"][0, 1])))


def test_without_validation_windows_nothing_is_calibrated_and_a_warning_says_so(caplog):
    run = Run("tft", conformal=True, split=Split(train=0.8, val=0.02), epochs=1)
    assert "conformal.shift" not in read_checkpoint_bytes(run.final, None).tensors
    assert "not calibrated" in caplog.text
    assert "coverage_raw" not in run.result.metrics["test"]
