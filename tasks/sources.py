"""Which files a source has, where their bytes are, and what their footers promise against the contract. Values are looked at in
tasks/rows.py. Uses pyarrow, and boto3 for s3:// sources."""

from __future__ import annotations

import base64
import fnmatch
import glob
import itertools
import os
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from models.features import ContractError, FeatureContract
from tasks.expectations import DataContractError
from tasks.s3 import S3Store
from tasks.storage import open_store

SUFFIXES = (".parquet", ".parq", ".pq")


class SourceFile(NamedTuple):
    """One file of a source: its name as the user knows it (a path or an s3:// address) and the readable path."""

    name: str
    path: Path

    @property
    def hive(self) -> dict[str, str | None]:
        """Keys of hive folders, decoded: `entity_id=BRK%2FB` says entity_id is BRK/B; Hive has its own word for null."""
        parts = (urllib.parse.unquote(part).partition("=") for part in Path(self.name).parent.parts if "=" in part)
        return {name: None if value == "__HIVE_DEFAULT_PARTITION__" else value for name, _, value in parts}


def open_sources(source: str | Sequence[str], folder: Path) -> list[SourceFile]:
    """Files of a folder, a glob, one file, an s3:// prefix, glob or object, or a `.txt` file that lists such, one a line.

    Objects of an S3 store are brought to `folder` first. Raises DataContractError when there is no file.
    """
    if isinstance(source, str) and source.endswith(".txt") and Path(source).is_file():
        lines = [line.strip() for line in Path(source).read_text().splitlines()]
        listed = [line for line in lines if line and not line.startswith("#")]
        if not listed:
            raise DataContractError(f"{source}: no Parquet file is named there, one a line")
        source = listed
    if not isinstance(source, str):
        return sorted({file for item in source for file in open_sources(item, folder)})
    if source.startswith("s3://"):
        return _fetch(source, folder)
    return [SourceFile(str(path), path) for path in list_sources(source)]


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
    if foreign := [os.fsencode(path) for path in found if not _utf8(path)]:
        raise _all([f"{name!r} is not UTF-8: rename it" for name in foreign])
    return found


def _all(problems: Sequence[str]) -> DataContractError:
    """One error that names the first twenty problems, one a line."""
    return DataContractError("\n  ".join([*problems[:20], *([f"and {len(problems) - 20} more"] if len(problems) > 20 else ())]))


def _utf8(path: Path) -> bool:
    try:
        return bool(str(path).encode())
    except UnicodeEncodeError:
        return False


def _hidden(name: str) -> bool:
    return name.startswith(("_", "."))


