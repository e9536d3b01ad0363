"""Rules about values, as a Great Expectations suite over a DuckDB profile. What a column must be called and which type
it has is settled before, in tasks/sources.py. Great Expectations, DuckDB and pyarrow load when a source is validated.

Great Expectations checks aggregates here, computed by DuckDB and NumPy, not rows; tests hold the profile against NumPy."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.bars import BarFacts, bar_facts, interval_seconds

if TYPE_CHECKING:
    from tasks.staging import StagedFiles

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
    """What every rule found (one dict per rule: rule, policy, result, columns, rows), the folder of the Data Docs, and what the
    rules looked at."""

    table: list[dict[str, Any]]
    data_docs: str | None
    profile: Profile


class Rule(NamedTuple):
    """One rule: an expectation over the profile, and what its failure is called. `key` names its policy in IngestConfig.rules;
    rules without one refuse."""

    name: str
    column: str  # of the profile table
    table: str = "columns"  # or "series" or "keys"
    key: str | None = None
    least: int | None = None  # otherwise the most is 0

    @property
    def arguments(self) -> dict[str, Any]:
        """Of ExpectColumnValuesToBeBetween."""
        return {"column": self.column, **({"max_value": 0} if self.least is None else {"min_value": self.least})}


RULES: tuple[Rule, ...] = (
    Rule("every column has rows", "rows", least=1),
    Rule("no nulls", "nulls", key="null"),
    Rule("no NaN", "nan", key="nan"),
    Rule("no +inf", "posinf", key="posinf"),
    Rule("no -inf", "neginf", key="neginf"),
    Rule("fits float32", "overflow", key="overflow"),
    # A sensor's level may be negative, and the TFT can forecast it; the DQN refuses to trade such a series
    Rule("price above zero", "not_positive", key="not_positive"),
    Rule("static constant per series", "changing", key="static_change"),
    Rule("no bar ahead of the clock", "future_time", key="future_time"),
    Rule("files in time order", "unsorted", key="unsorted"),
    Rule("no gaps", "missing", "series", key="gap"),
    Rule("bar interval as in the contract", "other_interval", "series", key="bar_interval"),
    Rule("last bar is recent", "stale", "series", key="stale"),
    Rule("no exact duplicates", "exact_duplicates", "keys", key="exact_duplicate"),
    Rule("one row per key", "conflicting", "keys", key="conflicting_key"),
    Rule("rising time per series", "disorder", "keys"),
)
"""The gate. Counts are of all rows read; only rows that no policy has set aside are judged."""
KINDS = {
    "nulls": "null", "nan": "nan", "posinf": "posinf", "neginf": "neginf", "overflow": "overflow",
    "not_positive": "not_positive", "future_time": "future_time", "unsorted": "unsorted",
}  # fmt: skip
"""Columns of the profile that count rows by value, and what staging calls them."""
NOT_NUMBERS = ("nan", "posinf", "neginf", "overflow")


class Profile(NamedTuple):
    """What the suite looks at: one dict per column, one per series, one for the keys, and the SQL that made it.

    `judged` is `columns` without what policies have set aside.
    """

    columns: list[dict[str, Any]]
    judged: list[dict[str, Any]]
    series: list[dict[str, Any]]
    keys: dict[str, Any]
    sql: list[str]


def profile(staged: StagedFiles) -> Profile:
    """Counts, min and max of every column, facts of every series and of the keys. DuckDB aggregates in one pass over the
    staged parts; values that are no numbers were counted by NumPy while staging, and both must agree. Min and max stand in the
    footers that staging has written: only of columns whose sum is no number are they asked for again."""
    import duckdb

    contract = staged.contract
    numeric = [n for n in contract.columns if n not in (contract.entity, contract.timestamp)]
    static = sorted(contract.groups()["static"])
    connection = duckdb.connect(config={"memory_limit": staged.config.memory_limit, "threads": staged.config.threads})
    sql: list[str] = []

    def ask(query: str, columns: list[str]) -> list[tuple[Any, ...]]:
        # Read through Arrow: DuckDB's own Parquet reader trusts statistics that leave NaN out
        connection.register("staged", _reader(staged.parts, columns))
        sql.append(query)
        return connection.sql(query).fetchall()

    try:
        connection.execute("SET enable_progress_bar = false")
        quoted = {name: '"' + name.replace('"', '""') + '"' for name in contract.columns}
        entity, moment = quoted[contract.entity], quoted[contract.timestamp]
        total, *counts = ask(profile_sql(entity, moment, [quoted[n] for n in numeric]), list(contract.columns))[0]
        present = dict(zip((contract.entity, contract.timestamp), counts[:2], strict=True))
        present |= dict(zip(numeric, counts[2::2], strict=True))
        bounds = _footer_bounds(staged.parts, numeric)
        finite = dict(present)
        odd = [n for n, sum_ in zip(numeric, counts[3::2], strict=True) if sum_ is not None and not isfinite(sum_)]
        odd += [n for n in numeric if present[n] and n not in bounds and n not in odd]
        if odd:
            found = ask(finite_sql([quoted[n] for n in odd]), odd)[0]
            finite |= dict(zip(odd, found[::3], strict=True))
            bounds |= {n: (found[3 * i + 1], found[3 * i + 2]) for i, n in enumerate(odd)}
        changing = dict.fromkeys(static, 0)
        if static:
            per_series = ", ".join(f"count(DISTINCT {quoted[n]}) > 1" for n in static)
            rows = ask(f"SELECT {per_series} FROM staged GROUP BY {entity}", [contract.entity, *static])
            changing = {name: sum(bool(row[i]) for row in rows) for i, name in enumerate(static)}
    finally:
        connection.close()
    bad = {c: {k: sum(f.values()) for k, f in kinds.items()} for c, kinds in staged.bad_values.items()}
    table, judged = [], []
    for at, name in enumerate((contract.entity, contract.timestamp, *numeric)):
        row: dict[str, Any] = {"feature": name, "rows": total, **{c: bad.get(name, {}).get(k, 0) for c, k in KINDS.items()}}
        left = {c: staged.left_values.get(name, {}).get(k, 0) for c, k in KINDS.items()}
        row |= {"min": 0.0, "max": 0.0, "changing": changing.get(name, 0)}
        if at >= 2:
            row |= dict(zip(("min", "max"), (float(x or 0) for x in bounds.get(name, (0, 0))), strict=True))
            _agree(name, "non-finite values", present[name] - finite[name], sum(left[k] for k in NOT_NUMBERS), staged)
        if not staged.future_rows:
            _agree(name, "nulls", total - present[name], left["nulls"], staged)
        table.append(row)
        judged.append({**row, **left})
    facts = bar_facts(staged.parts, contract, staged.config.gap_bars)
    keys = {
        "exact_duplicates": staged.duplicates["exact"], "conflicting": staged.duplicates["conflicting"],
        "disorder": facts.disorder, "rows": total,
    }  # fmt: skip
    return Profile(table, judged, _judged_series(facts, staged), keys, sql)


def profile_sql(entity: str, moment: str, numbers: list[str]) -> str:
    """The one query over all columns (names quoted): rows, and count and sum of every number. The sum is finite when all are;
    asking DuckDB for min, max or isfinite costs three times the scan."""
    wanted = ["count(*)", f"count({entity})", f"count({moment})"]
    wanted += [f"count({name}), sum({name})" for name in numbers]
    return f"SELECT {', '.join(wanted)} FROM staged"


def finite_sql(numbers: list[str]) -> str:
    """Count, min and max of the finite values of some columns."""
    finite = [f"CASE WHEN isfinite({name}) THEN {name} END" for name in numbers]
    return f"SELECT {', '.join(f'count({x}), min({x}), max({x})' for x in finite)} FROM staged"


def _reader(parts: Sequence[str], columns: list[str]) -> Any:
    """The columns of all parts, some rows at a time: a data set of Arrow reads far ahead, by memory that grows with the rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def batches() -> Iterator[Any]:
        for part in parts:
            with pq.ParquetFile(part) as file:
                yield from file.iter_batches(16_384, columns=columns)

    schema = pq.read_schema(parts[0])
    return pa.RecordBatchReader.from_batches(pa.schema([schema.field(name) for name in columns]), batches())


