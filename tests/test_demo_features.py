"""Demo features: real, complete, and blind to the future."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from models.features import MARKET_FEATURES
from tasks import demo_features
from tasks.demo_features import WARMUP_BARS, historical_features, read_shares, share_features, write_demo_features

SHARES = read_shares()


def assert_causal(build, bars, cuts, seed=0):
    """Rows before every cut are bit-equal when the series ends there, and when another future follows."""
    random = np.random.default_rng(seed)
    whole = build(bars)
    for cut in random.integers(200, len(bars), cuts):
        other = bars.copy()
        numbers = [c for c in bars if c != "timestamp"]
        other.loc[other.index >= cut, numbers] = np.abs(random.normal(50, 20, (len(bars) - cut, len(numbers)))) + 1
        for found in (build(bars.iloc[:cut].copy()), build(other).iloc[:cut]):
            for name in whole:
                assert np.array_equal(whole[name].to_numpy()[:cut], found[name].to_numpy(), equal_nan=True), name


@pytest.mark.parametrize(("name", "start", "end"), [("AAPL", 0, 900), ("IBM", 1000, 1500)])
def test_no_historical_feature_knows_a_later_bar(name, start, end):
    bars = SHARES[name].iloc[start:end].reset_index(drop=True)
    assert_causal(historical_features, bars, cuts=4)


def test_planted_look_ahead_is_caught():
    def leaking(bars):
        features = historical_features(bars)
        features["hist_return_1"] = features["hist_return_1"].shift(-1)
        return features

    with pytest.raises(AssertionError, match="hist_return_1"):
        assert_causal(leaking, SHARES["IBM"].iloc[:500], cuts=3)


def test_features_are_complete_finite_and_float32(tmp_path):
    paths = write_demo_features(tmp_path)
    assert {p.stem for p in paths} == set(demo_features.SHARES)
    table = pq.read_table(tmp_path / "FB.parquet")
    contract = MARKET_FEATURES.resolve(table.schema.names)
    assert [len(g) for g in contract.groups().values()] == [5, 210, 10]
    assert all(str(table.schema.field(n).type) == "float" for n in contract.features)
    for name in (*contract.features, "price", *contract.target_names):
        assert np.isfinite(table[name].to_numpy()).all(), name
    assert table.num_rows == len(SHARES["FB"]) - WARMUP_BARS


def test_future_features_follow_from_the_timestamp_alone():
    bars = SHARES["IBM"].iloc[:300]
    other = bars.copy()
    other["close"] = other["close"] * 2
    future = [c for c in share_features("IBM", bars) if c.startswith("fut_")]
    assert share_features("IBM", bars)[future].equals(share_features("IBM", other)[future])