def _walk(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Files below the folder. Links are followed, but never back to a folder that they are in."""
    above = (*above, folder.resolve())
    for entry in os.scandir(folder):
        if _hidden(entry.name):
            continue
        if entry.is_dir():
            if Path(entry.path).resolve() not in above:
                yield from _walk(Path(entry.path), above)
        elif entry.name.lower().endswith(SUFFIXES):
            yield Path(entry.path)


def _fetch(source: str, folder: Path) -> list[SourceFile]:
    """Objects below an s3:// prefix, or that a glob matches, downloaded."""
    bucket, _, pattern = source.removeprefix("s3://").partition("/")
    store = open_store(f"s3://{bucket}")
    assert isinstance(store, S3Store)
    magic = glob.has_magic(pattern)
    fixed = "/".join(itertools.takewhile(lambda part: not glob.has_magic(part), pattern.split("/")))
    keys = []
    for key in store.list(fixed):
        below = key[len(fixed) :].strip("/")
        inside = fnmatch.fnmatchcase(key, pattern) if magic else key == pattern or key.startswith(f"{pattern.rstrip('/')}/")
        wanted = key == pattern or (key.lower().endswith(SUFFIXES) and not any(map(_hidden, below.split("/"))))
        if (inside or not pattern) and wanted:
            keys.append(key)
    if not keys:
        raise DataContractError(f"{source}: no Parquet object there (names starting with '_' or '.' are skipped)")
    folder.mkdir(parents=True, exist_ok=True)
    start = len(list(folder.iterdir()))
    found = [SourceFile(f"{store.uri}/{key}", folder / f"{start + n:06d}.parquet") for n, key in enumerate(sorted(keys))]
    for file, key in zip(found, sorted(keys), strict=True):
        store.fetch(key, file.path)
    return found


def footer(file: SourceFile, connection: duckdb.DuckDBPyConnection) -> tuple[pa.Schema, int]:
    """Schema and rows of one file. Raises DataContractError that names it when it is no whole Parquet file."""
    try:
        size = file.path.stat().st_size
        if size == 0:
            raise DataContractError(f"{file.name}: 0 bytes, not a Parquet file; write it again or take it away")
        with pq.ParquetFile(file.path) as opened:
            if fault := _contradiction(opened, file.path, connection):
                raise DataContractError(f"{file.name}: the footer contradicts itself: {fault}; write it again or take it away")
            return opened.schema_arrow, int(opened.metadata.num_rows)
    except DataContractError:
        raise
    except Exception as error:
        reason = "encrypted" if "encrypt" in str(error).lower() else f"cut short or not Parquet ({size} bytes)"
        raise DataContractError(f"{file.name}: {reason}: {error}; write it again or take it away") from error


def _contradiction(opened: pq.ParquetFile, path: Path, connection: duckdb.DuckDBPyConnection) -> str | None:
    """What cannot be true of a footer, which no checksum guards: one flipped bit drops rows, or reads doubles as floats."""
    # By DuckDB: pyarrow ends the process where it meets some such chunks
    found = connection.execute(
        "SELECT s.name, s.type, m.type, m.num_values, m.row_group_num_rows FROM parquet_metadata($1) m JOIN "
        "(SELECT *, row_number() OVER () - 1 AS leaf FROM parquet_schema($1) WHERE num_children IS NULL) s "
        "ON s.leaf = m.column_id AND s.name = m.path_in_schema "
        "WHERE s.type <> m.type OR (s.repetition_type <> 'REPEATED' AND m.num_values <> m.row_group_num_rows) LIMIT 1",
        [str(path)],
    ).fetchall()
    for name, kind, other, values, rows in found:
        return f"column '{name}' is {kind} and {other}, with {values} values for {rows} rows"
    footer = opened.metadata
    rows = sum(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
    if rows != footer.num_rows:
        return f"{footer.num_rows} rows, {rows} in its row groups"
    written = (footer.metadata or {}).get(b"ARROW:schema")
    before = pa.ipc.read_schema(pa.BufferReader(base64.b64decode(written))) if written else pa.schema([])
    int96 = {c.path for c in map(opened.schema.column, range(footer.num_columns)) if c.physical_type == "INT96"}
    units = {f.name: f.type.unit for f in before if pa.types.is_timestamp(f.type)}
    for field in opened.schema_arrow:
        # Writers make units coarser, never finer; int96 is always ns
        finer = pa.types.is_timestamp(field.type) and field.type.unit == "ns" != units.get(field.name, "ns")
        if finer and field.name not in int96:
            return f"column '{field.name}' is in ns and in {units[field.name]}"
    return None


def footers(files: Sequence[SourceFile]) -> dict[SourceFile, tuple[pa.Schema, int]]:
    """Schema and rows by file. Raises DataContractError that names every file without a readable footer."""
    found: dict[SourceFile, tuple[pa.Schema, int]] = {}
    problems = []
    with duckdb.connect() as connection:  # of its own: another would answer from its cache of footers
        for file in files:
            try:
                found[file] = footer(file, connection)
            except DataContractError as error:
                problems.append(str(error))
    if problems:
        raise _all(problems)
    return found


def kind_of(column_type: pa.DataType) -> str:
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


def check_columns(
    found: dict[SourceFile, tuple[pa.Schema, int]], contract: FeatureContract
) -> tuple[FeatureContract, tuple[str, ...]]:
    """The contract with the source's names, and the columns that it ignores. Raises DataContractError."""
    for file, (schema, _) in found.items():
        twice = [n for n, c in Counter(name.lower() for name in schema.names).items() if c > 1]
        if twice:
            raise DataContractError(f"{file.name}: columns named twice (case does not count): {', '.join(twice)}; rename one")
    # Folders name a column only where a contract spells it out, never one that a prefix would find
    names = {name for schema, _ in found.values() for name in schema.names}
    try:
        resolved = contract.resolve(names)
    except ContractError as error:
        few = min(found, key=lambda file: len(found[file][0].names))
        only = sorted(names - set(found[few][0].names))[:3]
        raise DataContractError(
            f"{few.name}: {error} (over {len(found)} files"
            + (f"; not in this file: {', '.join(only)}" if only else "")
            + "); fix the source, or describe it with --contract FILE"
        ) from error
    first: dict[str, tuple[str, SourceFile]] = {}
    problems: list[str] = []
    static = resolved.groups()["static"]
    for file, (schema, rows) in found.items():
        present = set(schema.names)
        supplied = {n for n in file.hive if n == resolved.entity or n in static}
        if missing := [name for name in resolved.columns if name not in present | supplied]:
            problems.append(f"{file.name}: column {_some(missing)} missing ({rows} rows), expected by the contract")
        if not rows:  # nothing in it can be of a wrong type: writers type empty columns as null
            continue
        for name in resolved.columns:
            if name not in present:
                continue
            kind = kind_of(schema.field(name).type)
            allowed, expected = _allowed(resolved, name)
            if kind not in allowed:
                problems.append(f"{file.name}: column '{name}' is {schema.field(name).type}, expected {expected}")
            elif (other := first.setdefault(name, (kind, file)))[0] != kind:
                problems.append(
                    f"{file.name}: column '{name}' is {kind}, but {other[0]} in {other[1].path.name}; one type per column"
                )
    if problems:
        raise DataContractError(f"{len(problems)} columns do not fit the contract:\n  {_all(problems)}\nwrite the files again")
    return resolved, tuple(sorted(names - set(resolved.columns)))


def _some(names: Sequence[str]) -> str:
    return ", ".join(f"'{n}'" for n in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