def _footer_bounds(parts: Sequence[str], names: list[str]) -> dict[str, tuple[float, float]]:
    """Min and max by column, from the footers of the parts; a column of which any row group says nothing is left out."""
    import pyarrow.parquet as pq

    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    silent: set[str] = set()
    for part in parts:
        with pq.ParquetFile(part) as file:
            places = {name: i for i, name in enumerate(file.schema.names)}
            for group in range(file.num_row_groups):
                said = file.metadata.row_group(group)
                for name in names:
                    numbers = said.column(places[name]).statistics
                    if numbers is not None and numbers.has_min_max:
                        found[name].append((numbers.min, numbers.max))
                    else:
                        silent.add(name)
    return {n: (min(x[0] for x in v), max(x[1] for x in v)) for n, v in found.items() if v and n not in silent}


def _agree(name: str, what: str, sql: int, numpy: int, staged: StagedFiles) -> None:
    """Rows moved for what other rows say may have held some of what NumPy counted; otherwise both counts are equal."""
    if sql > numpy or (sql < numpy and not staged.moved_rows):
        raise ValidationEngineError(f"column '{name}': DuckDB sees {sql} {what}, NumPy {numpy}")


def _judged_series(facts: BarFacts, staged: StagedFiles) -> list[dict[str, Any]]:
    config, wanted = staged.config, staged.contract.bar_interval
    seconds = interval_seconds(wanted) if wanted else None
    limit = None if config.stale_after_days is None else time.time() - config.stale_after_days * 86_400
    rows = []
    for fact in facts.series:
        off = seconds is not None and fact["interval_s"] is not None and abs(fact["interval_s"] / seconds - 1) > 0.01
        rows.append({
            "feature": fact["name"], "interval_s": fact["interval_s"] or 0.0, "missing": fact["missing"],
            "widest": fact["widest"], "other_interval": int(off), "stale": int(limit is not None and fact["last"] / 1e6 < limit),
        })  # fmt: skip
    return rows


