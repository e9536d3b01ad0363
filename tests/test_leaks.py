"""Features that know the future are found; features that only remember the past, and noise, are not."""

import dataclasses
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from synthetic import series_arrays
from test_data import CONTRACT, SERIES, SMALL, market_tables, replaced, write

import tasks.leaks as leaks
from flows.__main__ import _expand, app
from models.config import FeatureBuilder, IngestConfig
from models.features import MARKET_FEATURES, FeatureContract
from tasks.demo_features import SHARES, read_shares, share_features, write_demo_features
from tasks.expectations import DataContractError, DataReport, Profile
from tasks.leaks import blocks_of, check_leaks, find_leaks, read_blocks
from tasks.staging import stage_parquet
from tasks.truncation import BuilderError, find_look_ahead

NOTHING_YET = DataReport([], None, Profile([], [], [], {}, []))
SEEDS = [0, 1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 20))]
NAMES = [f"hist_{i:03d}" for i in range(210)] + ["fut_000"]


def market(returns, columns=(), *, seed=0, rows=(1500, 1200, 800), historical=210):
    """Series with the given returns by series (t - 1 -> t) and noise for features; `columns` builds the first ones from price."""
    series = series_arrays({f"S{i}": n for i, n in enumerate(rows)}, seed=seed, static=1, historical=historical, future=1)
    price = np.concatenate([np.exp(3 + np.cumsum(r)) for r in returns])
    table = series.historical.copy()
    for i, build in enumerate(columns):
        table[:, i] = np.concatenate([build(p) for p in np.split(price, series.offsets[1:-1])])
    return dataclasses.replace(series, price=price, historical=table)


def noise(seed, rows=(1500, 1200, 800)):
    random = np.random.default_rng([seed, 7])
    return [random.normal(0, 0.02, n) for n in rows]


def after(price, bars=1):
    """Log return of the next bars; 0 where the series ends."""
    return np.append(np.log(price[bars:] / price[:-bars]), np.zeros(bars))


def flagged(series, seed=0):
    names = [f"hist_{i:03d}" for i in range(series.historical.shape[1])] + ["fut_000"]
    return [leak.feature for leak in find_leaks(blocks_of(series), names, seed=seed)]


@pytest.mark.parametrize("seed", SEEDS)
def test_next_return_with_noise_among_210_features_is_flagged_and_noise_is_not(seed):
    random = np.random.default_rng([seed, 9])

    def planted(price):  # correlation 0.3
        return 0.3 * after(price) / 0.02 + np.sqrt(1 - 0.3**2) * random.normal(size=len(price))

    series = market(noise(seed), seed=seed)
    assert flagged(series, seed) == []
    series = market(noise(seed), [planted], seed=seed)
    (leak,) = find_leaks(blocks_of(series), NAMES, seed=seed)
    assert (leak.feature, leak.bars) == ("hist_000", 1)
    assert leak.next == pytest.approx(0.3, abs=0.07)
    assert leak.past < 0.1


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_demo_features(folder / "features")
    return stage_parquet(str(folder / "features"), MARKET_FEATURES, IngestConfig(), folder / "staged")


@pytest.mark.parametrize("seed", SEEDS)
def test_demo_features_are_not_flagged_and_are_when_they_stand_a_bar_too_early(seed, demo):
    groups = demo.contract.groups()
    names = (*groups["historical"], *groups["future"])
    (block,) = read_blocks(demo.parts, demo.contract, seed)
    assert find_leaks([block], names, 4000, seed) == []
    early = block._replace(features=lambda rows: block.features(np.minimum(rows + 1, len(block.price) - 1)))
    found = {leak.feature for leak in find_leaks([early], names, 4000, seed)}
    assert {"hist_return_1", "hist_return_120", "hist_sma_gap_60", "hist_rsi_14", "hist_bar_body"} <= found


def moving(bars):
    return lambda price: pd.Series(np.log(price)).diff().rolling(bars, min_periods=1).mean().fillna(0).to_numpy()


