"""Every rule about rows: a bad row that it catches under each policy it may have, and a good twin that passes them all."""

import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from synthetic import DAY, market_tables, small_contract

from models.config import POLICIES, IngestConfig
from tasks.datasets import write_dataset
from tasks.expectations import RULES, DataContractError, validate_features
from tasks.staging import stage_parquet
from tasks.storage import LocalStore

CONTRACT = small_contract(static=2, historical=8, future=2)
ROWS = {"AAA": 40, "BBB": 40, "CCC": 40, "DDD": 60}
NOW = int(time.time()) * 1_000_000
FILE = "AAA.parquet"


def tables():
    return market_tables(ROWS, static=2, historical=8, future=2)


def put(table, name, changes):
    values = table[name].to_pylist()
    for at, value in changes.items():
        values[at] = value
    at = table.schema.names.index(name)
    return table.set_column(at, name, pa.array(values, table.schema.field(name).type))


def cell(name, value, series="AAA", row=7):
    """A fault in one cell: what it does to the tables, what the message names, and the rows (file, row) that are bad."""

    def spoil(found):
        found[series] = put(found[series], name, {row: value})

    return spoil, (name, "1 rows", f"{series}.parquet: 1"), {(f"{series}.parquet", row)}


def double_column(found):
    """float32 cannot hold 1e39: the column is double in every file."""
    for series, table in found.items():
        at = table.schema.names.index("hist_004")
        found[series] = table.set_column(at, "hist_004", table["hist_004"].cast(pa.float64()))
    found["AAA"] = put(found["AAA"], "hist_004", {7: 1e39})


def twice(found):
    table = found["AAA"]
    found["AAA"] = pa.concat_tables([table.slice(0, 12), table.slice(11)])


def twice_with_another_price(found):
    table = found["BBB"]
    found["BBB"] = pa.concat_tables([table.slice(0, 12), put(table.slice(11), "price", {0: 5.0})])


def moved(series, change):
    def spoil(found):
        table = found[series]
        at = table.schema.names.index("timestamp")
        micros = change(table["timestamp"].cast("int64").to_numpy().copy())
        found[series] = table.set_column(at, "timestamp", pa.array(micros).cast(table.schema.field(at).type))

    return spoil


def swapped(micros):
    micros[[20, 21]] = micros[[21, 20]]
    return micros


def next_week(micros):
    micros[-1] = NOW + 7 * DAY
    return micros


def hole(micros):
    micros[30:] += 30 * DAY
    return micros


def half_days(micros):
    return micros[0] + (micros - micros[0]) // 2


FAULTS = {
    "null": cell("hist_000", None),
    "nan": cell("hist_001", float("nan")),
    "posinf": cell("hist_002", float("inf")),
    "neginf": cell("hist_003", float("-inf")),
    "overflow": (double_column, ("hist_004", "1 rows", f"{FILE}: 1"), {(FILE, 7)}),
    "not_positive": cell("price", 0.0),
    "static_change": cell("static_001", 99.0, row=9),
    "exact_duplicate": (twice, ("AAA 2010-01-12", "1 keys", FILE), {(FILE, 12)}),
    "conflicting_key": (
        twice_with_another_price, ("BBB 2010-01-12", "2 rows", "BBB.parquet"), {("BBB.parquet", 11), ("BBB.parquet", 12)}
    ),
    "unsorted": (moved("CCC", swapped), ("timestamp", "1 rows", "CCC.parquet: 1"), {("CCC.parquet", 21)}),
    "future_time": (moved("CCC", next_week), ("timestamp", "1 rows", "CCC.parquet: 1"), {("CCC.parquet", 39)}),
    "gap": (moved("DDD", hole), ("DDD", "30 bars missing", "2010-01-30"), set()),
    "bar_interval": (moved("DDD", half_days), ("DDD", "every 43200 s", "1d"), set()),
    "stale": (lambda found: None, ("AAA", "older than 30 days"), set()),
}  # fmt: skip
EXTRA = {
    "static_change": ("static_001", "1 series"),
    "bar_interval": ("the contract says",),
}
OTHERS = {"leak", "drift", "suite"}  # have tests of their own


def config_of(*rules, policy, **more):
    limit = {"stale_after_days": 30} if "stale" in rules else {}
    return IngestConfig(rules=dict.fromkeys(rules, policy), **limit, **more)


def staged(found, folder, config, contract=CONTRACT):
    source = Path(folder) / "source"
    source.mkdir()
    for series, table in found.items():
        pq.write_table(table, source / f"{series}.parquet")
    return stage_parquet(str(source), contract, config, Path(folder) / "staged")


def contract_for(rule):
    return CONTRACT.model_copy(update={"bar_interval": "1d"}) if rule == "bar_interval" else CONTRACT


def line_of(table, rule):
    name = next(r.name for r in RULES if r.key == rule)
    return next(line for line in table if line["rule"] == name)


def test_every_rule_has_a_fault_here():
    assert set(FAULTS) | OTHERS == set(POLICIES)
    assert {r.key for r in RULES} - {None} == set(FAULTS)


@pytest.mark.parametrize("rule", FAULTS)
def test_bad_row_is_refused_by_its_rule_alone_naming_file_column_and_count(rule, tmp_path):
    spoil, named, _ = FAULTS[rule]
    spoil(found := tables())
    with pytest.raises(DataContractError) as refused:
        validate_features(staged(found, tmp_path, config_of(rule, policy="refuse"), contract_for(rule)))
    for text in EXTRA.get(rule, named):
        assert text in str(refused.value), str(refused.value)
    failed = [line for line in refused.value.table if line["result"] == "FAILED"]
    assert failed == [line_of(refused.value.table, rule)]
    assert failed[0]["policy"] == "refuse"