def validate_features(staged: StagedFiles) -> DataReport:
    """Run the gate. Raises DataContractError naming columns, files and counts when a rule fails whose policy is to refuse,
    and ValidationEngineError when the engine broke (which is never the data's fault)."""
    found = profile(staged)
    config = staged.config
    keys = dict(found.keys)
    for column, key in (("exact_duplicates", "exact_duplicate"), ("conflicting", "conflicting_key")):
        if config.policy(key) == "quarantine":
            keys[column] = 0
    frames = {"columns": found.judged, "series": found.series, "keys": [{**keys, "feature": "keys"}]}
    results, docs = _run_suite(frames, Path(staged.parts[0]).parent)
    lines: list[dict[str, Any]] = []
    failures: list[str] = []
    for rule, (passed, names) in zip(RULES, results, strict=True):
        policy = config.policy(rule.key) if rule.key else "refuse"
        rows = {"columns": found.columns, "series": found.series, "keys": [found.keys]}[rule.table]
        count = found.keys["rows"] if rule.least is not None else sum(int(row[rule.column]) for row in rows)
        if rule.key == "static_change" and policy == "quarantine":
            count = staged.static_changes
        result = "passed"
        if not passed:
            result = "warning" if policy == "warn" else "FAILED"
            if policy != "warn":
                failures += _explain(rule, names, found, staged)
        elif count and rule.least is None:
            result, names = "set aside", [row["feature"] for row in rows if row.get("feature") and row[rule.column]]
        elif rule.key == "stale" and config.stale_after_days is None:
            result = "not asked"
        lines.append({"rule": rule.name, "policy": policy, "result": result, "columns": ", ".join(names[:20]), "rows": count})
    lines.append({
        "rule": "quarantined", "policy": config.on_bad_rows, "result": "info", "columns": "", "rows": staged.quarantined_rows,
    })  # fmt: skip
    if failures:
        shown = "\n  ".join(failures[:30])
        more = f"\n  and {len(failures) - 30} more" if len(failures) > 30 else ""
        raise DataContractError(
            f"{len(failures)} checks failed over {staged.read_rows} rows in {len(staged.sources)} files:\n  {shown}{more}\n"
            f"mend the source, or set bad rows aside with --config.on-bad-rows quarantine",
            lines,
        )
    return DataReport(lines, docs, found)


