"""What all staged rows say together: duplicate keys and changing statics found, rows sorted by series and time, in parts. Uses
DuckDB, in bounded memory; whether a number is finite is not asked here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from models.config import IngestConfig
from tasks.datasets import part_writer
from tasks.rows import BATCH_ROWS, ROW, staged_schema

if TYPE_CHECKING:
    from tasks.staging import Staging

FILE = "__file"
BLOCK_ROWS = 65_536  # of a row group: 57 MiB of 229 columns
PART_BLOCKS = 4  # row groups of a part: a store hands it over whole


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _scan(paths: Sequence[Path]) -> str:
    files = ", ".join("'" + str(p).replace("'", "''") + "'" for p in paths)
    return f"read_parquet([{files}], hive_partitioning = false, filename = '{FILE}')"


def open_duckdb(config: IngestConfig, folder: Path) -> duckdb.DuckDBPyConnection:
    """A connection within the configured memory that spills below `folder`, with the empty table `aside`."""
    connection = duckdb.connect(config={"memory_limit": config.memory_limit, "threads": config.threads})
    connection.execute("SET enable_progress_bar = false")
    connection.execute(f"SET temp_directory = '{str(folder / 'spill').replace(chr(39), chr(39) * 2)}'")
    connection.execute(f"CREATE TEMP TABLE aside ({FILE} VARCHAR, {ROW} BIGINT, reasons VARCHAR)")
    return connection


def find_duplicates(connection: duckdb.DuckDBPyConnection, staging: Staging) -> dict[str, Any]:
    """Counts, keys and files of keys that occur more than once; rows that policies set aside go to the table `aside`.

    Of exact duplicates the first is kept; of a key with different rows none is.
    """
    contract, scan = staging.contract, _scan(staging.raw)
    entity, moment = _quote(contract.entity), _quote(contract.timestamp)
    connection.execute(
        f"CREATE TEMP TABLE twice AS SELECT {entity} e, {moment} t FROM {scan} WHERE {entity} IS NOT NULL AND {moment} IS NOT "
        f"NULL GROUP BY ALL HAVING count(*) > 1"
    )
    count = connection.sql("SELECT count(*) FROM twice").fetchall()[0][0]
    if not count:
        return {
            "duplicates": {"exact": 0, "conflicting": 0}, "duplicate_keys": (), "duplicate_key_count": 0, "duplicate_files": (),
        }  # fmt: skip
    # Equal values, NaN and null included, have equal hashes; so would 0 and -0, which are other rows
    numbers = [_quote(n) for n in contract.columns if n not in (contract.entity, contract.timestamp)]
    values = ", ".join(f"{n}, {n} = 0 AND signbit({n})" for n in numbers)
    connection.execute(
        f"CREATE TEMP TABLE marked AS SELECT {FILE}, {ROW}, e, t, min(h) OVER same <> max(h) OVER same AS conflict, "
        f"row_number() OVER (same ORDER BY {FILE}, {ROW}) > 1 AS later FROM (SELECT r.{FILE}, r.{ROW}, k.e, k.t, "
        f"hash({values}) AS h FROM {scan} r JOIN twice k ON r.{entity} = k.e AND r.{moment} = k.t) "
        f"WINDOW same AS (PARTITION BY e, t)"
    )
    exact, conflicting = connection.sql(
        "SELECT count(*) FILTER (later AND NOT conflict), count(*) FILTER (conflict) FROM marked"
    ).fetchall()[0]
    files = connection.sql(f"SELECT DISTINCT {FILE} FROM marked WHERE later OR conflict ORDER BY 1").fetchall()
    keys = connection.sql(
        "SELECT e, strftime(t AT TIME ZONE 'UTC', '%Y-%m-%dT%H:%M:%SZ') FROM twice ORDER BY e, t LIMIT 100"
    ).fetchall()
    for rule, where, reason in (
        ("exact_duplicate", "later AND NOT conflict", "exact duplicate"),
        ("conflicting_key", "conflict", "key with different rows"),
    ):
        if staging.config.policy(rule) == "quarantine":
            connection.execute(f"INSERT INTO aside SELECT {FILE}, {ROW}, '{reason}' FROM marked WHERE {where}")
    by_raw = dict(zip(map(str, staging.raw), staging.names, strict=True))
    return {
        "duplicates": {"exact": exact, "conflicting": conflicting}, "duplicate_keys": tuple(f"{e} {t}" for e, t in keys),
        "duplicate_key_count": count, "duplicate_files": tuple(by_raw[f] for (f,) in files),
    }  # fmt: skip


def find_static_changes(connection: duckdb.DuckDBPyConnection, staging: Staging) -> int:
    """Rows whose static values are not those of their series' first row, set aside where the policy says so."""
    static = [_quote(name) for name in staging.contract.groups()["static"]]
    if not static or staging.config.policy("static_change") != "quarantine":
        return 0
    entity, moment = _quote(staging.contract.entity), _quote(staging.contract.timestamp)
    first = f"OVER (PARTITION BY {entity} ORDER BY {moment}, {FILE}, {ROW})"
    changes = " OR ".join(f"{n} IS DISTINCT FROM first_value({n}) {first}" for n in static)
    connection.execute(
        f"INSERT INTO aside SELECT {FILE}, {ROW}, 'static value changes' FROM {_scan(staging.raw)} "
        f"ANTI JOIN aside USING ({FILE}, {ROW}) QUALIFY {changes}"
    )
    return connection.sql("SELECT count(*) FROM aside WHERE reasons = 'static value changes'").fetchall()[0][0]


