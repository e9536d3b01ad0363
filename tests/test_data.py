"""Ingest from source to dataset: the same rows are the same dataset, what footers promise, the gate, the dataset and its cache.
Rules have bad rows and good twins in test_rules.py, files of other programs stand in test_ugly_sources.py."""

import time
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import PREFIXES, market_tables, small_contract, write_market

from models.config import IngestConfig
from models.features import ColumnPrefix, ContractError, FeatureContract
from tasks.artifacts import read_dataset
from tasks.datasets import fingerprint as rows_fingerprint
from tasks.datasets import write_dataset
from tasks.expectations import RULES, DataContractError, DataReport, Profile, ValidationEngineError, profile, validate_features
from tasks.series import _read, load_series, series_from_staged
from tasks.sources import list_sources
from tasks.staging import stage_parquet
from tasks.storage import ArtifactIntegrityError, LocalStore

SMALL = {"static": 3, "historical": 20, "future": 4}
CONTRACT = small_contract()
SERIES = {"AAA": 40, "BBB": 30}


def stage(source, folder, *, bad="refuse", future_rows=0, contract=CONTRACT):
    return stage_parquet(str(source), contract, IngestConfig(on_bad_rows=bad), Path(folder) / "staged", future_rows)


def ingest(source, folder, **options):
    staged = stage(source, folder, **options)
    store = LocalStore(Path(folder) / "store")
    return (*write_dataset(staged, validate_features(staged), store), staged)


def fingerprint(source, folder):
    return rows_fingerprint(stage(source, folder).parts, CONTRACT)[0]


def replaced(table, name, array):
    return table.set_column(table.schema.names.index(name), name, array)


def spoilt(table, name, changes, dtype=pa.float32()):
    values = table[name].to_pylist()
    for at, value in changes.items():
        values[at] = value
    return replaced(table, name, pa.array(values, dtype))


@pytest.fixture
def tables():
    return market_tables(SERIES, **SMALL)


@pytest.fixture
def clean(tmp_path, tables):
    folder = tmp_path / "clean"
    folder.mkdir()
    for name, table in tables.items():
        pq.write_table(table, folder / f"{name}.parquet")
    return folder


def write(folder, *tables, **options):
    folder.mkdir(parents=True, exist_ok=True)
    for i, table in enumerate(tables):
        pq.write_table(table, folder / f"part-{i}.parquet", **options)
    return folder


# --- accepted, as the same dataset ---------------------------------------------------------------------------------


def test_other_files_order_columns_types_and_zones_give_the_same_fingerprint(clean, tables, tmp_path):
    wanted = fingerprint(clean, tmp_path / "a")
    whole = pa.concat_tables(tables.values())
    backwards = whole.take(pa.array(range(whole.num_rows - 1, -1, -1))).select(whole.schema.names[::-1])
    assert fingerprint(write(tmp_path / "one", backwards, row_group_size=7), tmp_path / "b") == wanted
    zoned = replaced(whole, "timestamp", whole["timestamp"].cast(pa.timestamp("ns", tz="America/New_York")))
    zoned = replaced(zoned, "entity_id", zoned["entity_id"].dictionary_encode())
    assert fingerprint(write(tmp_path / "zone", zoned), tmp_path / "c") == wanted
    naive = replaced(whole, "timestamp", whole["timestamp"].cast(pa.timestamp("us")))
    assert fingerprint(write(tmp_path / "int96", naive, use_deprecated_int96_timestamps=True), tmp_path / "d") == wanted
    double = replaced(whole, "hist_003", whole["hist_003"].cast(pa.float64()))
    assert fingerprint(write(tmp_path / "double", double), tmp_path / "e") == wanted
    extra = whole.append_column("__index_level_0__", pa.array(range(whole.num_rows)))
    staged = stage(write(tmp_path / "extra", extra), tmp_path / "f")
    assert (rows_fingerprint(staged.parts, CONTRACT)[0], staged.ignored_columns) == (wanted, ("__index_level_0__",))


def test_globs_lists_and_single_files_are_sources(clean, tmp_path):
    assert len(list_sources(str(clean / "*.parquet"))) == 2
    assert len(list_sources([str(clean / "AAA.parquet"), str(clean)])) == 2
    assert list_sources(str(clean / "AAA.parquet")) == [clean / "AAA.parquet"]
    with pytest.raises(DataContractError, match="no Parquet file"):
        list_sources(str(tmp_path / "nothing"))