HONEST = [moving(n) for n in (1, 2, 5, 20)] + [np.log, lambda p: np.sign(moving(1)(p)), lambda p: np.abs(moving(5)(p))]


def test_momentum_is_honest_and_only_news_tells_it_from_a_leak(monkeypatch):
    series = market([autocorrelated(n, seed) for seed, n in enumerate((1500, 1200, 800))], HONEST, historical=20)
    assert flagged(series) == []
    monkeypatch.setattr(leaks, "_news", lambda returns, place: (np.nan_to_num(returns), 1.0))  # the planted fault
    assert "hist_000" in flagged(series)


def autocorrelated(rows, seed, phi=0.5):
    steps = np.random.default_rng(seed).normal(0, 0.02, rows)
    for t in range(1, rows):
        steps[t] += phi * steps[t - 1]
    return steps


def test_levels_in_many_short_series_and_a_sure_cycle_are_honest():
    rows = (60,) * 60
    random = np.random.default_rng(3)
    shocks = random.normal(0, 0.02, 60)  # one market moves them all
    series = market([0.7 * shocks + random.normal(0, 0.01, 60) for _ in rows], HONEST, rows=rows, historical=20)
    assert flagged(series) == []
    turn = 2 * np.pi * np.arange(3000) / 40
    cycle = market([0.01 * np.cos(turn)], [lambda p: np.sin(turn), lambda p: np.cos(turn)], rows=(3000,), historical=20)
    assert flagged(cycle) == []


