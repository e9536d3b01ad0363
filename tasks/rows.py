"""The rows of one source file in canonical types, read in batches, bad values counted and set aside. Files and footers stand in
tasks/sources.py, what all files say together in tasks/sorting.py. Uses pyarrow.

Whether a number is finite is asked of NumPy (DuckDB misses NaN in some pyarrow-written files, see docs/data.md)."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from models.config import IngestConfig
from models.features import FeatureContract
from tasks.expectations import DataContractError
from tasks.sources import SourceFile

BATCH_ROWS = 16_384
ROW = "__row"
AHEAD_OF_CLOCK = 86_400_000_000  # a bar may be dated one day after this machine's clock: time zones, closing times

Counts = dict[str, dict[str, int]]


class StagedFile(BaseModel):
    """One source file in canonical types: rows read, rows set aside for their values, and values that break a rule by column
    and kind: of all rows (`bad`) and of those not set aside (`left`)."""

    model_config = ConfigDict(frozen=True)
    rows: int
    aside: int
    bad: Counts
    left: Counts


def staged_schema(contract: FeatureContract) -> pa.Schema:
    """Canonical types: string key, UTC microseconds, double price and targets, float features."""
    types = {contract.entity: pa.string(), contract.timestamp: pa.timestamp("us", tz="UTC")}
    doubles = {contract.price, *contract.target_names}
    return pa.schema([(n, types.get(n) or (pa.float64() if n in doubles else pa.float32())) for n in contract.columns])


def stage_file(
    file: SourceFile, schema: pa.Schema, contract: FeatureContract, config: IngestConfig, folder: Path, future_rows: int
) -> StagedFile:
    """Write one source file in canonical types to rows.parquet, rows set aside for their values to aside.parquet."""
    wanted = staged_schema(contract)
    out_schema = wanted.append(pa.field(ROW, pa.int64()))
    columns = [name for name in contract.columns if name in schema.names]
    only_ahead = [n for n in (contract.price, *contract.target_names, *contract.groups()["historical"]) if n in columns]
    never_pardoned = {contract.entity, contract.timestamp, *contract.groups()["future"]}
    bad: Counts = {}
    left: Counts = {}
    row = aside = 0
    last: dict[Any, int] = {}
    latest = time.time_ns() // 1000 + AHEAD_OF_CLOCK
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(pq.ParquetFile(file.path, page_checksum_verification=True))
        except (pa.ArrowException, OSError) as error:
            raise DataContractError(f"{file.name}: {error}; write it again or take it away") from error
        writer = stack.enter_context(raw_writer(folder / "rows.parquet", out_schema))
        aside_writer: pq.ParquetWriter | None = None
        batches = opened.iter_batches(batch_size=BATCH_ROWS, columns=columns)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                break
            except Exception as error:
                raise DataContractError(
                    f"{file.name}: damaged near row {row}: {error}; write it again or take it away"
                ) from error
            size = batch.num_rows
            ahead = np.ones(size, bool)
            for name in only_ahead:
                ahead &= batch.column(name).is_null().to_numpy(zero_copy_only=False)
            if ahead.any() and not future_rows:
                raise DataContractError(
                    f"{file.name}: {int(ahead.sum())} rows from row {row + int(ahead.argmax())} on hold no price, target or "
                    f"historical value, only key and future columns: predict takes such rows, a dataset does not"
                )
            arrays: dict[str, pa.Array] = {}
            wrong: dict[str, dict[str, Any]] = {}
            for field in wanted:
                array = batch.column(field.name) if field.name in columns else _from_folder(file, field, size)
                arrays[field.name], found = canonical(array, field, file)
                if "null" in found and field.name not in never_pardoned:
                    found["null"] = found["null"] & ~ahead
                wrong[field.name] = found
            price = arrays[contract.price].fill_null(1).to_numpy(zero_copy_only=False)
            wrong[contract.price]["not_positive"] = price <= 0
            micros = arrays[contract.timestamp].cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
            wrong[contract.timestamp] |= {
                "future_time": (micros > latest) & ~ahead,
                "unsorted": _steps_back(arrays[contract.entity], micros, last),
            }
            mask = np.zeros(size, bool)
            for kinds in wrong.values():
                for kind, where in kinds.items():
                    if config.policy(kind) == "quarantine":
                        mask |= where
            _count(bad, wrong, np.ones(size, bool))
            _count(left, wrong, ~mask)
            table = pa.Table.from_arrays([*arrays.values(), pa.array(np.arange(row, row + size))], schema=out_schema)
            if mask.any():
                out = table.filter(pa.array(mask)).append_column("reasons", pa.array(_reasons(wrong, mask), pa.string()))
                if aside_writer is None:
                    aside_writer = stack.enter_context(raw_writer(folder / "aside.parquet", out.schema))
                aside_writer.write_table(out)
                aside += out.num_rows
                table = table.filter(pa.array(~mask))
            writer.write_table(table)
            row += size
        # A page whose type is unknown is passed over, and the rows end where its column does
        if row != opened.metadata.num_rows:
            raise DataContractError(
                f"{file.name}: damaged: {row} of {opened.metadata.num_rows} rows can be read; write it again or take it away"
            )
    return StagedFile(rows=row, aside=aside, bad=bad, left=left)


def raw_writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(path, schema, compression="zstd", compression_level=1, use_dictionary=False)


def _count(counts: Counts, wrong: dict[str, dict[str, Any]], rows: Any) -> None:
    for column, kinds in wrong.items():
        for kind, where in kinds.items():
            if count := int((where & rows).sum()):
                mine = counts.setdefault(column, {})
                mine[kind] = mine.get(kind, 0) + count


def _reasons(wrong: dict[str, dict[str, Any]], mask: Any) -> list[str]:
    """For every row of the mask, what is wrong with it."""
    reasons: dict[int, list[str]] = {int(at): [] for at in np.flatnonzero(mask)}
    for column, kinds in wrong.items():
        for kind, where in kinds.items():
            for at in np.flatnonzero(where & mask):
                reasons[int(at)].append(f"{column}: {kind}")
    return ["; ".join(each) for each in reasons.values()]


def _from_folder(file: SourceFile, field: pa.Field, size: int) -> pa.Array:
    try:
        return pa.array([file.hive[field.name]] * size, pa.string()).cast(field.type)
    except pa.ArrowInvalid as error:
        raise DataContractError(f"{file.name}: folder key {field.name} is no {field.type}: {error}") from error


def _steps_back(entities: pa.Array, micros: Any, last: dict[Any, int]) -> Any:
    """Rows whose time lies before that of the row before them of the same series; `last` goes from batch to batch."""
    coded = entities.dictionary_encode("encode")
    codes = coded.indices.to_numpy(zero_copy_only=False)
    order = np.argsort(codes, kind="stable")
    back = np.zeros(len(micros), bool)
    bounds = np.flatnonzero(np.diff(codes[order])) + 1
    for group in np.split(order, bounds):
        if len(group):
            name = coded.dictionary[int(codes[group[0]])].as_py()
            back[group] = np.diff(micros[group], prepend=last.get(name, micros[group[0]])) < 0
            last[name] = int(micros[group[-1]])
    return back


def canonical(array: pa.Array, field: pa.Field, file: SourceFile) -> tuple[pa.Array, dict[str, Any]]:
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
        raise DataContractError(f"{file.name}: column '{field.name}' cannot become {field.type} without loss: {error}") from error
    values = after.fill_null(0).to_numpy(zero_copy_only=False)
    if not np.isfinite(values).all():
        source = before.fill_null(0).to_numpy(zero_copy_only=False)
        kinds = {
            "nan": np.isnan(values),
            "posinf": np.isposinf(source),
            "neginf": np.isneginf(source),
            "overflow": np.isinf(values) & np.isfinite(source),
        }
        wrong |= {kind: where for kind, where in kinds.items() if where.any()}
    return after, wrong