def test_a_pattern_does_not_walk_into_folders_left_by_a_dead_job(clean, tables, tmp_path):
    write(clean / "_temporary" / "0", tables["AAA"])
    write(clean / ".spark", tables["AAA"])
    assert list_sources(str(clean / "**" / "*.parquet")) == list_sources(str(clean))
    assert len(list_sources(str(clean / "_temporary" / "*" / "*.parquet"))) == 1  # asked for by name


def test_folders_above_the_source_are_no_columns(tables, tmp_path):
    source = write(tmp_path / "target_run=3" / "hist_x=1", tables["AAA"])
    groups = {"static": 3, "historical": 20, "future": 4}
    prefixes = {g: ColumnPrefix(prefix=p, count=groups[g]) for g, p in PREFIXES.items()}
    assert ingest(source, tmp_path, contract=FeatureContract(**prefixes))[0].contract.target_names == ("target",)


def test_fingerprint_tells_a_changed_bit_a_swap_of_columns_and_another_name(clean, tables, tmp_path):
    table = tables["AAA"]
    bit = table["hist_003"].to_numpy().copy()
    bit.view(np.int32)[7] ^= 1
    swapped = replaced(replaced(table, "hist_003", table["hist_004"]), "hist_004", table["hist_003"])
    renamed = replaced(table, "entity_id", pa.array(["AAB"] * 40))
    changed = [table, replaced(table, "hist_003", pa.array(bit)), swapped, renamed]
    staged = [stage(write(tmp_path / str(i), t), tmp_path / f"out{i}") for i, t in enumerate(changed)]
    prints = {rows_fingerprint(s.parts, CONTRACT)[0] for s in staged}
    assert len(prints) == len(changed)


# --- refused -------------------------------------------------------------------------------------------------------


def wrong_type(tables, folder):
    write(folder, replaced(tables["AAA"], "hist_004", pa.array(["x"] * 40)))
    return ("part-0.parquet", "hist_004", "string", "expected float")


def zones_differ(tables, folder):
    table = tables["BBB"]
    write(folder, tables["AAA"], replaced(table, "timestamp", table["timestamp"].cast(pa.timestamp("us"))))
    return ("part-1.parquet", "timestamp", "without zone")


def nested(tables, folder):
    write(folder, replaced(tables["AAA"], "hist_004", pa.array([[1.0]] * 40)))
    return ("part-0.parquet", "hist_004", "list")


def null_typed(tables, folder):
    write(folder, replaced(tables["AAA"], "hist_004", pa.nulls(40)))
    return ("part-0.parquet", "hist_004", "null")


def names_twice(tables, folder):
    write(folder, tables["AAA"].append_column("HIST_004", tables["AAA"]["hist_004"]))
    return ("part-0.parquet", "hist_004", "twice")


def zero_rows(tables, folder):
    write(folder, tables["AAA"].slice(0, 0))
    return ("zero rows",)


def damaged_page(tables, folder):
    write(folder, tables["AAA"], compression="none", use_dictionary=False, write_page_checksum=True)
    path = folder / "part-0.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0x10
    path.write_bytes(bytes(data))
    return ("part-0.parquet", "damaged")


def nan(tables, folder):
    write(folder, spoilt(tables["AAA"], "hist_004", {3: float("nan"), 9: float("nan")}))
    return ("part-0.parquet", "hist_004", "2 rows", "NaN")


def null_key(tables, folder):
    write(folder, spoilt(tables["AAA"], "entity_id", {2: None}, pa.string()))
    return ("entity_id", "1 rows")


def hive_null_key(tables, folder):
    write(folder / "entity_id=__HIVE_DEFAULT_PARTITION__", tables["AAA"].drop_columns(["entity_id"]))
    return ("nulls: column 'entity_id' has 40 rows", "part-0.parquet")


def rows_ahead(tables, folder):
    write(folder, market_tables({"AAA": 30}, **SMALL, future_rows=5)["AAA"])
    return ("part-0.parquet", "5 rows from row 30", "predict")


