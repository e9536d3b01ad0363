"""A project's own suites: run against rows or profile as they ask, refused or warned about, and kept with what they found."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from test_data import CONTRACT, SERIES, SMALL, market_tables, spoilt, write

from flows.__main__ import _exit_code, _expand, app
from models.config import IngestConfig
from tasks.datasets import write_dataset
from tasks.expectations import RULES, DataContractError, validate_features
from tasks.staging import stage_parquet
from tasks.storage import LocalStore
from tasks.suites import SuiteError, check_suites


def check(kind, severity="critical", **kwargs):
    return {"type": kind, "kwargs": kwargs, "severity": severity, "id": "7f0c0d0e-0000-4000-8000-000000000000"}


def suite(folder, *checks, against=None, name="mine"):
    place = folder / "project" / "gx" / "expectations"
    place.mkdir(parents=True, exist_ok=True)
    meta = {"great_expectations_version": "1.24.1", **({"forecastle": {"against": against}} if against else {})}
    (place / f"{name}.json").write_text(json.dumps({"name": name, "expectations": list(checks), "meta": meta, "id": "x"}))
    return str(folder / "project")


BETWEEN = "expect_column_values_to_be_between"


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    """A source whose hist_004 holds one 50, staged and through the gate."""
    folder = tmp_path_factory.mktemp("validated")
    tables = market_tables(SERIES, **SMALL)
    tables["AAA"] = spoilt(tables["AAA"], "hist_004", {3: 50.0})
    staged = stage_parquet(str(write(folder / "s", *tables.values())), CONTRACT, IngestConfig(), folder / "staged")
    return staged, validate_features(staged)


def run(validated, source, **config):
    staged, report = validated
    return check_suites(staged.model_copy(update={"config": IngestConfig(suites=(source,), **config)}), report)


def test_rows_are_checked_and_a_bad_value_is_refused_with_column_count_and_value(validated, tmp_path):
    good = check(BETWEEN, column="hist_005", min_value=-10, max_value=10)
    bad = check(BETWEEN, column="hist_004", min_value=-10, max_value=10)
    report = run(validated, suite(tmp_path, good))
    assert report.table[-1]["rule"] == f"mine: {BETWEEN}"
    assert report.table[-1]["result"] == "passed"
    assert report.table[:-1] == validated[1].table
    with pytest.raises(DataContractError, match=r"hist_004.*1 of 70 values, such as \[50") as refused:
        run(validated, suite(tmp_path, good, bad))
    assert refused.value.table[-1] == {
        "rule": f"mine: {BETWEEN}", "policy": "refuse", "result": "FAILED", "columns": "hist_004", "rows": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("severity", "config"), [("warning", {}), ("critical", {"rules": {"suite": "warn"}})])
def test_severity_or_policy_makes_it_a_warning(severity, config, validated, tmp_path):
    bad = check(BETWEEN, severity, column="hist_004", min_value=-10, max_value=10)
    assert run(validated, suite(tmp_path, bad), **config).table[-1]["result"] == "warning"


def test_a_suite_may_look_at_the_profile_instead(validated, tmp_path):
    profile = check(BETWEEN, column="max", min_value=-1000, max_value=20)
    series = check(BETWEEN, column="interval_s", min_value=86_400, max_value=86_400)
    suite(tmp_path, series, against="series", name="bars")
    with pytest.raises(DataContractError, match="profile") as refused:
        run(validated, suite(tmp_path, profile, against="columns", name="profile"))
    last = {line["rule"].partition(":")[0]: line for line in refused.value.table[-2:]}
    assert last["bars"]["result"] == "passed"
    assert last["profile"]["rows"] >= 1


def test_only_the_named_columns_are_read_and_too_many_rows_are_said(validated, tmp_path):
    small = suite(tmp_path, check(BETWEEN, column="hist_005", min_value=-10, max_value=10))
    assert run(validated, small, memory_limit="0.01MB").table[-1]["result"] == "passed"
    wide = suite(tmp_path, check("expect_table_column_count_to_equal", value=30))
    with pytest.raises(SuiteError, match=r"70 rows of 31 columns.*--config.memory-limit"):
        run(validated, wide, memory_limit="0.01MB")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not a suite"),
        ('{"name": "x"}', "not a suite"),
        (json.dumps({"name": "x", "expectations": [{"type": "expect_magic", "kwargs": {}}]}), "suite x"),
        (json.dumps({"name": "x", "expectations": [check(BETWEEN, column="nothing", min_value=0)]}), "nothing"),
        (json.dumps({"name": "x", "expectations": [], "meta": {"forecastle": {"against": "moon"}}}), "moon"),
    ],
)
def test_a_suite_that_cannot_be_run_is_an_error_of_the_configuration(text, why, validated, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(SuiteError, match=why):
        run(validated, str(tmp_path / "x.json"))
    with pytest.raises(SuiteError, match="no suite"):
        run(validated, str(Path(tmp_path, "empty").mkdir() or tmp_path / "empty"))


def test_the_command_line_names_suites_and_exits_2_for_one_that_cannot_be_run():
    config = app.parse_args(_expand(["ingest", "x", "--config.suites", "a.json", "--config.suites", "b"]))[1].arguments["config"]
    assert config.suites == ("a.json", "b")
    assert _exit_code(SuiteError("x")) == 2


def test_suites_sql_results_and_docs_are_kept_with_the_dataset(validated, tmp_path):
    staged, _ = validated
    report = run(validated, suite(tmp_path, check(BETWEEN, column="hist_005", min_value=-10, max_value=10)))
    store = LocalStore(tmp_path / "store")
    dataset, _ = write_dataset(staged, report, store)
    (record,) = [key for key in store.list("ingests/") if key.count("/") == 1]
    place = f"{record.removesuffix('.json')}/docs"
    assert json.loads(store.get(record))["dataset"] == dataset.fingerprint
    keys = set(store.list(place))
    assert {f"{place}/index.html", f"{place}/suites/mine/index.html", f"{place}/checks.json"} <= keys
    kept = json.loads(store.get(f"{place}/checks.json"))
    assert [rule["rule"] for rule in kept["rules"]] == [rule.name for rule in RULES]
    assert kept["sql"][0].startswith("SELECT count(*)")
    assert kept["suites"][0]["suite"]["name"] == "mine"
    assert kept["suites"][0]["results"][0]["success"] is True
    assert kept["results"] == report.table
    assert np.isfinite([row["max"] for row in kept["profile"]["columns"]]).all()
    assert pa.array([row["rows"] for row in kept["profile"]["columns"]]).to_pylist()[0] == 70