def test_bad_rows_are_set_aside_with_file_row_and_every_reason_and_none_is_lost(tmp_path):
    rules = [rule for rule in FAULTS if "quarantine" in POLICIES[rule]]
    found = tables()
    for rule in rules:
        FAULTS[rule][0](found)
    result = staged(found, tmp_path, config_of(*rules, policy="quarantine"))
    report = validate_features(result)
    store = LocalStore(tmp_path / "store")
    dataset, _ = write_dataset(result, report, store)
    aside = pq.read_table(next((tmp_path / "store" / "ingests").rglob("quarantine.parquet"))).to_pylist()
    rows = {(Path(row["source_file"]).name, row["source_row"]): row for row in aside}
    assert set(rows) == set.union(*(FAULTS[rule][2] for rule in rules))
    assert dataset.rows + len(aside) == result.read_rows == sum(table.num_rows for table in found.values())
    # A row with five faults gives all five reasons, and its values as they were
    seven = rows[FILE, 7]
    assert {r.strip() for r in seven["reasons"].split(";")} == {
        "hist_000: null", "hist_001: nan", "hist_002: posinf", "hist_003: neginf", "hist_004: overflow", "price: not_positive",
    }  # fmt: skip
    assert (seven["hist_000"], seven["hist_002"], seven["entity_id"]) == (None, float("inf"), "AAA")
    assert rows["BBB.parquet", 12]["price"] == 5.0
    for rule in rules:
        line = line_of(report.table, rule)
        assert (line["policy"], line["result"], line["rows"]) == ("quarantine", "set aside", len(FAULTS[rule][2])), line


def test_rules_that_may_warn_accept_the_row_and_say_so(tmp_path):
    rules = [rule for rule in FAULTS if "warn" in POLICIES[rule]]
    found = tables()
    for rule in rules:
        if rule != "bar_interval":
            FAULTS[rule][0](found)
    found["EEE"] = tables()["DDD"]
    found["EEE"] = put(found["EEE"], "entity_id", dict.fromkeys(range(60), "EEE"))
    moved("EEE", half_days)(found)
    result = staged(found, tmp_path, config_of(*rules, policy="warn"), contract_for("bar_interval"))
    report = validate_features(result)
    assert result.rows == result.read_rows
    for rule in rules:
        line = line_of(report.table, rule)
        assert (line["policy"], line["result"]) == ("warn", "warning"), line
        assert line["rows"] >= 1
        assert line["columns"]


def twins():
    """Rows that stop just short of breaking each rule."""
    found = tables()
    biggest = np.finfo(np.float32).max
    for series, table in found.items():
        at = table.schema.names.index("hist_004")
        found[series] = table.set_column(at, "hist_004", table["hist_004"].cast(pa.float64()))
    found["AAA"] = put(found["AAA"], "hist_004", {7: float(biggest), 8: -float(biggest), 9: 1e-45, 10: -0.0})
    found["AAA"] = put(found["AAA"], "price", {7: 1e-12})
    # The same bar of two series, and the same values at two times, are no duplicates
    same = {"AAA": 0.0, "BBB": 0.0}
    for name in [n for n in found["AAA"].schema.names if n not in ("entity_id", "timestamp", "hist_004")]:
        for series in same:
            found[series] = put(found[series], name, {11: 1.0, 12: 1.0} if not name.startswith("static") else {})
    recent = NOW // DAY * DAY

    def up_to_today(micros):
        return micros - micros[-1] + recent

    def ten_missing(micros):
        micros[:-5] -= 10 * DAY
        return micros

    for series in found:
        moved(series, up_to_today)(found)
    moved("DDD", ten_missing)(found)
    return found


def test_good_twins_pass_every_rule(tmp_path):
    config = config_of(*FAULTS, policy="refuse")
    report = validate_features(staged(twins(), tmp_path, config, contract_for("bar_interval")))
    results = {line["rule"]: line["result"] for line in report.table}
    assert set(results.values()) == {"passed", "info"}, results


def test_a_row_ahead_of_the_clock_by_less_than_a_day_is_a_time_zone(tmp_path):
    def change(hours):
        def last(micros):
            micros[-1] = NOW + hours * 3_600_000_000
            return micros

        found = tables()
        moved("CCC", last)(found)
        return found

    for hours, counted in ((23, {}), (25, {"timestamp": {"future_time": 1}})):
        (tmp_path / str(hours)).mkdir()
        assert staged(change(hours), tmp_path / str(hours), IngestConfig()).left_values == counted
    assert datetime.fromtimestamp(NOW / 1e6, UTC).year > 2020


@pytest.mark.parametrize(("rules", "message"), [({"nul": "warn"}, "no rule 'nul'"), ({"null": "warn"}, "not warn")])
def test_an_unknown_rule_or_policy_stops_before_any_file_is_read(rules, message):
    with pytest.raises(ValidationError, match=message):
        IngestConfig(rules=rules)


def test_on_bad_rows_sets_aside_and_a_rule_of_its_own_wins():
    config = IngestConfig(on_bad_rows="quarantine", rules={"nan": "refuse"})
    assert {config.policy(r) for r in ("null", "posinf", "exact_duplicate")} == {"quarantine"}
    assert (config.policy("nan"), config.policy("gap"), config.policy("unsorted")) == ("refuse", "warn", "warn")
