"""Rules about values, as a Great Expectations suite over a DuckDB profile. What a column must be called and which type
it has is settled before, in tasks/parquet.py. Great Expectations, DuckDB and pyarrow load when a source is validated.

Great Expectations checks aggregates here, computed by DuckDB and NumPy, not rows; tests hold the profile against NumPy."""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tasks.parquet import StagedFiles

FLOAT32_MAX = 3.4028234663852886e38


class DataContractError(ValueError):
    """Data that do not keep the contract; the message names file, column, counts and the way out.

    `table` is what every rule found, when the rules were reached.
    """

    def __init__(self, message: str, table: list[dict[str, Any]] | None = None) -> None:
        super().__init__(message)
        self.table = table or []


class ValidationEngineError(RuntimeError):
    """The checks themselves broke: nothing is known about the data."""


class DataReport(NamedTuple):
    """What every rule found (one dict per rule: rule, result, columns, rows) and the folder of the Data Docs."""

    table: list[dict[str, Any]]
    data_docs: str | None


class Rule(NamedTuple):
    """One rule: an expectation over the profile, and how its failure reads."""

    name: str
    expectation: str
    arguments: dict[str, Any]
    columns_of: str  # "columns" or "keys": which profile table it reads
    only_warns: bool = False


RULES: tuple[Rule, ...] = (
    Rule("every column has rows", "ExpectColumnValuesToBeBetween", {"column": "rows", "min_value": 1}, "columns"),
    Rule("no nulls", "ExpectColumnValuesToBeBetween", {"column": "nulls", "max_value": 0}, "columns"),
    Rule("no NaN", "ExpectColumnValuesToBeBetween", {"column": "nan", "max_value": 0}, "columns"),
    Rule("no +inf", "ExpectColumnValuesToBeBetween", {"column": "posinf", "max_value": 0}, "columns"),
    Rule("no -inf", "ExpectColumnValuesToBeBetween", {"column": "neginf", "max_value": 0}, "columns"),
    Rule("fits float32", "ExpectColumnValuesToBeBetween", {"column": "overflow", "max_value": 0}, "columns"),
    # A sensor's level may be negative, and the TFT can forecast it; the DQN refuses to trade such a series
    Rule("price above zero", "ExpectColumnValuesToBeBetween", {"column": "not_positive", "max_value": 0}, "columns", True),
    Rule("static constant per series", "ExpectColumnValuesToBeBetween", {"column": "changing", "max_value": 0}, "columns"),
    Rule("no exact duplicates", "ExpectColumnValuesToBeBetween", {"column": "exact_duplicates", "max_value": 0}, "keys"),
    Rule("one row per key", "ExpectColumnValuesToBeBetween", {"column": "conflicting", "max_value": 0}, "keys"),
    Rule("rising time per series", "ExpectColumnValuesToBeBetween", {"column": "disorder", "max_value": 0}, "keys"),
)
"""The gate. `rows` of a column counts accepted rows; bad rows set aside by quarantine are counted on their own line."""