def write_quarantine(connection: duckdb.DuckDBPyConnection, staging: Staging) -> Path:
    """quarantine.parquet: rows set aside, with source file, row number (from 0) and the reasons."""
    path = staging.folder / "quarantine.parquet"
    names = staging.contract.columns
    schema = staged_schema(staging.contract)
    for name, kind in (("source_file", pa.string()), ("source_row", pa.int64()), ("reasons", pa.string())):
        schema = schema.append(pa.field(name, kind))

    def table(batch: pa.RecordBatch, files: pa.Array) -> pa.Table:
        return pa.Table.from_arrays([*(batch[n] for n in names), files, batch[ROW], batch["reasons"]], schema=schema)

    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for name, part in staging.set_aside:
            with pq.ParquetFile(part) as file:
                for batch in file.iter_batches(BATCH_ROWS):
                    writer.write_table(table(batch, pa.array([name] * batch.num_rows, pa.string())))
        rows = connection.sql(
            f"SELECT r.*, a.reasons FROM {_scan(staging.raw)} r JOIN aside a ON r.{FILE} = a.{FILE} AND r.{ROW} = a.{ROW} "
            f"ORDER BY r.{FILE}, r.{ROW}"
        ).to_arrow_reader(BATCH_ROWS)
        by_raw = dict(zip(map(str, staging.raw), staging.names, strict=True))
        for batch in rows:
            batch = pa.Table.from_batches([batch]).combine_chunks()
            batch = batch.set_column(
                batch.schema.get_field_index(staging.contract.timestamp), staging.contract.timestamp,
                batch[staging.contract.timestamp].cast(schema.field(staging.contract.timestamp).type),
            )  # fmt: skip
            writer.write_table(table(batch, pa.array([by_raw[f] for f in batch[FILE].to_pylist()], pa.string())))
    return path


def write_sorted(
    connection: duckdb.DuckDBPyConnection, staging: Staging, written: Callable[[int], None]
) -> tuple[list[Path], int]:
    """The staged rows in order, in parts; how many. `written` is told the rows so far."""
    contract = staging.contract
    schema = staged_schema(contract)
    columns = ", ".join(_quote(name) for name in contract.columns)
    query = (
        f"SELECT {columns} FROM {_scan(staging.raw)} ANTI JOIN aside USING ({FILE}, {ROW}) "
        f"ORDER BY {_quote(contract.entity)}, {_quote(contract.timestamp)}"
    )
    if not connection.sql("SELECT count(*) FROM aside").fetchall()[0][0]:
        query = query.replace(f"ANTI JOIN aside USING ({FILE}, {ROW}) ", "")
    parts: list[Path] = []
    rows = 0
    with contextlib.ExitStack() as stack:
        for number, block in enumerate(_blocks(connection.sql(query).to_arrow_reader(BLOCK_ROWS))):
            if number % PART_BLOCKS == 0:
                stack.pop_all().close()
                parts.append(staging.folder / f"part-{len(parts):05d}.parquet")
                writer = stack.enter_context(part_writer(parts[-1], schema, contract))
            writer.write_table(block.cast(schema))
            rows += block.num_rows
            written(rows)
    return parts, rows


def _blocks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """All rows, BLOCK_ROWS at a time whatever the batches: the same rows are then the same bytes."""
    held: list[pa.RecordBatch] = []
    room = BLOCK_ROWS
    for batch in batches:
        while batch.num_rows >= room:
            yield pa.Table.from_batches([*held, batch.slice(0, room)]).combine_chunks()
            batch, held, room = batch.slice(room), [], BLOCK_ROWS
        if batch.num_rows:
            held.append(batch)
            room -= batch.num_rows
    if held:
        yield pa.Table.from_batches(held).combine_chunks()
