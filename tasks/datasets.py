"""A validated dataset in the store: parts written, fingerprinted and read back, and the record of every ingest. Staging
stands in tasks/staging.py, rules in tasks/expectations.py. Uses pyarrow."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from models.features import FeatureContract, canonical_json
from models.manifest import Dataset, StoredFile
from tasks.artifacts import encode
from tasks.expectations import DataReport
from tasks.storage import ArtifactIntegrityError, ObjectMissing, ObjectStore, StoreConflict, digest

if TYPE_CHECKING:
    from tasks.staging import StagedFiles


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
                yield from file.iter_batches(batch_size=16_384, columns=list(contract.columns))
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
            store.put_if_absent(f"{place}/{key}", Path(part), stored)
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


def ingest_record(staged: StagedFiles, report: DataReport, dataset: str) -> tuple[str, bytes]:
    """The id of an ingest, and what `ingests/<id>.json` holds: which files the rows came in, what was set aside, what every rule
    found."""
    record: dict[str, Any] = {
        "dataset": dataset,
        "sources": {p: {**file.model_dump(), "rows": staged.source_rows[p]} for p, file in sorted(staged.sources.items())},
        "read_rows": staged.read_rows,
        "rows": staged.rows,
        "quarantined_rows": staged.quarantined_rows,
        "ignored_columns": staged.ignored_columns,
        "rules": report.table,
    }
    data = canonical_json(record).encode()
    return hashlib.sha256(data).hexdigest()[:32], data


def _write_ingest(staged: StagedFiles, report: DataReport, store: ObjectStore, dataset: str) -> None:
    """The record, with the quarantined rows and the Data Docs below it."""
    number, data = ingest_record(staged, report, dataset)
    if staged.quarantine:
        _put_unless_there(store, f"ingests/{number}/quarantine.parquet", Path(staged.quarantine))
    if report.data_docs:
        for path in sorted(p for p in Path(report.data_docs).rglob("*") if p.is_file()):
            key = path.relative_to(report.data_docs).as_posix()
            _put_unless_there(store, f"ingests/{number}/docs/{key}", path)
    store.put_if_absent(f"ingests/{number}.json", data)


def _put_unless_there(store: ObjectStore, key: str, path: Path) -> None:
    if store.head(key) is None:  # Data Docs hold a clock: the first ones stay
        store.put_if_absent(key, path)