FAULTS = {
    "next return": after,
    "its sign": lambda p: np.sign(after(p)),
    "next close": lambda p: np.append(p[1:], p[-1]),
    "return of the next five bars": lambda p: after(p, 5),
    "return of the next twenty bars": lambda p: after(p, 20),
    "average of five bars, centred": lambda p: np.convolve(np.log(p), np.ones(5) / 5, "same"),
    "average of sixty bars, a bar early": lambda p: np.append(moving(60)(p)[1:], 0.0),
    "momentum with a third of the next bar": lambda p: moving(1)(p) + 0.4 * after(p),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_way_of_looking_ahead_is_flagged(fault):
    assert flagged(market(noise(1), [FAULTS[fault]], historical=30)) == ["hist_000"]


def test_a_future_column_that_holds_its_own_bars_return_is_flagged():
    series = market(noise(2), historical=20)
    own = np.diff(np.log(series.price), prepend=np.log(series.price[0]))
    series = dataclasses.replace(series, future=own[:, None].astype(np.float32))
    assert flagged(series) == ["fut_000"]


# --- in the gate ---------------------------------------------------------------------------------------------------


def leaking_source(folder):
    tables = market_tables({"AAA": 900, "BBB": 700}, **SMALL).values()
    leaked = [pa.array(after(table["price"].to_numpy()).astype(np.float32)) for table in tables]
    return write(folder, *(replaced(*both) for both in zip(tables, ["hist_004"] * 2, leaked, strict=True)))


def gate(source, folder, **config):
    staged = stage_parquet(str(source), CONTRACT, IngestConfig(**config), folder / "staged")
    return check_leaks(staged, NOTHING_YET).table


def test_a_leak_is_a_warning_with_its_number_and_refused_when_asked(tmp_path):
    source = leaking_source(tmp_path / "s")
    line = gate(source, tmp_path)[-1]
    assert (line["result"], line["rows"]) == ("warning", 1)
    assert line["columns"].startswith("hist_004: correlation +0.99 with the next bar")
    assert gate(source, tmp_path / "off", leak_check=False) == []
    with pytest.raises(DataContractError, match="hist_004: correlation") as refused:
        gate(source, tmp_path / "refused", rules={"leak": "refuse"})
    assert refused.value.table[-1]["result"] == "FAILED"


def test_a_clean_source_and_one_of_few_rows_pass(tmp_path):
    (tmp_path / "a").mkdir()
    for name, series in {"a": {"AAA": 900, "BBB": 700}, "b": SERIES, "c": {"ONE": 1}}.items():
        source = write(tmp_path / name / "s", *market_tables(series, **SMALL).values())
        assert gate(source, tmp_path / name)[-1]["result"] == "passed"


def test_command_line_turns_the_check_off_and_names_a_builder():
    tokens = ["ingest", "x", "--no-leak-check", "--config.builder.run", "m:f", "--config.builder.bars", "b.parquet"]
    config = app.parse_args(_expand(tokens))[1].arguments["config"]
    assert (config.leak_check, config.builder.run, config.builder.cuts) == (False, "m:f", 3)
    assert app.parse_args(_expand(["ingest", "x", "--leak-check"]))[1].arguments.get("config", IngestConfig()).leak_check
    with pytest.raises(ValidationError):
        FeatureBuilder(run="m:f", bars="b", cuts=0)


# --- features built again ------------------------------------------------------------------------------------------


def honest(bars):
    shares = bars.groupby("entity_id")
    return pd.concat([share_features(n, b.drop(columns="entity_id").reset_index(drop=True)) for n, b in shares])


def shifted(bars):
    table = honest(bars)
    table["hist_return_1"] = table.groupby("entity_id")["hist_return_1"].shift(-1)
    return table


def whole_sample(bars):
    table = honest(bars)
    table["hist_rsi_14"] = (table["hist_rsi_14"] - table["hist_rsi_14"].mean()) / table["hist_rsi_14"].std()
    return table


def broken(bars):
    raise KeyError("volume")


@pytest.fixture(scope="module")
def bars(tmp_path_factory):
    path = tmp_path_factory.mktemp("bars") / "bars.parquet"
    shares = read_shares()
    table = pd.concat([shares[name].iloc[:400].assign(entity_id=name) for name in SHARES[:2]])
    pq.write_table(pa.Table.from_pandas(table, preserve_index=False), path)
    return str(path)


def resolved(bars):
    return MARKET_FEATURES.resolve(honest(pd.read_parquet(bars)).columns)


@pytest.mark.parametrize(("build", "found"), [("honest", []), ("shifted", ["hist_return_1"]), ("whole_sample", ["hist_rsi_14"])])
def test_truncation_catches_a_builder_that_looks_ahead_and_passes_an_honest_one(build, found, bars):
    builder = FeatureBuilder(run=f"test_leaks:{build}", bars=bars)
    assert [look.feature for look in find_look_ahead(builder, resolved(bars))] == found


@pytest.mark.parametrize(("shift", "found"), [(-1, ["h"]), (1, [])])
def test_a_builder_may_be_a_command(shift, found, bars, tmp_path):
    script = tmp_path / "build.py"
    script.write_text(
        "import sys\nimport pandas as pd\nbars = pd.read_parquet(sys.argv[1])\n"
        f"bars['h'] = bars.groupby('entity_id').close.shift({shift})\nbars.to_parquet(sys.argv[2], index=False)\n"
    )
    contract = FeatureContract(price="close", targets=("close",), static=(), historical=("h",), future=())
    builder = FeatureBuilder(run=f"{sys.executable} {script} {{bars}} {{features}}", bars=bars, cuts=1)
    assert [look.feature for look in find_look_ahead(builder, contract)] == found


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ("test_leaks:broken", "volume"),
        ("no_module:f", "neither"),
        ("false {bars} {features}", "ended with 1"),
        ("true {bars}", "wrote no"),
    ],
)
def test_a_builder_that_fails_is_an_error_and_never_a_leak(run, why, bars):
    with pytest.raises(BuilderError, match=why):
        find_look_ahead(FeatureBuilder(run=run, bars=bars), resolved(bars))


def test_the_gate_runs_the_builder_when_one_is_named(tmp_path, bars, demo):
    builder = FeatureBuilder(run="test_leaks:shifted", bars=bars)
    staged = demo.model_copy(update={"config": IngestConfig(leak_check=False, builder=builder)})
    line = check_leaks(staged, NOTHING_YET).table[-1]
    assert line["result"] == "warning"
    assert "hist_return_1: 1 of" in line["columns"]
