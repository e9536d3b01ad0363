"""Drift: profiles are right, the same process does not fire, a moved, stretched or dead feature does and is named."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import DAY
from test_artifacts import publish, trained
from test_data import CONTRACT, SMALL, market_tables, replaced, write

import tasks.drift as drift
from models.config import IngestConfig
from tasks.datasets import write_dataset
from tasks.drift import LEVELS, check_drift, compare, differences, keep_profile, psi_and_ks, quantile_profile, stored_profile
from tasks.expectations import DataContractError, DataReport, Profile
from tasks.garbage import collect
from tasks.registry import promote
from tasks.staging import stage_parquet
from tasks.storage import ArtifactIntegrityError, LocalStore, ObjectMissing

NOTHING_YET = DataReport([], None, Profile([], [], [], {}, []))
SEEDS = [0, 1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 20))]
SERIES = {"AAA": 800, "BBB": 700}


def source(folder, seed=0, change=lambda values: values, later=0, slow=0.0, series=SERIES):
    """Random features, `slow` of them an AR(1); hist_004 goes through `change`; the bars may come `later` by days."""
    tables = []
    for number, table in enumerate(market_tables(series, **SMALL, seed=seed).values()):
        if slow:
            table = replaced(table, "hist_007", pa.array(autoregressive(table.num_rows, [seed, number], slow)))
        table = replaced(table, "hist_004", pa.array(change(table["hist_004"].to_numpy().copy()).astype(np.float32)))
        moments = table["timestamp"].cast(pa.int64()).to_numpy() + later * DAY
        tables.append(replaced(table, "timestamp", pa.array(moments).cast(pa.timestamp("us", tz="UTC"))))
    return write(folder, *tables)


def autoregressive(rows, seed, phi):
    values = np.random.default_rng(seed).normal(0, np.sqrt(1 - phi**2), rows)
    for t in range(1, rows):
        values[t] += phi * values[t - 1]
    return values.astype(np.float32)


def staged(folder, policy="warn", **options):
    config = IngestConfig(rules={"drift": policy})
    return stage_parquet(str(source(folder / "source", **options)), CONTRACT, config, folder / "staged")


def fired(reference, current):
    a, b = (quantile_profile(s.parts, s.contract) for s in (reference, current))
    return {d.feature for d in differences(a, b) if d.psi > max(0.25, d.chance)}


# --- the numbers ---------------------------------------------------------------------------------------------------

SAMPLES = {
    "the same": lambda r: (r.normal(size=9000), r.normal(size=4000)),
    "moved": lambda r: (r.normal(size=9000), r.normal(0.7, 1, 4000)),
    "stretched": lambda r: (r.normal(size=9000), r.normal(0, 2, 4000)),
    "heavy tails": lambda r: (r.standard_t(2, 9000), r.standard_t(2, 4000) * 1.5),
    "a switch": lambda r: (r.random(9000) < 0.5, r.random(4000) < 0.8),
    "dead": lambda r: (r.normal(size=9000), np.full(4000, 0.3)),
    "dead before": lambda r: (np.full(9000, 0.3), r.normal(size=4000)),
    "another constant": lambda r: (np.full(9000, 0.3), np.full(4000, 0.1)),
    "the same constant": lambda r: (np.full(9000, 0.3), np.full(4000, 0.3)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_psi_and_ks_from_quantiles_equal_those_from_the_rows(name):
    a, b = (np.sort(np.asarray(x, float)) for x in SAMPLES[name](np.random.default_rng(1)))
    psi, ks, bins = psi_and_ks(*(np.quantile(x, LEVELS, method="inverted_cdf") for x in (a, b)))
    points = np.concatenate([a, b])
    share = [[np.searchsorted(x, points, side) / len(x) for side in ("left", "right")] for x in (a, b)]
    assert ks == pytest.approx(np.abs(np.subtract(*share)).max(), abs=0.015)
    edges = np.unique(np.quantile(a, LEVELS[::10], method="inverted_cdf"))
    counts = [np.diff([0, np.searchsorted(x, edges[0], "left"), *np.searchsorted(x, edges, "right"), len(x)]) for x in (a, b)]
    p, q = (np.maximum(c / c.sum(), 1e-4) for c in counts)
    assert bins == len(p)
    assert psi == pytest.approx(((q - p) * np.log(q / p)).sum(), rel=0.12, abs=0.06)
    if name == "the same constant":
        assert (psi, ks) == (0, 0)


def test_profile_holds_the_quantiles_of_the_rows_and_how_slow_a_feature_is(tmp_path):
    rows = staged(tmp_path, slow=0.95, series={"AAA": 6000, "BBB": 3000})
    profile = quantile_profile(rows.parts, rows.contract)
    values = np.concatenate([pq.read_table(part)["hist_004"].to_numpy() for part in rows.parts])
    found = np.array(profile.features["hist_004"].quantiles)
    assert (profile.rows, profile.instants) == (9000, 6000)
    assert all((values <= q).mean() >= level - 1e-9 > (values < q).mean() - 2e-9 for q, level in zip(found, LEVELS, strict=True))
    assert (found[0], found[-1]) == (values.min(), values.max())
    assert profile.features["hist_007"].freshness == pytest.approx(0.05 / 1.95, rel=0.2)
    assert profile.features["hist_004"].freshness > 0.9
    assert "fut_000" not in profile.features


def test_a_sample_of_many_rows_has_nearly_their_quantiles(tmp_path, monkeypatch):
    rows = staged(tmp_path, series={"AAA": 9000, "BBB": 4000})
    whole = quantile_profile(rows.parts, rows.contract)
    monkeypatch.setattr(drift, "SAMPLE_ROWS", 4000)
    part = quantile_profile(rows.parts, rows.contract)
    assert part != whole
    assert max(d.ks for d in differences(whole, part)) < 0.05


# --- twins ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_process_does_not_fire_and_slow_features_would_without_their_slowness(seed, tmp_path, monkeypatch):
    series = {"AAA": 400, "BBB": 300}
    before, now = (staged(tmp_path / str(n), seed=100 * n + seed, slow=0.99, series=series) for n in (1, 2))
    assert fired(before, now) == set()
    if seed == 0:
        monkeypatch.setattr(drift, "_freshness", lambda *_: 1.0)  # the planted fault
        assert fired(before, now) == {"hist_007"}


CHANGES = {
    "moved": lambda v: v + 1,
    "stretched": lambda v: v * 3,
    "in per cent": lambda v: v * 100,
    "dead": np.zeros_like,
    "clipped": lambda v: np.clip(v, -0.3, 0.3),
    "turned into steps": np.round,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_feature_fires_and_is_named_alone(change, tmp_path):
    assert fired(staged(tmp_path / "a"), staged(tmp_path / "b", seed=5, change=CHANGES[change])) == {"hist_004"}


# --- against the champion ------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    """A store with a champion that learnt from the source of seed 0."""
    store = LocalStore(tmp_path / "store")
    rows = staged(tmp_path / "first")
    dataset, uri = write_dataset(rows, NOTHING_YET, store)
    keep_profile(store, dataset.fingerprint, quantile_profile(rows.parts, rows.contract))
    for name in ("dqn", "other"):
        publish(store, trained(tmp_path / name, name, dataset=dataset, dataset_uri=uri))
        promote(store, name, 1, why="test")
    return store


def test_no_champion_is_said_plainly(tmp_path):
    report, found = check_drift(staged(tmp_path), NOTHING_YET, LocalStore(tmp_path / "store"))
    assert (report.table[-1]["result"], report.table[-1]["columns"]) == ("info", "no champion to compare with")
    assert found.drifted == []


def test_new_bars_alone_are_held_against_the_champions_rows(store, tmp_path):
    whole = source(tmp_path / "grown")
    source(tmp_path / "more", seed=7, later=900, series={"AAA": 150, "BBB": 100}, change=lambda v: v + 2)
    for n, path in enumerate(sorted((tmp_path / "more").iterdir())):
        path.rename(whole / f"new-{n}.parquet")
    rows = stage_parquet(str(whole), CONTRACT, IngestConfig(), tmp_path / "staged")
    report, found = check_drift(rows, NOTHING_YET, store)
    (one,) = found.comparisons  # both champions learnt from the same dataset
    assert one.champions == ("dqn 1", "other 1")
    assert (one.rows, one.since) == (250, "2012-03-10T00:00:00Z")
    assert found.drifted == ["hist_004"]
    line = report.table[-1]
    assert (line["result"], line["rows"]) == ("warning", 1)
    assert line["columns"].startswith("hist_004 (PSI ")
    assert line["columns"].endswith("against dqn 1, other 1")
    # All rows together would hide it
    reference = stored_profile(store, found_dataset(store))
    assert max(d.psi for d in differences(reference, found.profile)) < 0.25


def found_dataset(store):
    return next(key for key in store.list("datasets/") if key.endswith("/profile.json")).split("/")[1]


def test_the_same_rows_have_not_drifted_and_drift_is_refused_when_asked(store, tmp_path):
    report, found = check_drift(staged(tmp_path / "again"), NOTHING_YET, store)
    assert report.table[-1]["result"] == "passed"
    assert max(d.psi for d in found.comparisons[0].features) == 0
    with pytest.raises(DataContractError, match="hist_004"):
        check_drift(staged(tmp_path / "moved", "refuse", change=CHANGES["moved"]), NOTHING_YET, store)


def test_a_missing_or_damaged_profile_is_told_and_stops_nothing(store, tmp_path):
    rows, key = staged(tmp_path / "again"), f"datasets/{found_dataset(store)}/profile.json"
    good = store.get(key)
    assert not collect(store, grace=0).keys.get(key), "no garbage"
    for data, why in ((None, "has no profile"), (b"{}", "not compared")):
        store.delete(key)
        if data:
            store.put_if_absent(key, data)
        report, found = check_drift(rows, NOTHING_YET, store)
        assert found.comparisons == ()
        assert why in report.table[-1]["columns"]
    with pytest.raises(ArtifactIntegrityError, match="profile"):
        stored_profile(store, found_dataset(store))
    store.delete(key)
    with pytest.raises(ObjectMissing):
        compare(trained_on(store), store, rows.parts, None, 0.25)
    keep_profile(store, key.split("/")[1], quantile_profile(rows.parts, rows.contract))
    assert store.get(key) == good, "the same rows have the same profile"


def trained_on(store):
    from tasks.artifacts import read_manifest

    return read_manifest(store, "dqn", "champion").dataset