def profile(staged: StagedFiles) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One dict per column (rows, nulls, nan, posinf, neginf, overflow, min, max, not_positive, changing) and one for
    the keys. DuckDB aggregates in one pass over the staged parts; non-finite values were counted by NumPy while
    staging, and both must agree. Parts that quarantine has cleaned must hold none."""
    import duckdb
    import pyarrow.dataset as ds

    contract = staged.contract
    numeric = [n for n in contract.columns if n not in (contract.entity, contract.timestamp)]
    static = set(contract.groups()["static"])
    connection = duckdb.connect(config={"memory_limit": staged.memory_limit, "threads": staged.threads})
    try:
        connection.execute("SET enable_progress_bar = false")
        # Read through Arrow: DuckDB's own Parquet reader trusts statistics that leave NaN out
        connection.register("staged", ds.dataset(list(staged.parts)))
        quoted = {name: '"' + name.replace('"', '""') + '"' for name in contract.columns}
        entity, time = quoted[contract.entity], quoted[contract.timestamp]
        wanted = ["count(*)", f"count({entity})", f"count({time})"]
        for name in numeric:
            q = quoted[name]
            finite = f"CASE WHEN isfinite({q}) THEN {q} END"
            wanted += [f"count({q})", f"count({finite})", f"min({finite})", f"max({finite})"]
        values = connection.sql(f"SELECT {', '.join(wanted)} FROM staged").fetchall()[0]
        changing = dict.fromkeys(static, 0)
        if static:
            per_series = ", ".join(f"count(DISTINCT {quoted[n]}) > 1" for n in sorted(static))
            rows = connection.sql(f"SELECT {per_series} FROM staged GROUP BY {entity}").fetchall()
            changing = {name: sum(bool(row[i]) for row in rows) for i, name in enumerate(sorted(static))}
        price = quoted[contract.price]
        not_positive = connection.sql(f"SELECT coalesce(sum(CAST({price} <= 0 AS INT)), 0) FROM staged").fetchall()[0][0]
    finally:
        connection.close()
    disorder = _disorder(staged)
    total = values[0]
    bad = {c: {k: sum(f.values()) for k, f in kinds.items()} for c, kinds in staged.bad_values.items()}
    present_of = {contract.entity: values[1], contract.timestamp: values[2]}
    table = []
    for at, name in enumerate((contract.entity, contract.timestamp, *numeric)):
        counts = {kind: bad.get(name, {}).get(kind, 0) for kind in ("null", "nan", "posinf", "neginf", "overflow")}
        row: dict[str, Any] = {
            "feature": name, "rows": total, "nulls": counts["null"], "nan": counts["nan"], "posinf": counts["posinf"],
            "neginf": counts["neginf"], "overflow": counts["overflow"], "min": 0.0, "max": 0.0,
            "not_positive": int(not_positive) if name == contract.price else 0, "changing": changing.get(name, 0),
        }  # fmt: skip
        if at >= 2:
            present, finite_count, low, high = values[3 + 4 * (at - 2) : 7 + 4 * (at - 2)]
            row |= {"min": float(low) if low is not None else 0.0, "max": float(high) if high is not None else 0.0}
            present_of[name] = present
            counted = 0 if staged.quarantined_rows else sum(counts.values()) - counts["null"]
            if present - finite_count != counted:
                raise ValidationEngineError(
                    f"column '{name}': DuckDB sees {present - finite_count} non-finite values, NumPy {counted}"
                )
        nulls = 0 if staged.quarantined_rows else counts["null"]
        if not staged.future_rows and total - present_of[name] != nulls:
            raise ValidationEngineError(f"column '{name}': DuckDB sees {total - present_of[name]} nulls, NumPy {nulls}")
        table.append(row)
    keys = {
        "exact_duplicates": staged.duplicates["exact"], "conflicting": staged.duplicates["conflicting"],
        "disorder": disorder, "rows": total, "series": 0,
    }  # fmt: skip
    return table, keys


def _disorder(staged: StagedFiles) -> int:
    """Rows that stand after a later row of the same series, or after a series of a later name, in stored order."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    found, last = 0, None
    for part in staged.parts:
        with pq.ParquetFile(part) as file:
            for batch in file.iter_batches(columns=[staged.contract.entity, staged.contract.timestamp]):
                rows = pa.Table.from_batches([batch])
                both = pa.concat_tables([last, rows]) if last else rows
                last = rows.slice(rows.num_rows - 1)
                entity, time = (both[n].combine_chunks() for n in (staged.contract.entity, staged.contract.timestamp))
                same, back = pc.equal(entity[1:], entity[:-1]), pc.less(entity[1:], entity[:-1])
                wrong = pc.or_kleene(back, pc.and_kleene(same, pc.less(time[1:], time[:-1])))
                found += pc.sum(wrong).as_py() or 0
    return found


def validate_features(staged: StagedFiles) -> DataReport:
    """Run the gate. Raises DataContractError naming columns, files and counts when a rule fails, and
    ValidationEngineError when the engine broke (which is never the data's fault).

    Rows set aside by quarantine no longer count against a rule; they stand in its line of the table.
    """
    table, keys = profile(staged)
    if staged.quarantined_rows:
        kinds = {"nulls", "nan", "posinf", "neginf", "overflow"}
        judged = [{k: (0 if k in kinds else v) for k, v in row.items()} for row in table]
        judged_keys = {**keys, "exact_duplicates": 0, "conflicting": 0}
    else:
        judged, judged_keys = table, keys
    results, docs = _run_suite(judged, judged_keys, Path(staged.parts[0]).parent)
    lines: list[dict[str, Any]] = []
    failures: list[str] = []
    for rule, (passed, columns) in zip(RULES, results, strict=True):
        measure = rule.arguments["column"]
        source = table if rule.columns_of == "columns" else [keys]
        count = sum(int(row[measure]) for row in source) if measure != "rows" else keys["rows"]
        lines.append(
            {
                "rule": rule.name,
                "result": "passed" if passed else "warning" if rule.only_warns else "FAILED",
                "columns": ", ".join(columns[:20]),
                "rows": count,
            }
        )
        if not passed and not rule.only_warns:
            failures += _explain(rule, columns, {row["feature"]: row for row in table}, keys, staged)
    lines.append({"rule": "quarantined", "result": "info", "columns": "", "rows": staged.quarantined_rows})
    if failures:
        shown = "\n  ".join(failures[:30])
        more = f"\n  and {len(failures) - 30} more" if len(failures) > 30 else ""
        raise DataContractError(
            f"{len(failures)} checks failed over {staged.read_rows} rows in {len(staged.sources)} files:\n  {shown}{more}\n"
            f"mend the source, or set bad rows aside with --config.on-bad-rows quarantine",
            lines,
        )
    return DataReport(lines, docs)


