"""Files as other programs leave them, through the command line: each is accepted as the rows that it holds, or refused with
file, column and count; and sources that other libraries train or forecast wrongly from. Each case is made here, small, with the
fault of a real one."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterName
from synthetic import market_tables

from flows.__main__ import main
from models.checkpoint import load_checkpoint

SERIES = {"AAPL": 80, "IBM": 80}
SIZES = {"static": 2, "historical": 12, "future": 2}
CONTRACT = """targets = ["target"]
static = { prefix = "static_", count = 2 }
historical = { prefix = "hist_", count = 12 }
future = { prefix = "fut_", count = 2 }
"""


pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def forecastle(tmp_path, capfd):
    """Run a command on the store in `tmp_path`: exit code, the JSON object, what people read."""

    def run(*tokens):
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*map(str, tokens), "--store", (tmp_path / "store").as_uri(), "--json"])
        out, err = capfd.readouterr()
        return ended.value.code, json.loads(out), err

    return run


@pytest.fixture
def ingest(tmp_path, forecastle):
    """Run `forecastle ingest` on a folder."""
    (tmp_path / "contract.toml").write_text(CONTRACT)
    return lambda source, *options: forecastle("ingest", source, "--contract", tmp_path / "contract.toml", *options)


def canonical():
    return market_tables(SERIES, **SIZES)


def replaced(table, name, array):
    return table.set_column(table.schema.names.index(name), name, array)


def spoilt(table, name, changes):
    values = table[name].to_pylist()
    for at, value in changes.items():
        values[at] = value
    return replaced(table, name, pa.array(values, table.schema.field(name).type))


def write(path, table, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)


def months(folder):
    """Three good files: rows of both series by time."""
    whole = pa.concat_tables(canonical().values())
    for at, name in enumerate("abc"):
        rows = [r for start in (0, 80) for r in range(start + at * 20, start + (at + 1) * 20 + (20 if at == 2 else 0))]
        write(folder / f"{name}.parquet", whole.take(pa.array(rows)))


# --- accepted ------------------------------------------------------------------------------------------------------


def pandas_leftover_index(folder):
    frame = pa.concat_tables([*canonical().values(), canonical()["AAPL"].slice(0, 5)]).to_pandas()
    frame = frame[~frame.duplicated(["entity_id", "timestamp"])]
    frame.index = frame.index + 7
    folder.mkdir()
    frame.to_parquet(folder / "data.parquet", index=True)
    frame.sort_values("price").to_parquet(folder / "data.parquet")
    assert "__index_level_0__" in pq.read_schema(folder / "data.parquet").names


def polars_zstd_other_order(folder):
    whole = pa.concat_tables(canonical().values())
    whole = replaced(whole, "entity_id", whole["entity_id"].cast(pa.large_string()))
    order = np.random.default_rng(0).permutation(whole.schema.names).tolist()
    write(folder / "data.parquet", whole.select(order), compression="zstd", row_group_size=50, store_schema=False)


def one_empty_file(folder):
    months(folder)
    (folder / "c.parquet").rename(folder / "d.parquet")
    write(folder / "c.parquet", canonical()["AAPL"].slice(0, 0))


@pytest.mark.parametrize("case", [pandas_leftover_index, polars_zstd_other_order, one_empty_file], ids=lambda c: c.__name__)
def test_the_same_rows_from_other_programs_are_the_same_dataset(case, ingest, tmp_path):
    months(tmp_path / "canonical")
    _, wanted, _ = ingest(tmp_path / "canonical")
    case(tmp_path / "case")
    code, found, _ = ingest(tmp_path / "case")
    assert (code, found["fingerprint"], found["series"]) == (0, wanted["fingerprint"], SERIES)


def test_spark_folders_with_int96_times_and_an_escaped_key(ingest, tmp_path):
    folder = tmp_path / "spark"
    for name, key in {"AAPL": "AAPL", "IBM": "BRK%2FB"}.items():
        table = canonical()[name].drop_columns(["entity_id"])
        table = replaced(table, "timestamp", table["timestamp"].cast(pa.timestamp("ns")))
        path = folder / f"entity_id={key}" / "part-00000-3f1c.c000.snappy.parquet"
        write(path, table, use_deprecated_int96_timestamps=True)
        (path.parent / f".{path.name}.crc").write_bytes(b"crc\0")
    (folder / "_SUCCESS").touch()
    code, found, _ = ingest(folder)
    assert (code, found["series"]) == (0, {"AAPL": 80, "BRK/B": 80})
    store = tmp_path / "store"
    rows = pa.concat_tables(pq.read_table(p) for p in sorted((store / "datasets").rglob("part-*.parquet")))
    assert rows["timestamp"][:80].equals(canonical()["AAPL"]["timestamp"])
    assert all("=" not in p.name and "%" not in p.name for p in store.rglob("*"))


def test_hours_of_new_york_around_both_clock_changes_are_instants_without_duplicates_or_gaps(ingest, tmp_path):
    starts = (datetime(2017, 3, 9, 12, tzinfo=UTC), datetime(2017, 11, 2, 12, tzinfo=UTC))
    times = [start + timedelta(hours=i) for start in starts for i in range(90)]
    table = replaced(
        market_tables({"EURUSD": 180}, **SIZES)["EURUSD"], "timestamp", pa.array(times, pa.timestamp("us", tz="UTC"))
    )
    local = replaced(table, "timestamp", table["timestamp"].cast(pa.timestamp("ns", tz="America/New_York")))
    write(tmp_path / "utc" / "data.parquet", table)
    write(tmp_path / "local" / "data.parquet", local, compression="gzip")
    _, wanted, _ = ingest(tmp_path / "utc")
    code, found, _ = ingest(tmp_path / "local")
    assert (code, found["rows"], found["fingerprint"]) == (0, 180, wanted["fingerprint"])
    for at in (0, 90):  # each by itself has no gap at all
        write(tmp_path / str(at) / "data.parquet", local.slice(at, 90))
        code, _, err = ingest(tmp_path / str(at), "--config.rules.gap", "refuse", "--config.gap-bars", "1")
        assert code == 0, err


def test_decimal_prices_and_dictionary_keys_are_the_numbers_and_names(ingest, tmp_path):
    table = pa.concat_tables(canonical().values())
    decimal = replaced(table, "price", pc.round(table["price"], 6).cast(pa.decimal128(18, 6)))
    decimal = replaced(decimal, "entity_id", decimal["entity_id"].dictionary_encode())
    write(tmp_path / "case" / "data.parquet", decimal)
    code, found, _ = ingest(tmp_path / "case")
    assert (code, found["series"]) == (0, SERIES)
    stored = pq.read_table(next((tmp_path / "store" / "datasets").rglob("part-*.parquet")))
    assert np.abs(stored["price"].to_numpy() - table["price"].to_numpy()).max() <= 1e-6


def test_short_series_are_kept_and_those_too_short_to_train_on_are_named(ingest, tmp_path):
    series = {"AAPL": 80, "FB": 40, "IBM": 80, "NEWCO": 5, "ONE": 1}
    write(tmp_path / "case" / "data.parquet", pa.concat_tables(market_tables(series, **SIZES).values()))
    code, found, _ = ingest(tmp_path / "case")
    assert (code, found["series"], found["skipped_series"]) == (0, series, ["FB", "NEWCO", "ONE"])


# --- refused -------------------------------------------------------------------------------------------------------


def nulls_nans_infs(folder):
    table = spoilt(canonical()["AAPL"], "hist_001", {3: None, 4: None, 5: None})
    table = spoilt(table, "hist_002", {6: float("nan"), 7: float("nan")})
    table = spoilt(spoilt(table, "hist_003", {8: float("inf")}), "hist_004", {9: float("-inf")})
    write(folder / "data.parquet", spoilt(spoilt(table, "target", {10: None}), "price", {11: float("nan")}))
    return (
        "no nulls: column 'hist_001' has 3 rows", "no nulls: column 'target' has 1", "no NaN: column 'hist_002' has 2 rows",
        "no NaN: column 'price' has 1", "no +inf: column 'hist_003' has 1", "no -inf: column 'hist_004' has 1", "data.parquet",
    )  # fmt: skip


def nan_hidden_by_statistics(folder):
    ones = replaced(canonical()["AAPL"], "hist_006", pa.array(np.ones(80, np.float32)))
    write(folder / "data.parquet", spoilt(ones, "hist_006", {33: float("nan")}))
    statistics = pq.read_metadata(folder / "data.parquet").row_group(0).column(ones.schema.names.index("hist_006")).statistics
    assert (statistics.min, statistics.max) == (1.0, 1.0)
    return ("no NaN: column 'hist_006' has 1 rows", "data.parquet")


def duplicates(folder):
    table = canonical()["AAPL"]
    other = spoilt(table.slice(20, 1), "price", {0: 1.0})
    write(folder / "data.parquet", pa.concat_tables([table, table.slice(10, 2), other]))
    return ("no exact duplicates: 2 rows", "one row per key: 2 rows", "3 keys (AAPL 2010-01-11", "data.parquet")


def mixed_schema(folder):
    table = canonical()["IBM"].drop_columns(["hist_010"])
    for at in range(9):
        table = replaced(table, f"hist_{at:03d}", table[f"hist_{at:03d}"].cast(pa.float64()))
    table = replaced(table, "hist_009", table["hist_009"].cast(pa.int32(), safe=False))
    write(folder / "2012-01.parquet", canonical()["AAPL"])
    write(folder / "2012-02.parquet", table)
    return (
        "2012-02.parquet: column 'hist_010' missing (80 rows)", "column 'hist_003' is double, but float in 2012-01.parquet",
        "2012-02.parquet: column 'hist_009' is int32", "11 columns",
    )  # fmt: skip


def zero_byte_file(folder):
    months(folder)
    (folder / "b.parquet").write_bytes(b"")
    return ("b.parquet: 0 bytes",)


def truncated_file(folder):
    months(folder)
    (folder / "b.parquet").write_bytes((folder / "b.parquet").read_bytes()[:-300])
    return ("b.parquet: cut short",)


def text_for_numbers(folder):
    write(folder / "data.parquet", replaced(canonical()["AAPL"], "hist_004", pa.array(["x"] * 80)))
    return ("data.parquet: column 'hist_004' is string", "expected float")


def zero_rows(folder):
    write(folder / "data.parquet", canonical()["AAPL"].slice(0, 0))
    return ("zero rows in 1 files",)


REFUSED = (
    nulls_nans_infs, nan_hidden_by_statistics, duplicates, mixed_schema, text_for_numbers, zero_byte_file, truncated_file,
    zero_rows,
)  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda c: c.__name__)
def test_refused_with_file_column_and_count_before_anything_is_stored(case, ingest, tmp_path):
    expected = case(tmp_path / "case")
    code, found, err = ingest(tmp_path / "case")
    assert (code, found["exit_code"]) == (3, 3)
    for text in expected:
        assert text in found["error"], found["error"]
    assert found["error"] in err
    with get_client(sync_client=True) as client:
        named = FlowRunFilter(name=FlowRunFilterName(any_=[f"ingest[{tmp_path / 'case'}]"]))
        (run,) = client.read_flow_runs(flow_run_filter=named)
        tried = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])))
    assert (run.state_name, run.run_count) == ("Failed", 1)
    assert {task.run_count for task in tried} == {1}, "what is bad stays bad: nothing is tried again"
    assert not Path(tmp_path / "store").exists()


def test_the_summary_says_what_happened_to_bad_rows_that_were_set_aside(ingest, tmp_path):
    nulls_nans_infs(tmp_path / "case")
    code, found, _ = ingest(tmp_path / "case", "--config.on-bad-rows", "quarantine")
    assert (code, found["rows"], found["quarantined_rows"]) == (0, 71, 9)
    record = json.loads(next((tmp_path / "store" / "ingests").glob("*.json")).read_text())
    assert record["read_rows"] == record["rows"] + record["quarantined_rows"] == 80
    lines = {line["rule"]: line for line in record["rules"]}
    assert [(lines[r]["result"], lines[r]["rows"]) for r in ("no nulls", "no NaN", "no +inf", "no -inf")] == [
        ("set aside", 4), ("set aside", 3), ("set aside", 1), ("set aside", 1),
    ]  # fmt: skip
    (source,) = record["sources"].values()
    assert source["rows"] == 80
    assert len(source["sha256"]) == 64


# --- trained on and forecast from ----------------------------------------------------------------------------------

TINY = {
    "context": 8, "horizon": 3, "hidden-size": 8, "num-heads": 2, "grn-layers": 0, "epochs": 1, "updates-per-epoch": 2,
    "batch-size": 4, "windows-per-start": 2, "final-weights": "last", "device": "cpu", "early-stopping.patience": 0,
}  # fmt: skip
WHOLE = ("--config.split.cut-dates", "2090-01-01", "2091-01-01")  # every row is of the train block


@pytest.fixture
def train(ingest, forecastle):
    """Ingest a table and train a small TFT on it: exit code, what it tells, what people read."""

    def run(table, folder, *options, **config):
        write(folder / "data.parquet", table)
        code, found, err = ingest(folder)
        assert code == 0, err
        tokens = [t for key, value in {**TINY, **config}.items() for t in (f"--config.{key}", value)]
        return forecastle("train", "tft", "--dataset", found["dataset"], *tokens, *options)

    return run


def weights_of(found):
    (name,) = [name for name in found["files"] if "_final_" in name]
    return load_checkpoint(Path(unquote(urlsplit(found["uri"]).path)) / name, found["files"][name]["sha256"]).tensors


def test_a_jump_of_scale_after_the_train_block_changes_no_statistic_and_no_weight(train, tmp_path):
    plain = market_tables({"AAPL": 200}, **SIZES)["AAPL"]
    jump = plain
    for name in ("price", "target", "hist_000"):
        factors = np.where(np.arange(200) < 170, 1.0, 1000.0).astype(plain[name].to_numpy().dtype)
        jump = replaced(jump, name, pa.array(plain[name].to_numpy() * factors))
    found = [weights_of(train(table, tmp_path / str(at))[1]) for at, table in enumerate((plain, jump))]
    assert found[0].keys() == found[1].keys()
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name]), name

    def statistics(table, rows):
        past, ahead = (
            np.stack([table[f"{k}_{i:03d}"].to_numpy()[:rows] for i in range(n)], axis=1).astype(np.float64)
            for k, n in (("hist", 12), ("fut", 2))
        )
        return {
            "historical_mean": past.mean(0), "historical_scale": past.std(0), "future_mean": ahead.mean(0),
            "future_scale": ahead.std(0), "target_scale": np.diff(np.log(table["target"].to_numpy()[:rows])).std(),
            "static_low": np.array([0.0, 1.0]), "static_high": np.array([0.0, 1.0]),
        }  # fmt: skip

    def off(name, table, rows):
        return np.abs(found[1][f"scaler.{name}"].numpy() - statistics(table, rows)[name]).max()

    assert max(off(name, jump, 140) for name in statistics(jump, 140)) < 1e-6
    assert min(off(name, jump, 200) for name in ("historical_mean", "future_mean", "target_scale")) > 1e-6, "of all rows"


def test_a_series_and_a_code_never_seen_are_forecast_with_one_warning_that_names_both(train, forecastle, tmp_path, caplog):
    assert train(market_tables({"AAPL": 130}, **SIZES)["AAPL"], tmp_path / "train")[0] == 0
    new = market_tables({"NEWX": 130}, **SIZES, seed=1)["NEWX"]
    new = replaced(new, "static_001", pa.array(np.full(130, 99, np.float32)))
    write(tmp_path / "new" / "data.parquet", new)
    code, found, err = forecastle("predict", "tft", tmp_path / "new", tmp_path / "out.parquet")
    assert (code, found["rows"]) == (0, 3), err
    table = pq.read_table(tmp_path / "out.parquet")
    quantiles = np.stack([table[name].to_numpy() for name in ("p10", "p50", "p90")], axis=1)
    assert np.isfinite(quantiles).all()
    assert (np.diff(quantiles) >= 0).all()
    (warning,) = [record for record in caplog.records if "NEWX" in record.getMessage()]
    assert warning.levelname == "WARNING"
    assert "static_001 is 99" in warning.getMessage()


def test_windows_of_unequal_series_are_counted_and_too_short_ones_named_and_refused_alone(train, tmp_path, caplog):
    series = {"AAPL": 200, "FB": 75, "IBM": 61, "MSFT": 12}
    tables = market_tables(series, **SIZES)
    long = {"context": 30, "horizon": 10}
    code, found, _ = train(pa.concat_tables(tables.values()), tmp_path / "all", *WHOLE, **long)
    assert (code, found["metrics"]["windows"]["train"], found["metrics"]["short_series"]) == (0, 161 + 36 + 22, {"MSFT": 12})
    assert any("left out" in r.getMessage() and "{'MSFT': 12}" in r.getMessage() for r in caplog.records)
    code, found, _ = train(tables["IBM"], tmp_path / "ibm", *WHOLE, **long)
    assert (code, found["metrics"]["windows"]["train"]) == (0, 22)
    code, found, _ = train(tables["MSFT"], tmp_path / "msft", *WHOLE, **long)
    assert (code, found["exit_code"]) == (3, 3)
    assert "context 30 + horizon 10" in found["error"]
    assert "{'MSFT': 12}" in found["error"]


def test_targets_of_the_horizon_change_no_forecast(train, forecastle, tmp_path):
    table = market_tables({"AAPL": 160}, **SIZES)["AAPL"]
    for name in table.schema.names:
        if name.startswith("hist_"):
            table = replaced(table, name, pa.array(np.zeros(160, np.float32)))
    ones = pa.array(np.ones(160))
    table = replaced(replaced(table, "price", ones), "target", ones)
    assert train(table, tmp_path / "train")[0] == 0
    horizon = range(157, 160)
    fives = gone = table
    for name in table.schema.names:
        if name in ("price", "target"):
            fives = spoilt(fives, name, dict.fromkeys(horizon, 5.0))
        if name.startswith(("hist_", "static_")) or name in ("price", "target"):
            gone = spoilt(gone, name, dict.fromkeys(horizon))
    before = spoilt(table, "target", {156: 5.0})
    found = {}
    for name, rows in {"ones": table, "fives": fives, "gone": gone, "before": before}.items():
        write(tmp_path / name / "data.parquet", rows)
        code, _, err = forecastle("predict", "tft", tmp_path / name, tmp_path / f"{name}.parquet")
        assert code == 0, err
        found[name] = pq.read_table(tmp_path / f"{name}.parquet").to_pylist()
    assert found["ones"] == found["fives"] == found["gone"]
    assert found["before"] != found["ones"]  # the last target that is known: seen
