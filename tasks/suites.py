"""A project's own Great Expectations suites (JSON, as its contexts store them), run beside RULES: against the rows, or against
the profile where a suite asks so by `"meta": {"forecastle": {"against": "columns"}}` (or `series`, `keys`: its other tables).
What was checked, by which SQL and with which result is kept beside the Data Docs. Uses Great Expectations, pandas, pyarrow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ByteSize, TypeAdapter

from models.features import canonical_json
from tasks.expectations import RULES, DataContractError, DataReport, ValidationEngineError, gx_context

if TYPE_CHECKING:
    from tasks.staging import StagedFiles

PROFILES = ("columns", "series", "keys")
COPIES = 4  # of the rows, in pandas and in Great Expectations, at most at once


class SuiteError(ValueError):
    """A suite that cannot be run: unreadable, an unknown expectation or column, or too many rows for the memory limit."""


def check_suites(staged: StagedFiles, report: DataReport) -> DataReport:
    """The report with a line for every expectation of the suites that `config.suites` names, and evidence beside the Data Docs.

    Raises DataContractError, with the lines so far, when an expectation fails whose severity is critical (Great Expectations'
    default) and the policy is to refuse; SuiteError.
    """
    folder = Path(report.data_docs) if report.data_docs else Path(staged.parts[0]).parent
    suites = [suite for path in staged.config.suites for suite in _read(Path(path))]
    failures: list[str] = []
    table = list(report.table)
    kept: list[dict[str, Any]] = []
    for suite in suites:
        results = _run(suite, staged, report, folder / "suites" / suite["name"])
        kept.append({"suite": suite, "results": results})
        for result in results:
            line, failure = _line(suite["name"], result, staged)
            table.append(line)
            failures += [failure] if failure else []
    _keep_evidence(report, table, kept, folder)
    if failures:
        shown = "\n  ".join(failures[:30])
        raise DataContractError(f"{len(failures)} expectations of your suites failed:\n  {shown}", table)
    return report._replace(table=table)


def _read(path: Path) -> list[dict[str, Any]]:
    """The suite in a file, or all suites of a project folder (its gx/expectations), without the ids that a context gave."""
    if path.is_dir():
        places = [p for p in (path / "gx" / "expectations", path / "expectations", path) if p.is_dir()]
        files = [p for p in sorted(places[0].rglob("*.json")) if not p.name.startswith(".")]
    else:
        files = [path]
    if not files:
        raise SuiteError(f"{path}: no suite (*.json) in {places[0]}")
    suites = []
    for file in files:
        try:
            suite = json.loads(file.read_text())
            checks = [{k: v for k, v in check.items() if k != "id"} for check in suite["expectations"]]
            name = str(suite.get("name") or file.stem)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SuiteError(f"{file}: not a suite of Great Expectations 1.x: {type(error).__name__}: {error}") from error
        suites.append({"name": name.replace("/", "-"), "expectations": checks, "meta": suite.get("meta") or {}})
    return suites


def _against(suite: dict[str, Any]) -> str:
    wanted = (suite["meta"].get("forecastle") or {}).get("against", "rows")
    if wanted not in ("rows", *PROFILES):
        raise SuiteError(f"suite {suite['name']}: against {wanted!r} is none of rows, {', '.join(PROFILES)}")
    return str(wanted)


def _run(suite: dict[str, Any], staged: StagedFiles, report: DataReport, docs: Path) -> list[dict[str, Any]]:
    """The result of every expectation as JSON, and the suite's own Data Docs in `docs`."""
    context = gx_context(docs)
    import great_expectations as gx
    import pandas as pd

    against = _against(suite)
    if against == "rows":
        frame = _rows(suite, staged)
    else:
        tables = {"columns": report.profile.judged, "series": report.profile.series, "keys": [report.profile.keys]}
        frame = pd.DataFrame(tables[against])
    try:
        added = context.suites.add(gx.ExpectationSuite(name=suite["name"], expectations=suite["expectations"]))
    except Exception as error:
        raise SuiteError(f"suite {suite['name']}: {type(error).__name__}: {error}") from error
    if len(added.expectations) != len(suite["expectations"]):
        kinds = {check.get("type") for check in suite["expectations"]} - {e.expectation_type for e in added.expectations}
        raise SuiteError(f"suite {suite['name']}: no such expectation, or not with these arguments: {', '.join(map(str, kinds))}")
    asset = context.data_sources.add_pandas(against).add_dataframe_asset(against)
    batch = asset.add_batch_definition_whole_dataframe("all")
    definition = context.validation_definitions.add(gx.ValidationDefinition(data=batch, suite=added, name=suite["name"]))
    outcome = definition.run(batch_parameters={"dataframe": frame}, result_format="SUMMARY")
    found: list[dict[str, Any]] = outcome.to_json_dict()["results"]
    if len(found) != len(suite["expectations"]):
        raise ValidationEngineError(f"suite {suite['name']}: {len(found)} of {len(suite['expectations'])} expectations evaluated")
    for result in found:
        for message in _raised(result.get("exception_info") or {}):
            raise SuiteError(f"suite {suite['name']}, {_called(result)}: {message}")
    context.build_data_docs()
    return found