FAULTS = (
    wrong_type, zones_differ, nested, null_typed, names_twice, zero_rows, damaged_page, null_key, hive_null_key, rows_ahead,
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_bad_source_is_refused_with_file_column_and_count_and_nothing_is_stored(fault, tables, tmp_path):
    expected = fault(tables, tmp_path / "bad")
    with pytest.raises(DataContractError) as refused:
        ingest(tmp_path / "bad", tmp_path)
    for part in expected:
        assert part in str(refused.value), str(refused.value)
    assert not (tmp_path / "store").exists()


def test_rows_without_a_key_are_set_aside_with_their_reason_and_none_is_lost(tables, tmp_path):
    source = tmp_path / "bad"
    null_key(tables, source)
    dataset, _, staged = ingest(source, tmp_path, bad="quarantine")
    assert (dataset.rows, staged.quarantined_rows, staged.read_rows) == (39, 1, 40)
    (row,) = pq.read_table(next((tmp_path / "store" / "ingests").rglob("quarantine.parquet"))).to_pylist()
    assert (Path(row["source_file"]).name, row["source_row"], row["reasons"]) == ("part-0.parquet", 2, "entity_id: null")


def test_duplicates_are_told_apart_by_value_with_null_equal_to_null_and_nan_to_nan(tables, tmp_path):
    odd = spoilt(tables["AAA"], "hist_004", {3: float("nan"), 4: None})
    other = spoilt(odd.slice(10, 1), "hist_000", {0: 9.0})
    source = write(tmp_path / "s", odd, odd.slice(3, 3), odd.slice(4, 1), other, odd.slice(10, 1))
    staged = stage(source, tmp_path)
    assert staged.duplicates == {"exact": 4, "conflicting": 3}
    assert staged.duplicate_key_count == 4


def test_a_large_source_given_twice_is_refused_in_seconds(tmp_path):
    table = market_tables({"AAA": 30_000}, **SMALL)["AAA"]
    source = write(tmp_path / "s", table, table)
    started = time.process_time()
    assert stage(source, tmp_path).duplicates == {"exact": 30_000, "conflicting": 0}
    assert time.process_time() - started < 5


def test_unknown_column_names_are_refused_with_the_way_out(tmp_path):
    write_market(tmp_path / "s", series={"AAA": 30}, static=5, historical=209, future=10)
    with pytest.raises(DataContractError, match=r"expected 210 columns named 'hist_\*', found 209.*--contract"):
        ingest(tmp_path / "s", tmp_path, contract=FeatureContract())


# --- the gate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [True, False])
def test_min_and_max_do_not_hang_on_what_the_footers_say(said, clean, tmp_path):
    staged = stage(clean, tmp_path)
    wanted = pq.read_table(staged.parts[0])
    pq.write_table(wanted, staged.parts[0], write_statistics=said)
    for row in profile(staged).columns[2:]:
        values = wanted[row["feature"]].to_numpy()
        assert (row["min"], row["max"]) == (values.min(), values.max())


def test_validation_table_names_every_rule(clean, tmp_path):
    report = validate_features(stage(clean, tmp_path))
    assert [line["rule"] for line in report.table] == [*(rule.name for rule in RULES), "quarantined"]
    assert all(line["result"] in {"passed", "info", "not asked"} for line in report.table)
    assert list(Path(report.data_docs).rglob("index.html"))
    assert Path(report.data_docs).is_relative_to(tmp_path)  # gone with the staged rows


def rewritten(staged, change):
    (part,) = staged.parts
    pq.write_table(change(pq.read_table(part)), part)
    return staged


def test_staged_rows_out_of_order_are_caught(clean, tmp_path):
    staged = stage(clean, tmp_path)
    with pytest.raises(DataContractError, match="rising time per series: 1 rows"):  # two bars of one series
        validate_features(rewritten(staged, lambda t: t.take(pa.array([1, 0, *range(2, 70)]))))
    with pytest.raises(DataContractError, match="rising time per series: 1 rows"):  # two series
        validate_features(rewritten(stage(clean, tmp_path / "b"), lambda t: t.take(pa.array([*range(40, 70), *range(40)]))))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
@pytest.mark.parametrize("bad", ["refuse", "quarantine"])
def test_bad_values_that_staging_has_not_counted_stop_the_gate(value, bad, tables, tmp_path):
    nan(tables, tmp_path / "s")
    staged = stage(tmp_path / "s", tmp_path, bad=bad)
    with pytest.raises(ValidationEngineError, match="hist_005"):
        validate_features(rewritten(staged, lambda t: spoilt(t, "hist_005", {6: value})))


def test_a_broken_engine_is_an_error_and_never_failed_data(clean, tmp_path, monkeypatch):
    import tasks.expectations as expectations

    broken = tuple(rule._replace(column="no such column") for rule in RULES[:1])
    monkeypatch.setattr(expectations, "RULES", (*broken, *RULES[1:]))
    with pytest.raises(ValidationEngineError):
        validate_features(stage(clean, tmp_path))


# --- the dataset ---------------------------------------------------------------------------------------------------


def test_dataset_is_written_last_read_back_and_loaded_as_the_same_arrays(clean, tables, tmp_path):
    dataset, uri, _ = ingest(clean, tmp_path)
    assert read_dataset(uri) == dataset
    for _ in range(2):  # filled, then from the cache
        series = load_series(dataset, uri, tmp_path / "cache")
        assert series.names == ("AAA", "BBB")
        assert series.offsets.tolist() == [0, 40, 70]
        assert np.array_equal(series.historical[:40, 7], tables["AAA"]["hist_007"].to_numpy())
        assert np.array_equal(series.price[40:], tables["BBB"]["price"].to_numpy())
        assert series.static.shape == (2, 3)


def test_damaged_cache_is_filled_again_and_damaged_parts_are_refused(clean, tmp_path):
    dataset, uri, _ = ingest(clean, tmp_path)
    sound = load_series(dataset, uri, tmp_path / "cache").historical.copy()
    cached = tmp_path / "cache" / dataset.fingerprint / "historical.npy"
    data = bytearray(cached.read_bytes())
    data[-5] ^= 1
    cached.write_bytes(bytes(data))
    assert np.array_equal(load_series(dataset, uri, tmp_path / "cache").historical, sound)
    part = next((tmp_path / "store" / "datasets" / dataset.fingerprint).glob("part-*.parquet"))
    data = bytearray(part.read_bytes())
    data[100] ^= 1
    part.write_bytes(bytes(data))
    with pytest.raises(ArtifactIntegrityError, match="expected"):
        load_series(dataset, uri, tmp_path / "other cache")


@pytest.mark.parametrize("damage", ["lost", "changed"])
def test_a_dataset_with_a_lost_or_changed_part_is_not_taken_for_whole(clean, tmp_path, damage):
    staged, report, store = (
        stage(clean, tmp_path),
        DataReport([], None, Profile([], [], [], {}, [])),
        LocalStore(tmp_path / "store"),
    )
    dataset, _ = write_dataset(staged, report, store)
    part = tmp_path / "store" / "datasets" / dataset.fingerprint / next(iter(dataset.files))
    assert write_dataset(staged, report, store)[0] == dataset
    if damage == "lost":
        part.unlink()
    else:
        part.write_bytes(part.read_bytes()[::-1])
    with pytest.raises(ArtifactIntegrityError, match=part.name):
        write_dataset(staged, report, store)


def test_memory_of_filling_the_cache_does_not_grow_with_the_rows(tmp_path):
    peaks = []
    for rows in (40_000, 160_000):
        table = market_tables({"AAA": rows}, **SMALL)["AAA"].select(CONTRACT.columns)
        pq.write_table(table, tmp_path / "part.parquet", use_dictionary=False, write_page_checksum=True)
        (folder := tmp_path / str(rows)).mkdir()
        for target in (folder, None):
            tracemalloc.start()
            series = _read([tmp_path / "part.parquet"], CONTRACT, rows, 0, target)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            assert np.array_equal(series.historical[:, 3], table["hist_003"].to_numpy())
    assert peaks[2] - peaks[0] < (peaks[3] - peaks[1]) / 5  # in memory it grows by the arrays


def test_rows_ahead_end_a_series_to_predict_from(tmp_path):
    write_market(tmp_path / "s", series={"AAA": 30, "BBB": 25}, **SMALL, future_rows=4)
    series = series_from_staged(stage(tmp_path / "s", tmp_path, future_rows=4))
    assert series.history_rows.tolist() == [30, 25]
    assert np.diff(series.offsets).tolist() == [34, 29]
    with pytest.raises(DataContractError, match="at most 3"):
        series_from_staged(stage(tmp_path / "s", tmp_path / "again", future_rows=3))


# --- contracts -----------------------------------------------------------------------------------------------------


def test_contract_from_toml_with_other_names_and_sizes(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(
        'price = "close"\ntargets = ["close"]\nstatic = ["s"]\nhistorical = {prefix = "h_", count = 2}\nfuture = []\n'
    )
    contract = FeatureContract.from_toml(file).resolve(["h_2", "h_1", "s", "close"])
    assert contract.groups() == {"static": ("s",), "historical": ("h_1", "h_2"), "future": ()}
    assert contract.columns == ("entity_id", "timestamp", "close", "s", "h_1", "h_2")
    file.write_text("prize = 'x'")
    with pytest.raises(ContractError, match=r"c\.toml"):
        FeatureContract.from_toml(file)


def test_names_that_differ_in_case_alone_are_one_name():
    with pytest.raises(ValueError, match="case does not count"):
        FeatureContract(targets=("target",), static=("a",), historical=("A",), future=())
    with pytest.raises(ContractError, match="resolve"):
        _ = FeatureContract().fingerprint
