"""Parquet in and out: which files a source has, what their footers promise, rows in canonical types and order, dataset
files. Rules about values stand in tasks/expectations.py; windows in models/windows.py. Uses pyarrow and DuckDB.

DuckDB orders, groups and joins; whether a number is finite is asked of NumPy (DuckDB misses NaN in some
pyarrow-written files, see docs/data.md)."""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from models.config import IngestConfig
from models.features import ContractError, FeatureContract, canonical_json
from models.manifest import Dataset, StoredFile
from tasks.artifacts import encode
from tasks.expectations import DataContractError, DataReport
from tasks.storage import ArtifactIntegrityError, ObjectMissing, ObjectStore, StoreConflict, digest

BATCH_ROWS = 16_384
PART_ROWS = 250_000  # about 230 MB of 229 columns: a store hands over a part whole
FILE, ROW = "__file", "__row"
KINDS = ("null", "nan", "posinf", "neginf", "overflow")


class StagedFiles(BaseModel):
    """A source in canonical types, sorted by series and time, in Parquet parts on this machine.

    `bad_values` counts by column, then by kind (null, nan, posinf, neginf, overflow), then by source file; in quarantine
    mode those rows are not in the parts. `read_rows` = `rows` + `quarantined_rows`, always.
    """

    model_config = ConfigDict(frozen=True)
    contract: FeatureContract
    parts: tuple[str, ...]
    sources: dict[str, StoredFile]
    read_rows: int
    rows: int
    quarantined_rows: int
    quarantine: str | None
    ignored_columns: tuple[str, ...]
    bad_values: dict[str, dict[str, dict[str, int]]]
    duplicates: dict[str, int]
    duplicate_keys: tuple[str, ...]
    future_rows: int
    memory_limit: str
    threads: int


def list_sources(source: str | Sequence[str]) -> list[Path]:
    """Files of a folder (recursively), a glob, one file or a list, sorted. Entries that start with `_` or `.` are
    skipped. Raises DataContractError when there is none, or a name is not UTF-8."""
    if not isinstance(source, str):
        return sorted({path for item in source for path in list_sources(item)})
    root = Path(source)
    if root.is_dir():
        found = sorted(_walk(root))
    elif root.is_file():
        found = [root]
    else:
        fixed = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), root.parts))
        matches = (Path(p) for p in glob.glob(source, recursive=True))
        # Below the part that the pattern spells out: `**` walks into the _temporary of a dead Spark job
        found = sorted(p for p in matches if p.is_file() and not any(map(_hidden, p.relative_to(fixed).parts)))
    if not found:
        raise DataContractError(f"{source}: no Parquet file there (names starting with '_' or '.' are skipped)")
    return found


def _hidden(name: str) -> bool:
    return name.startswith(("_", "."))


def _walk(folder: Path) -> Iterator[Path]:
    for entry in os.scandir(folder):
        try:
            entry.name.encode()
        except UnicodeEncodeError as error:
            raise DataContractError(f"{folder}: the file name {os.fsencode(entry.name)!r} is not UTF-8: rename it") from error
        if _hidden(entry.name):
            continue
        if entry.is_dir():
            yield from _walk(Path(entry.path))
        elif entry.name.endswith((".parquet", ".pq")):
            yield Path(entry.path)


