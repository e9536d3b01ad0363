"""What all staged rows say together: duplicate keys and changing statics found, rows sorted by series and time, in parts. Uses
DuckDB for keys and pyarrow for rows, in bounded memory; whether a number is finite is not asked here."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from models.config import IngestConfig
from models.features import FeatureContract
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
    """The staged rows in order, in parts; how many. `written` is told the rows so far.

    DuckDB sorts keys alone: whole rows of 229 columns it sorts in many times the memory and time, or not at all. Rows go as
    records of one size to their places in a file, which is then read in order.
    """
    contract, path = staging.contract, staging.folder / "ordered-rows"
    places, names, counts = _order(connection, staging)
    rows = int(counts.sum())
    kinds = _kinds(contract)
    width = -(-len(contract.columns) // 8)
    record = np.dtype([*((kind, kind, (len(columns),)) for kind, columns in kinds.items()), ("null", "u1", (width,))])
    with open(path, "w+b") as file:
        done = start = 0
        for raw, source in zip(staging.raw, staging.names, strict=True):
            with pq.ParquetFile(raw) as opened:
                for batch in opened.iter_batches(BATCH_ROWS):
                    place = places[start + batch[ROW].to_numpy()]
                    _put(file, _records(batch, contract, record, kinds), place)
                    done += batch.num_rows
                    written(min(done, rows) // 2)
            start += staging.rows[source]
        file.seek(0)
        parts: list[Path] = []
        owner = np.repeat(np.arange(len(names), dtype=np.int32), counts)
        with contextlib.ExitStack() as stack:
            for number, at in enumerate(range(0, rows, BLOCK_ROWS)):
                if number % PART_BLOCKS == 0:
                    stack.pop_all().close()
                    parts.append(staging.folder / f"part-{len(parts):05d}.parquet")
                    writer = stack.enter_context(part_writer(parts[-1], staged_schema(contract), contract))
                entities = names.take(pa.array(owner[at : at + BLOCK_ROWS]))
                writer.write_table(_table(file, entities, contract, record, kinds))
                written((rows + at + len(entities)) // 2)
    path.unlink()
    return parts, rows


def _order(connection: duckdb.DuckDBPyConnection, staging: Staging) -> tuple[NDArray[np.int64], pa.Array, NDArray[np.int64]]:
    """Place in the order by series and time of every row read, file after file, -1 for rows set aside; names and rows of the
    series in order."""
    entity, moment = _quote(staging.contract.entity), _quote(staging.contract.timestamp)
    left = f"{_scan(staging.raw)} ANTI JOIN aside USING ({FILE}, {ROW})"
    if not connection.sql("SELECT count(*) FROM aside").fetchall()[0][0]:
        left = _scan(staging.raw)
    starts = np.cumsum([0, *(staging.rows[name] for name in staging.names)])
    places = np.full(starts[-1], -1, np.int64)
    number = f"regexp_extract({FILE}, '(\\d+).parquet$', 1)::INTEGER AS number"  # a path by row would take more than a key
    at = 0
    for batch in connection.sql(f"SELECT {number}, {ROW} FROM {left} ORDER BY {entity}, {moment}").to_arrow_reader(BLOCK_ROWS):
        places[starts[batch["number"].to_numpy()] + batch[ROW].to_numpy()] = np.arange(at, at + batch.num_rows)
        at += batch.num_rows
    series = connection.sql(f"SELECT {entity}, count(*) FROM {left} GROUP BY 1 ORDER BY 1").fetchall()
    return places, pa.array([name for name, _ in series], pa.string()), np.array([count for _, count in series], np.int64)


def _kinds(contract: FeatureContract) -> dict[str, list[str]]:
    """Columns of numbers by their type in a record."""
    kinds: dict[str, list[str]] = {"<i8": [contract.timestamp], "<f8": [], "<f4": []}
    for field in staged_schema(contract):
        if pa.types.is_floating(field.type):
            kinds["<f8" if field.type == pa.float64() else "<f4"].append(field.name)
    return kinds


def _records(
    batch: pa.RecordBatch, contract: FeatureContract, record: np.dtype[Any], kinds: dict[str, list[str]]
) -> NDArray[np.void]:
    """The numbers of some rows, a record each; a bit by column tells where there is none."""
    out = np.zeros(batch.num_rows, record)
    null = np.zeros((batch.num_rows, len(contract.columns)), bool)
    for kind, names in kinds.items():
        for i, name in enumerate(names):
            column = batch[name].cast("int64") if kind == "<i8" else batch[name]
            if column.null_count:
                null[:, contract.columns.index(name)] = column.is_null().to_numpy(zero_copy_only=False)
                column = column.fill_null(0)
            out[kind][:, i] = column.to_numpy()
    if null.any():
        out["null"] = np.packbits(null, axis=1)
    return out


def _put(file: BinaryIO, records: NDArray[np.void], places: NDArray[np.int64]) -> None:
    """Write records at their places, neighbours at once; those without a place are left out."""
    order = np.argsort(places, kind="stable")
    order = order[np.searchsorted(places[order], 0) :]
    records, places = records[order], places[order]
    bounds = np.flatnonzero(np.diff(places, prepend=-2, append=-2) != 1)
    for a, b in itertools.pairwise(bounds.tolist()):
        file.seek(int(places[a]) * records.itemsize)
        file.write(records.data[a:b])


def _table(
    file: BinaryIO, entities: pa.Array, contract: FeatureContract, record: np.dtype[Any], kinds: dict[str, list[str]]
) -> pa.Table:
    """The next records as columns, beside the entities that they belong to."""
    rows = len(entities)
    values = {name: np.empty(rows, kind) for kind, names in kinds.items() for name in names}
    null = np.zeros((rows, len(contract.columns)), bool)
    for at in range(0, rows, BATCH_ROWS):
        found = np.frombuffer(file.read(min(BATCH_ROWS, rows - at) * record.itemsize), record)
        place = slice(at, at + len(found))
        for kind, names in kinds.items():
            for i, name in enumerate(names):
                values[name][place] = found[kind][:, i]
        if found["null"].any():
            null[place] = np.unpackbits(found["null"], axis=1, count=len(contract.columns))
    arrays = [entities]
    for field in staged_schema(contract):
        if field.name != contract.entity:
            missing = null[:, contract.columns.index(field.name)]
            array = pa.array(values.pop(field.name), mask=missing if missing.any() else None)
            arrays.append(array.cast(field.type))
    return pa.Table.from_arrays(arrays, schema=staged_schema(contract))