def _raised(info: dict[str, Any]) -> Iterator[str]:
    for one in (info, *(value for value in info.values() if isinstance(value, dict))):
        if one.get("raised_exception"):
            yield str(one.get("exception_message"))


def _rows(suite: dict[str, Any], staged: StagedFiles) -> Any:
    """The accepted rows, of the columns that the suite names. Raises SuiteError when they would not fit the memory limit."""
    import pyarrow.dataset as ds

    every = list(staged.contract.columns)
    named: set[str] = set()
    for check in suite["expectations"]:
        kwargs = check.get("kwargs") or {}
        if any(word in str(check.get("type")) for word in ("table_column", "multicolumn", "compound")):
            named |= set(kwargs.get("column_list") or every)
        named |= {kwargs[key] for key in ("column", "column_A", "column_B") if isinstance(kwargs.get(key), str)}
    columns = [name for name in every if name in named] or [staged.contract.entity]
    needed = COPIES * 8 * staged.rows * len(columns)
    if needed > TypeAdapter(ByteSize).validate_python(staged.config.memory_limit):
        raise SuiteError(
            f"suite {suite['name']}: {staged.rows} rows of {len(columns)} columns take about {needed / 2**30:.1f} GiB in pandas, "
            f"more than the memory limit {staged.config.memory_limit}; raise --config.memory-limit, or run the suite against the "
            f"profile"
        )
    return ds.dataset(list(staged.parts)).to_table(columns=columns).to_pandas()


def _called(result: dict[str, Any]) -> str:
    config = result["expectation_config"]
    kwargs = {k: v for k, v in config["kwargs"].items() if k != "batch_id" and v is not None}
    return f"{config['type']}({', '.join(f'{k}={v!r}' for k, v in kwargs.items())})"


def _line(suite: str, result: dict[str, Any], staged: StagedFiles) -> tuple[dict[str, Any], str | None]:
    """The table's line for one expectation, and how its failure reads when it is to be refused."""
    config, numbers = result["expectation_config"], result.get("result") or {}
    policy = staged.config.policy("suite")
    if (config.get("severity") or "critical") != "critical":
        policy = "warn"
    wrong = numbers.get("unexpected_count")
    outcome = "passed" if result["success"] else "warning" if policy == "warn" else "FAILED"
    kwargs = config["kwargs"]
    column = kwargs.get("column") or ", ".join(str(kwargs[k]) for k in ("column_A", "column_B", "column_list") if kwargs.get(k))
    line = {"rule": f"{suite}: {config['type']}", "policy": policy, "result": outcome, "columns": column, "rows": wrong or 0}
    if outcome != "FAILED":
        return line, None
    some = numbers.get("partial_unexpected_list") or []
    told = f"{wrong} of {numbers.get('element_count')} values" if wrong is not None else f"found {numbers.get('observed_value')}"
    return line, f"{suite}, {_called(result)}: {told}" + (f", such as {some[:3]}" if some else "")


def _keep_evidence(report: DataReport, table: list[dict[str, Any]], suites: list[dict[str, Any]], folder: Path) -> None:
    """checks.json beside the Data Docs: the rules, the SQL and the profile they looked at, every suite with its results."""
    stock = [
        {"rule": r.name, "type": "expect_column_values_to_be_between", "kwargs": r.arguments, "table": r.table} for r in RULES
    ]
    looked = report.profile
    value = {
        "rules": stock, "sql": looked.sql, "profile": {"columns": looked.columns, "series": looked.series, "keys": looked.keys},
        "suites": suites, "results": table,
    }  # fmt: skip
    (folder / "checks.json").write_text(canonical_json(value))