def _explain(rule: Rule, names: list[str], found: Profile, staged: StagedFiles) -> list[str]:
    if rule.table == "keys":
        keys, few = staged.duplicate_keys, [Path(p).name for p in (staged.duplicate_files or list(staged.sources))[:5]]
        named = f"{staged.duplicate_key_count} keys ({', '.join(keys[:5])})" if keys else "of the rows in order"
        return [f"{rule.name}: {found.keys[rule.column]} rows, {named} in {', '.join(few)}"]
    if rule.table == "series":
        by_name = {row["feature"]: row for row in found.series}
        return [f"{rule.name}: series {_series_fault(rule, by_name[name], staged)}" for name in names]
    out = []
    by_name = {row["feature"]: row for row in found.columns}
    for column in names:
        files_of = staged.bad_values.get(column, {}).get(KINDS.get(rule.column, ""), {})
        where = "; ".join(f"{path}: {count}" for path, count in files_of.items())
        unit = "series" if rule.column == "changing" else "rows"
        where = where or ", ".join(list(staged.sources)[:3])
        out.append(f"{rule.name}: column '{column}' has {by_name[column][rule.column]} {unit} ({where})")
    return out


def _series_fault(rule: Rule, row: dict[str, Any], staged: StagedFiles) -> str:
    said = {
        "missing": f"{row['missing']} bars missing, widest gap {row['widest']}",
        "other_interval": f"a bar every {row['interval_s']:g} s, the contract says {staged.contract.bar_interval}",
        "stale": f"last bar older than {staged.config.stale_after_days:g} days" if staged.config.stale_after_days else "",
    }
    return f"'{row['feature']}': {said[rule.column]}; in {', '.join(list(staged.sources)[:3])}"


def gx_context(docs: Path) -> Any:
    """A context of Great Expectations that keeps nothing but the Data Docs, in a folder."""
    import os

    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx

    context = gx.get_context(mode="ephemeral")
    context.delete_data_docs_site("local_site")  # it would stand in a temporary folder that nobody removes
    site: Any = {
        "class_name": "SiteBuilder", "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
        "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs)},
    }  # fmt: skip
    context.add_data_docs_site("local_site", site)
    bars: Any = {"globally": False}
    context.variables.progress_bars = bars
    return context


def _run_suite(tables: dict[str, list[dict[str, Any]]], folder: Path) -> tuple[list[tuple[bool, list[str]]], str]:
    """Run RULES by Great Expectations: per rule whether it passed and which columns failed; the Data Docs, in `folder`,
    go when the staged rows go."""
    root = Path(tempfile.mkdtemp(prefix="data-docs-", dir=folder))
    context = gx_context(root)
    import great_expectations as gx
    import pandas as pd

    gxe: Any = import_module("great_expectations.expectations")
    source = context.data_sources.add_pandas("profile")
    # Where every key is null there is no series, and nothing to say of it
    frames = {name: pd.DataFrame(rows) for name, rows in tables.items() if rows}
    results: list[tuple[bool, list[str]]] = [(rule.table not in frames, []) for rule in RULES]
    definitions = []
    for name in frames:
        # A NaN in the profile would pass every range check
        checks = [gxe.ExpectColumnValuesToNotBeNull(column=column) for column in frames[name].columns]
        checks += [gxe.ExpectColumnValuesToBeBetween(**r.arguments, meta={"rule": r.name}) for r in RULES if r.table == name]
        suite = context.suites.add(gx.ExpectationSuite(name=name, expectations=checks))
        batch = source.add_dataframe_asset(name).add_batch_definition_whole_dataframe("all")
        definition = gx.ValidationDefinition(data=batch, suite=suite, name=name)
        definitions.append((name, context.validation_definitions.add(definition)))
    form = {"result_format": "COMPLETE", "unexpected_index_column_names": ["feature"]}
    for name, definition in definitions:
        outcome = definition.run(batch_parameters={"dataframe": frames[name]}, result_format=form)
        expected = len(frames[name].columns) + sum(rule.table == name for rule in RULES)
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
    return results, str(root)