def stage_parquet(
    source: str | Sequence[str], contract: FeatureContract, config: IngestConfig, folder: Path, future_rows: int = 0
) -> StagedFiles:
    """Read a source into sorted canonical parts in `folder`.

    With `future_rows` > 0 (predict) each series may end with up to that many rows that hold key and future columns
    alone. Raises DataContractError naming file, column, expected, found and the way out.
    """
    paths = list_sources(source)
    sources = {path: digest(path) for path in paths}
    schemas = {path: _footer(path) for path in paths}
    resolved, ignored = _check_columns(schemas, contract)
    if not any(_rows_of(path) for path in paths):
        raise DataContractError(f"{source}: zero rows in {len(paths)} files; an empty source is never a dataset")
    folder.mkdir(parents=True, exist_ok=True)
    bad: dict[str, dict[str, dict[str, int]]] = {}
    raw: list[Path] = []
    quarantine: list[pa.Table] = []
    read = 0
    for index, path in enumerate(paths):
        target = folder / f"raw-{index:05d}.parquet"
        read += _stage_one(path, index, schemas[path], resolved, config, target, bad, quarantine, future_rows)
        raw.append(target)
        if digest(path) != sources[path]:
            raise DataContractError(f"{path}: changed while it was read; write files under another name and rename them")
    connection = duckdb.connect(config={"memory_limit": config.memory_limit, "threads": config.threads})
    try:
        connection.execute("SET enable_progress_bar = false")
        connection.execute(f"SET temp_directory = '{str(folder / 'spill').replace(chr(39), chr(39) * 2)}'")
        aside_rows, reasons, duplicates, keys = _duplicates(connection, raw, resolved)
        if config.on_bad_rows == "refuse":
            aside_rows, reasons = aside_rows.slice(0, 0), []
        if reasons:
            quarantine.append(_quarantined(aside_rows, paths, reasons))
        parts, rows = _write_sorted(connection, raw, resolved, folder, aside_rows)
    finally:
        connection.close()
    for path in raw:
        path.unlink()
    aside = sum(table.num_rows for table in quarantine)
    if rows + aside != read:
        raise AssertionError(f"{rows} accepted + {aside} quarantined rows are not the {read} read")
    name = None
    if quarantine:
        name = str(folder / "quarantine.parquet")
        pq.write_table(pa.concat_tables(quarantine), name, compression="zstd")
    if not rows:
        raise DataContractError(f"{source}: no good row is left of {read}; {_worst(bad)}")
    return StagedFiles(
        contract=resolved, parts=tuple(str(p) for p in parts), sources={str(p): s for p, s in sources.items()},
        read_rows=read, rows=rows, quarantined_rows=aside, quarantine=name, ignored_columns=ignored, bad_values=bad,
        duplicates=duplicates, duplicate_keys=keys, future_rows=future_rows,
        memory_limit=config.memory_limit, threads=config.threads,
    )  # fmt: skip


def _worst(bad: dict[str, dict[str, dict[str, int]]]) -> str:
    return "; ".join(f"{column}: {', '.join(kinds)}" for column, kinds in list(bad.items())[:5]) or "see the quarantine"


def _footer(path: Path) -> pa.Schema:
    size = path.stat().st_size
    if size == 0:
        raise DataContractError(f"{path}: 0 bytes, not a Parquet file; write it again or take it away")
    try:
        with pq.ParquetFile(path) as file:
            return file.schema_arrow
    except Exception as error:
        reason = "encrypted" if "encrypt" in str(error).lower() else f"cut short or not Parquet ({size} bytes)"
        raise DataContractError(f"{path}: {reason}: {error}; write it again or take it away") from error


def _rows_of(path: Path) -> int:
    with pq.ParquetFile(path) as file:
        return int(file.metadata.num_rows)


# --- footers against the contract ----------------------------------------------------------------------------------


def _hive(path: Path) -> dict[str, str | None]:
    """Keys of hive folders, decoded: `entity_id=BRK%2FB` says entity_id is BRK/B; Hive has its own word for null."""
    parts = (urllib.parse.unquote(part).partition("=") for part in path.parent.parts if "=" in part)
    return {name: None if value == "__HIVE_DEFAULT_PARTITION__" else value for name, _, value in parts}


def _kind(column_type: pa.DataType) -> str:
    """What two files must agree on for one column."""
    if pa.types.is_dictionary(column_type):
        column_type = column_type.value_type
    if pa.types.is_string(column_type) or pa.types.is_large_string(column_type) or str(column_type) == "string_view":
        return "string"
    if pa.types.is_timestamp(column_type):
        return "timestamp with zone" if column_type.tz else "timestamp without zone"
    if pa.types.is_decimal(column_type):
        return "decimal"
    return str(column_type)


def _allowed(contract: FeatureContract, name: str) -> tuple[set[str], str]:
    """Kinds a column may have, and how to say so."""
    if name == contract.entity:
        return {"string"}, "string"
    if name == contract.timestamp:
        return {"timestamp with zone", "timestamp without zone"}, "timestamp"
    if name == contract.price or name in contract.target_names:
        return {"float", "double", "decimal", "int8", "int16", "int32"}, "double, float or decimal"
    return {"float", "double", "halffloat", "int8", "int16", "uint8", "uint16"}, "float (or double in every file)"