def _explain(
    rule: Rule, columns: list[str], rows: dict[str, dict[str, Any]], keys: dict[str, Any], staged: StagedFiles
) -> list[str]:
    measure = rule.arguments["column"]
    if rule.columns_of == "keys":
        named = ", ".join(staged.duplicate_keys[:5])
        files = ", ".join(Path(p).name for p in list(staged.sources)[:5])
        return [f"{rule.name}: {keys[measure]} rows, {len(staged.duplicate_keys)} keys ({named}) in {files}"]
    out = []
    for column in columns:
        kind = {"nulls": "null"}.get(measure, measure)
        files_of = staged.bad_values.get(column, {}).get(kind, {})
        where = "; ".join(f"{path}: {count}" for path, count in files_of.items())
        unit = "series" if measure == "changing" else "rows"
        where = where or ", ".join(list(staged.sources)[:3])
        out.append(f"{rule.name}: column '{column}' has {rows[column][measure]} {unit} ({where})")
    return out


def _run_suite(table: list[dict[str, Any]], keys: dict[str, Any], folder: Path) -> tuple[list[tuple[bool, list[str]]], str]:
    """Run RULES by Great Expectations: per rule whether it passed and which columns failed; the Data Docs, in `folder`,
    go when the staged rows go."""
    import os

    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx
    import pandas as pd

    gxe: Any = import_module("great_expectations.expectations")

    root = Path(tempfile.mkdtemp(prefix="data-docs-", dir=folder))
    context = gx.get_context(mode="file", project_root_dir=root)
    bars: Any = {"globally": False}
    context.variables.progress_bars = bars
    source = context.data_sources.add_pandas("profile")
    frames = {"columns": pd.DataFrame(table), "keys": pd.DataFrame([{**keys, "feature": "keys"}])}
    results: list[tuple[bool, list[str]]] = [(False, [])] * len(RULES)
    definitions = []
    for name in frames:
        suite = context.suites.add(gx.ExpectationSuite(name=name))
        for column in frames[name].columns:  # a NaN in the profile would pass every range check
            suite.add_expectation(gxe.ExpectColumnValuesToNotBeNull(column=column))
        for rule in RULES:
            if rule.columns_of == name:
                suite.add_expectation(getattr(gxe, rule.expectation)(**rule.arguments, meta={"rule": rule.name}))
        batch = source.add_dataframe_asset(name).add_batch_definition_whole_dataframe("all")
        definition = gx.ValidationDefinition(data=batch, suite=suite, name=name)
        definitions.append((name, context.validation_definitions.add(definition)))
    form = {"result_format": "COMPLETE", "unexpected_index_column_names": ["feature"]}
    for name, definition in definitions:
        outcome = definition.run(batch_parameters={"dataframe": frames[name]}, result_format=form)
        expected = len(frames[name].columns) + sum(rule.columns_of == name for rule in RULES)
        if len(outcome.results) != expected:
            raise ValidationEngineError(f"{len(outcome.results)} of {expected} expectations were evaluated")
        results_of: Any = outcome.results
        for result in results_of:
            info = result.exception_info or {}
            raised = info.get("raised_exception") or any(isinstance(v, dict) and v.get("raised_exception") for v in info.values())
            if raised or result.success is None:
                raise ValidationEngineError(f"{result.expectation_config.type}: {info}")
            rule_name = (result.expectation_config.meta or {}).get("rule")
            if rule_name is None:
                if not result.success:
                    raise ValidationEngineError(f"the profile has gaps: {result.expectation_config.kwargs}")
                continue
            at = next(i for i, rule in enumerate(RULES) if rule.name == rule_name)
            failing = [item["feature"] for item in result.result.get("unexpected_index_list") or ()]
            results[at] = (bool(result.success), failing)
    context.build_data_docs()
    site = root / "gx" / "uncommitted" / "data_docs" / "local_site"
    return results, str(site if site.exists() else root)