def _check_columns(schemas: dict[Path, pa.Schema], contract: FeatureContract) -> tuple[FeatureContract, tuple[str, ...]]:
    """The contract with the source's names, and the columns that it ignores. Raises DataContractError."""
    for path, schema in schemas.items():
        twice = [n for n, c in Counter(name.lower() for name in schema.names).items() if c > 1]
        if twice:
            raise DataContractError(f"{path}: columns named twice (case does not count): {', '.join(twice)}; rename one")
    names = {name for schema in schemas.values() for name in schema.names}  # folders name the entity, never a feature
    try:
        resolved = contract.resolve(names)
    except ContractError as error:
        few = min(schemas, key=lambda path: len(schemas[path].names))
        only = sorted(names - set(schemas[few].names))[:3]
        raise DataContractError(
            f"{few}: {error} (over {len(schemas)} files"
            + (f"; not in this file: {', '.join(only)}" if only else "")
            + "); fix the source, or describe it with --contract FILE"
        ) from error
    first: dict[str, tuple[str, Path]] = {}
    problems: list[str] = []
    for path, schema in schemas.items():
        present = set(schema.names)
        missing = [name for name in resolved.columns if name not in present]
        if resolved.entity in missing and resolved.entity in _hive(path):
            missing.remove(resolved.entity)
        if missing:
            rows = _rows_of(path)
            problems.append(f"{path}: column {_some(missing)} missing ({rows} rows), expected by the contract")
        if not _rows_of(path):  # nothing in it can be of a wrong type: writers type empty columns as null
            continue
        for name in resolved.columns:
            if name not in present:
                continue
            kind = _kind(schema.field(name).type)
            allowed, expected = _allowed(resolved, name)
            if kind not in allowed:
                problems.append(f"{path}: column '{name}' is {schema.field(name).type}, expected {expected}")
            elif (other := first.setdefault(name, (kind, path)))[0] != kind:
                problems.append(f"{path}: column '{name}' is {kind}, but {other[0]} in {other[1].name}; one type per column")
    if problems:
        shown = "\n  ".join(problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise DataContractError(f"{len(problems)} columns do not fit the contract:\n  {shown}{more}\nwrite the files again")
    return resolved, tuple(sorted(names - set(resolved.columns)))


def _some(names: Sequence[str]) -> str:
    return ", ".join(f"'{n}'" for n in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# --- one file, in batches ------------------------------------------------------------------------------------------


def staged_schema(contract: FeatureContract) -> pa.Schema:
    """Canonical types: string key, UTC microseconds, double price and targets, float features."""
    types = {contract.entity: pa.string(), contract.timestamp: pa.timestamp("us", tz="UTC")}
    doubles = {contract.price, *contract.target_names}
    return pa.schema([(n, types.get(n) or (pa.float64() if n in doubles else pa.float32())) for n in contract.columns])


def _stage_one(
    path: Path, index: int, schema: pa.Schema, contract: FeatureContract, config: IngestConfig, target: Path,
    bad: dict[str, dict[str, dict[str, int]]], quarantine: list[pa.Table], future_rows: int,
) -> int:  # fmt: skip
    """Write one source file in canonical types to `target`; count its bad values; rows read come back."""
    wanted = staged_schema(contract)
    out_schema = wanted.append(pa.field(FILE, pa.int32())).append(pa.field(ROW, pa.int64()))
    columns = [name for name in contract.columns if name in schema.names]
    only_ahead = [n for n in (contract.price, *contract.target_names, *contract.groups()["historical"]) if n in columns]
    row = 0
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except Exception as error:
        raise DataContractError(f"{path}: {error}") from error
    with (
        file,
        pq.ParquetWriter(target, out_schema, compression="zstd", compression_level=1, use_dictionary=False) as writer,
    ):
        batches = file.iter_batches(batch_size=BATCH_ROWS, columns=columns)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                break
            except Exception as error:
                raise DataContractError(f"{path}: damaged near row {row}: {error}; write it again or take it away") from error
            size = batch.num_rows
            ahead = np.ones(size, bool)
            for name in only_ahead:
                ahead &= batch.column(name).is_null().to_numpy(zero_copy_only=False)
            if ahead.any() and not future_rows:
                raise DataContractError(
                    f"{path}: {int(ahead.sum())} rows from row {row + int(ahead.argmax())} on hold no price, target or "
                    f"historical value, only key and future columns: predict takes such rows, a dataset does not"
                )
            arrays: list[pa.Array] = []
            mask = np.zeros(size, bool)
            reasons: list[list[str]] = [[] for _ in range(size)]
            for field in wanted:
                if field.name not in columns:
                    array: pa.Array = pa.array([_hive(path)[contract.entity]] * size, pa.string())
                else:
                    array = batch.column(field.name)
                array, wrong = _canonical(array, field, path)
                pardoned = (
                    ahead if field.name not in (contract.entity, contract.timestamp, *contract.groups()["future"]) else None
                )
                for kind, where in wrong.items():
                    if kind == "null" and pardoned is not None:
                        where = where & ~pardoned
                    if count := int(where.sum()):
                        per_file = bad.setdefault(field.name, {}).setdefault(kind, {})
                        per_file[str(path)] = per_file.get(str(path), 0) + count
                        mask |= where
                        for at in np.flatnonzero(where):
                            reasons[at].append(f"{field.name}: {kind}")
                arrays.append(array)
            arrays += [pa.array(np.full(size, index, np.int32)), pa.array(np.arange(row, row + size))]
            table = pa.Table.from_arrays(arrays, schema=out_schema)
            if config.on_bad_rows == "quarantine" and mask.any():
                quarantine.append(_quarantined(table.filter(pa.array(mask)), [path], [r for r in reasons if r]))
                table = table.filter(pa.array(~mask))
            writer.write_table(table)
            row += size
    return row


def _canonical(array: pa.Array, field: pa.Field, path: Path) -> tuple[pa.Array, dict[str, Any]]:
    """The column in its canonical type, and a mask of bad rows for every kind of badness that occurs."""
    wrong: dict[str, Any] = {}
    if array.null_count:
        wrong["null"] = array.is_null().to_numpy(zero_copy_only=False)
    try:
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if pa.types.is_timestamp(field.type):
            if array.type.tz is None:
                array = pc.assume_timezone(array, "UTC")
            return array.cast(field.type), wrong
        if pa.types.is_string(field.type):
            return array.cast(field.type), wrong
        before = array.cast(pa.float64()) if pa.types.is_decimal(array.type) or pa.types.is_integer(array.type) else array
        after = before.cast(field.type, safe=False)
    except pa.ArrowInvalid as error:
        raise DataContractError(f"{path}: column '{field.name}' cannot become {field.type} without loss: {error}") from error
    values = after.fill_null(0).to_numpy(zero_copy_only=False)
    if not np.isfinite(values).all():
        source = before.fill_null(0).to_numpy(zero_copy_only=False)
        overflow = np.isinf(values) & np.isfinite(source)
        kinds = {
            "nan": np.isnan(values),
            "posinf": np.isposinf(source),
            "neginf": np.isneginf(source),
            "overflow": overflow,
        }
        wrong |= {kind: where for kind, where in kinds.items() if where.any()}
    return after, wrong


def _quarantined(table: pa.Table, paths: Sequence[Path], reasons: list[list[str]]) -> pa.Table:
    """Rows set aside, with source file, row number (from 0) and the reasons."""
    files = table[FILE].to_numpy()
    names = [str(paths[0] if len(paths) == 1 else paths[i]) for i in files]
    rows = table[ROW]
    table = table.drop_columns([FILE, ROW])
    table = table.append_column("source_file", pa.array(names, pa.string())).append_column("source_row", rows)
    return table.append_column("reasons", pa.array(["; ".join(r) for r in reasons], pa.string()))


# --- all rows: duplicates, order, parts ----------------------------------------------------------------------------


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _scan(paths: Sequence[Path]) -> str:
    files = ", ".join("'" + str(p).replace("'", "''") + "'" for p in paths)
    return f"read_parquet([{files}], hive_partitioning = false)"


def _duplicates(
    connection: duckdb.DuckDBPyConnection, raw: list[Path], contract: FeatureContract
) -> tuple[pa.Table, list[list[str]], dict[str, int], tuple[str, ...]]:
    """Of keys that occur more than once: the rows to set aside, a reason for each, counts, and the keys.

    Of exact duplicates the first is kept; of a key with different rows none is.
    """
    entity, time = _quote(contract.entity), _quote(contract.timestamp)
    rows = connection.sql(
        f"WITH k AS (SELECT {entity} e, {time} t FROM {_scan(raw)} WHERE {entity} IS NOT NULL AND {time} IS NOT NULL "
        f"GROUP BY ALL HAVING count(*) > 1) "
        f"SELECT r.* FROM {_scan(raw)} r JOIN k ON r.{entity} = k.e AND r.{time} = k.t "
        f"ORDER BY r.{entity}, r.{time}, r.{FILE}, r.{ROW}"
    ).to_arrow_table()
    # Equal codes are equal values, NaN and null included; a source given twice makes every row a duplicate
    steady = {n: np.diff(rows[n].combine_chunks().dictionary_encode("encode").indices) == 0 for n in contract.columns}
    first = np.ones(rows.num_rows, bool)
    first[1:] = ~(steady[contract.entity] & steady[contract.timestamp])
    differs = np.zeros(rows.num_rows, bool)
    differs[1:] = ~first[1:] & ~np.logical_and.reduce(list(steady.values()))
    group = np.cumsum(first) - 1
    conflict = np.isin(group, group[differs])
    aside = np.flatnonzero(conflict | ~first)
    counts = {"exact": int((~conflict & ~first).sum()), "conflicting": int(conflict.sum())}
    reasons = [["key with different rows" if c else "exact duplicate"] for c in conflict[aside]]
    keys = rows.filter(pa.array(first)).select([contract.entity, contract.timestamp]).to_pydict()
    names = tuple(f"{e} {t:%Y-%m-%dT%H:%M:%S}Z" for e, t in zip(*keys.values(), strict=True))
    return rows.take(pa.array(aside)), reasons, counts, names


def _write_sorted(
    connection: duckdb.DuckDBPyConnection, raw: list[Path], contract: FeatureContract, folder: Path, aside: pa.Table
) -> tuple[list[Path], int]:
    """The staged rows in order, in parts; how many."""
    schema = staged_schema(contract)
    columns = ", ".join(_quote(name) for name in contract.columns)
    where = ""
    if aside.num_rows:
        connection.register("aside", aside.select([FILE, ROW]))
        where = f"ANTI JOIN aside USING ({FILE}, {ROW})"
    query = f"SELECT {columns} FROM {_scan(raw)} {where} ORDER BY {_quote(contract.entity)}, {_quote(contract.timestamp)}"
    reader = connection.sql(query).to_arrow_reader(65_536)
    parts: list[Path] = []
    rows = 0
    writer: pq.ParquetWriter | None = None
    in_part = 0
    try:
        for batch in reader:
            if writer is None or in_part >= PART_ROWS:
                if writer is not None:
                    writer.close()
                parts.append(folder / f"part-{len(parts):05d}.parquet")
                writer = part_writer(parts[-1], schema, contract)
                in_part = 0
            writer.write_table(pa.Table.from_batches([batch]).cast(schema))
            rows += batch.num_rows
            in_part += batch.num_rows
    finally:
        if writer is not None:
            writer.close()
    return parts, rows


def part_writer(path: Path, schema: pa.Schema, contract: FeatureContract) -> pq.ParquetWriter:
    """A writer of dataset parts: page checksums, and no dictionaries for floats (they cost time and space)."""
    return pq.ParquetWriter(
        path, schema, compression="zstd", use_dictionary=[contract.entity], write_page_checksum=True,
        write_statistics=True, data_page_version="1.0",
    )  # fmt: skip


def row_batches(parts: Sequence[str | Path], contract: FeatureContract) -> Iterator[pa.RecordBatch]:
    """Batches of stored or staged parts, page checksums verified, columns in the contract's order."""
    for part in parts:
        try:
            with pq.ParquetFile(part, page_checksum_verification=True) as file:
                yield from file.iter_batches(batch_size=65_536, columns=list(contract.columns))
        except OSError as error:
            raise ArtifactIntegrityError(f"{part}: {error}") from error


def fingerprint(parts: Sequence[str | Path], contract: FeatureContract) -> tuple[str, dict[str, int], tuple[str, str]]:
    """sha256 of contract and sorted rows, rows by series, and the first and last time (ISO 8601).

    One running digest per column over its little-endian values, so neither files nor batches matter.
    """
    digests = [hashlib.sha256() for _ in contract.columns]
    series: Counter[str] = Counter()
    first, last = 2**63 - 1, -(2**63)
    for batch in row_batches(parts, contract):
        for name, column, total in zip(contract.columns, batch.columns, digests, strict=True):
            if name == contract.entity:
                values = column.to_pylist()
                series.update(values)
                total.update("".join(f"{len(v.encode())}:{v};" for v in values).encode())
            elif name == contract.timestamp:
                micros = column.cast(pa.int64()).to_numpy()
                first, last = min(first, int(micros.min())), max(last, int(micros.max()))
                total.update(np.ascontiguousarray(micros, "<i8").tobytes())
            else:
                values = column.to_numpy(zero_copy_only=False)
                total.update(np.ascontiguousarray(values, "<f4" if values.dtype == np.float32 else "<f8").tobytes())
    whole = hashlib.sha256(contract.fingerprint.encode() + b"".join(d.digest() for d in digests)).hexdigest()
    period = tuple(np.datetime_as_string(np.datetime64(t, "us"), unit="s") + "Z" for t in (first, last))
    return whole, dict(sorted(series.items())), (period[0], period[1])


def write_dataset(staged: StagedFiles, report: DataReport, store: ObjectStore) -> tuple[Dataset, str]:
    """Keep validated rows as an immutable dataset; the dataset and the URI of its dataset.json.

    Parts first, then the record of this ingest with its Data Docs, dataset.json last. The same rows are the same
    dataset: what is there already is read, not written again.
    """
    name, series, (first, last) = fingerprint(staged.parts, staged.contract)
    place = f"datasets/{name}"
    try:
        dataset = _stored_dataset(store, place)
    except ObjectMissing:
        files: dict[str, StoredFile] = {}
        for number, part in enumerate(staged.parts):
            stored = digest(Path(part))
            # Named by content too: another pyarrow may write the same rows as other bytes
            files[key := f"part-{number:05d}-{stored.sha256[:8]}.parquet"] = stored
            store.put_if_absent(f"{place}/{key}", Path(part))
        dataset = Dataset(
            fingerprint=name, contract=staged.contract, rows=staged.rows, series=series, first_timestamp=first,
            last_timestamp=last, files=files,
        )  # fmt: skip
    _write_ingest(staged, report, store, name)
    try:
        store.put_if_absent(f"{place}/dataset.json", encode(dataset))
    except StoreConflict:
        dataset = _stored_dataset(store, place)  # written by another ingest meanwhile
    return dataset, f"{store.uri.rstrip('/')}/{place}/dataset.json"


def _stored_dataset(store: ObjectStore, place: str) -> Dataset:
    """The dataset that stands there already. Raises ObjectMissing, and ArtifactIntegrityError unless every part is whole."""
    try:
        dataset = Dataset.model_validate_json(store.get(f"{place}/dataset.json"))
    except ValidationError as error:
        raise ArtifactIntegrityError(f"{store.uri}: {place}/dataset.json is none of this project: {error}") from error
    if place != f"datasets/{dataset.fingerprint}":
        raise ArtifactIntegrityError(f"{store.uri}: {place}/dataset.json holds the dataset {dataset.fingerprint}")
    for name, stored in dataset.files.items():
        found = store.head(f"{place}/{name}")
        if found is None or found.size != stored.size or found.sha256 not in (stored.sha256, None):
            what = "is missing" if found is None else "has other bytes"
            raise ArtifactIntegrityError(
                f"{store.uri}: {place}/{name} {what}, dataset.json expects sha256 {stored.sha256[:12]}; restore the part, "
                f"or remove {place}/dataset.json and that part, and ingest again"
            )
    return dataset


def _write_ingest(staged: StagedFiles, report: DataReport, store: ObjectStore, dataset: str) -> None:
    """`ingests/<id>.json`: which files the rows came in, what was set aside, what every rule found."""
    record: dict[str, Any] = {
        "dataset": dataset,
        "sources": {path: file.model_dump() for path, file in sorted(staged.sources.items())},
        "read_rows": staged.read_rows,
        "rows": staged.rows,
        "quarantined_rows": staged.quarantined_rows,
        "ignored_columns": staged.ignored_columns,
        "rules": report.table,
    }
    number = hashlib.sha256(canonical_json(record).encode()).hexdigest()[:32]
    if staged.quarantine:
        _put_unless_there(store, f"ingests/{number}/quarantine.parquet", Path(staged.quarantine))
    if report.data_docs:
        for path in sorted(p for p in Path(report.data_docs).rglob("*") if p.is_file()):
            key = path.relative_to(report.data_docs).as_posix()
            _put_unless_there(store, f"ingests/{number}/docs/{key}", path)
    store.put_if_absent(f"ingests/{number}.json", canonical_json(record).encode())


def _put_unless_there(store: ObjectStore, key: str, path: Path) -> None:
    if store.head(key) is None:  # Data Docs hold a clock: the first ones stay
        store.put_if_absent(key, path)
