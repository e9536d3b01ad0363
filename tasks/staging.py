"""A source's rows in canonical types and order, in Parquet parts on this machine: files are read one by one (tasks/rows.py), or
taken from a cache that knows their bytes, then sorted together (tasks/sorting.py). Rules stand in tasks/expectations.py."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from models.config import POLICIES, IngestConfig
from models.features import FeatureContract, canonical_json
from models.manifest import StoredFile
from tasks.expectations import DataContractError
from tasks.rows import Counts, StagedFile, stage_file
from tasks.sorting import find_duplicates, find_static_changes, open_duckdb, write_quarantine, write_sorted
from tasks.sources import SourceFile, check_columns, footers, open_sources
from tasks.storage import digest

CACHE_VERSION = 1  # of the canonical form of a file: another number makes kept ones unknown
CACHE_BYTES = 8 * 2**30
"""Known files that are kept; the least recently used go first, never one that was used within the last hour."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
READING = 0.7
"""Share of the work that is done when all files are read, for the bar alone."""

Progress = Callable[[float, str], None]


class DiskFullError(RuntimeError):
    """No room to sort the rows in; nothing was stored."""


class StagedFiles(BaseModel):
    """A source in canonical types, sorted by series and time, in Parquet parts on this machine.

    `bad_values` counts by column, then by kind (null, nan, posinf, neginf, overflow, not_positive, future_time, unsorted), then
    by source file; `left_values` the same without files, of the rows that no policy has set aside for their values.
    `moved_rows` were set aside for what other rows say (duplicates, changing statics). `read_rows` = `rows` +
    `quarantined_rows`, always.
    """

    model_config = ConfigDict(frozen=True)
    contract: FeatureContract
    config: IngestConfig
    parts: tuple[str, ...]
    sources: dict[str, StoredFile]
    source_rows: dict[str, int]
    read_rows: int
    rows: int
    quarantined_rows: int
    moved_rows: int
    quarantine: str | None
    ignored_columns: tuple[str, ...]
    bad_values: dict[str, dict[str, dict[str, int]]]
    left_values: Counts
    duplicates: dict[str, int]
    duplicate_keys: tuple[str, ...]  # the first hundred
    duplicate_key_count: int
    duplicate_files: tuple[str, ...]
    static_changes: int
    known_files: int
    future_rows: int


def stage_parquet(
    source: str | Sequence[str], contract: FeatureContract, config: IngestConfig, folder: Path, future_rows: int = 0,
    cache: Path | None = None, on_progress: Callable[[float, str], None] = lambda share, text: None,
) -> StagedFiles:  # fmt: skip
    """Read a source into sorted canonical parts in `folder`.

    With `future_rows` > 0 (predict) each series may end with up to that many rows that hold key and future columns
    alone. With a `cache`, files whose content it knows are not read again. Raises DataContractError naming file, column,
    expected, found and the way out, and DiskFullError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _room(folder, config):
        files = open_sources(source, folder / "fetched")
        found = footers(files)
        resolved, ignored = check_columns(found, contract)
        if not any(rows for _, rows in found.values()):
            raise DataContractError(f"{source}: zero rows in {len(files)} files; an empty source is never a dataset")
        staging = Staging(resolved, config, folder, future_rows, cache)
        total = sum(file.path.stat().st_size for file in files)
        done = 0
        for number, file in enumerate(files):
            staging.add(file, found[file][0], number)
            done += staging.sources[file.name].size
            on_progress(READING * done / total, f"{number + 1} of {len(files)} files read")
        staged = _arrange(staging, str(source), ignored, on_progress)
        if cache:
            evict(cache, CACHE_BYTES)
    return staged


@contextlib.contextmanager
def _room(folder: Path, config: IngestConfig) -> Iterator[None]:
    """What a full disk or a small memory limit raises, told as such."""
    try:
        yield
    except (OSError, duckdb.Error, pa.ArrowException) as error:
        text = str(error).lower()
        full = getattr(error, "errno", None) in FULL or any(os.strerror(n).lower() in text for n in FULL)
        if full or "could not write" in text or "temp_directory" in text:
            free = shutil.disk_usage(folder).free
            raise DiskFullError(
                f"{folder}: the disk is full ({free // 2**20} MiB free); nothing was stored. Free space, or name another "
                f"folder with --config.spill-folder"
            ) from error
        if isinstance(error, duckdb.OutOfMemoryException):
            raise DiskFullError(
                f"{config.memory_limit} is too little to sort in: raise --config.memory-limit ({error})"
            ) from error
        raise


class Staging:
    """The files of one source as they are read, one canonical Parquet file each."""

    def __init__(
        self, contract: FeatureContract, config: IngestConfig, folder: Path, future_rows: int, cache: Path | None
    ) -> None:
        self.contract, self.config, self.folder, self.future_rows, self.cache = contract, config, folder, future_rows, cache
        self.raw: list[Path] = []
        self.set_aside: list[tuple[str, Path]] = []
        self.names: list[str] = []
        self.sources: dict[str, StoredFile] = {}
        self.rows: dict[str, int] = {}
        self.known = 0
        self.bad: dict[str, dict[str, dict[str, int]]] = {}
        self.left: Counts = {}

    def add(self, file: SourceFile, schema: pa.Schema, number: int) -> None:
        """Stage one file, or take it from the cache. Raises DataContractError when it changes meanwhile."""
        try:
            before = digest(file.path)
            place = self.cache / self._key(before, file) if self.cache else None
            staged = _kept(place) if place else None
            # A bar that lay ahead of the clock then may not do so now
            if staged is None or any("future_time" in kinds for kinds in staged.bad.values()):
                with tempfile.TemporaryDirectory(dir=_made(self.cache) if self.cache else self.folder, prefix=".") as temporary:
                    staged = stage_file(file, schema, self.contract, self.config, Path(temporary), self.future_rows)
                    if digest(file.path) != before:
                        raise DataContractError(
                            f"{file.name}: changed while it was read; write files under another name and rename them"
                        )
                    place = _keep(staged, Path(temporary), place or self.folder / f"file-{number:06d}")
            else:
                self.known += 1
        except FileNotFoundError as error:
            raise DataContractError(f"{file.name}: vanished while the source was read") from error
        assert place is not None
        # Linked under its place in the source: a name by content would change the order of equal rows
        link = self.folder / f"raw-{number:06d}.parquet"
        link.unlink(missing_ok=True)
        os.link(place / "rows.parquet", link) if _same_disk(place, self.folder) else link.symlink_to(place / "rows.parquet")
        self.raw.append(link)
        self.names.append(file.name)
        self.sources[file.name] = before
        if staged.aside:
            self.set_aside.append((file.name, place / "aside.parquet"))
        self.rows[file.name] = staged.rows
        for column, kinds in staged.bad.items():
            for kind, count in kinds.items():
                self.bad.setdefault(column, {}).setdefault(kind, {})[file.name] = count
        for column, kinds in staged.left.items():
            for kind, count in kinds.items():
                mine = self.left.setdefault(column, {})
                mine[kind] = mine.get(kind, 0) + count

    def _key(self, content: StoredFile, file: SourceFile) -> str:
        """What a file's canonical form depends on."""
        aside = sorted(rule for rule in POLICIES if self.config.policy(rule) == "quarantine")
        keys = {k: v for k, v in file.hive.items() if k in self.contract.columns}
        parts = [CACHE_VERSION, content.sha256, self.contract.fingerprint, keys, aside, self.future_rows]
        return hashlib.sha256(canonical_json(parts).encode()).hexdigest()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _same_disk(a: Path, b: Path) -> bool:
    return a.stat().st_dev == b.stat().st_dev


def _keep(staged: StagedFile, temporary: Path, place: Path) -> Path:
    """Move a staged file to its place, whole or not at all; another process may have been quicker."""
    record = {"staged": staged.model_dump(), "files": {p.name: digest(p).model_dump() for p in temporary.iterdir()}}
    (temporary / "staged.json").write_text(canonical_json(record))
    while True:
        try:
            os.rename(temporary, place)
            temporary.mkdir()  # for its context manager to remove
            return place
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if _kept(place) == staged:
                return place
            shutil.rmtree(place, ignore_errors=True)


def evict(cache: Path, limit: int) -> None:
    """Remove the least recently used entries of the cache until it holds `limit` bytes, and what a killed process left."""
    entries = []
    for place in cache.iterdir():
        with contextlib.suppress(OSError):  # another process evicts too
            entries.append((place.stat().st_mtime, sum(p.stat().st_size for p in place.iterdir()), place))
    held = sum(size for _, size, _ in entries)
    for used, size, place in sorted(entries):
        idle = time.time() - used > 3600
        if idle and (held > limit or place.name.startswith(".")):
            shutil.rmtree(place, ignore_errors=True)
            held -= size


def _kept(place: Path) -> StagedFile | None:
    """What is known of a staged file, or None unless every byte is what was written."""
    try:
        record = json.loads((place / "staged.json").read_text())
        if any(digest(place / name).model_dump() != stored for name, stored in record["files"].items()):
            return None
        os.utime(place)  # used just now: the last to be evicted
        return StagedFile.model_validate(record["staged"])
    except (OSError, ValueError, KeyError, ValidationError):
        return None


def _arrange(staging: Staging, source: str, ignored: tuple[str, ...], on_progress: Progress) -> StagedFiles:
    """All staged rows in order, without those that a policy sets aside for what other rows say."""
    config, contract, folder = staging.config, staging.contract, staging.folder
    connection = open_duckdb(config, folder)
    try:
        twice = find_duplicates(connection, staging)
        changes = find_static_changes(connection, staging)
        moved = connection.sql("SELECT count(*) FROM aside").fetchall()[0][0]
        quarantine = write_quarantine(connection, staging) if moved or staging.set_aside else None
        total = sum(staging.rows.values())

        def written(rows: int) -> None:
            on_progress(READING + (1 - READING) * rows / total, f"{rows} of {total} rows in order")

        parts, rows = write_sorted(connection, staging, written)
    finally:
        connection.close()
    for path in staging.raw:
        path.unlink()
    aside = total - rows
    if aside and (quarantine is None or pq.read_metadata(quarantine).num_rows != aside):
        raise AssertionError(f"{rows} accepted and the quarantined rows are not the {total} read")
    if not rows:
        raise DataContractError(f"{source}: no good row is left of {total}; {_worst(staging.bad)}")
    return StagedFiles(
        contract=contract, config=config, parts=tuple(str(p) for p in parts), sources=staging.sources, source_rows=staging.rows,
        read_rows=total,
        rows=rows, quarantined_rows=aside, moved_rows=moved, quarantine=str(quarantine) if quarantine else None,
        ignored_columns=ignored, bad_values=staging.bad, left_values=staging.left, static_changes=changes,
        known_files=staging.known, future_rows=staging.future_rows, **twice,
    )  # fmt: skip


def _worst(bad: dict[str, dict[str, dict[str, int]]]) -> str:
    return "; ".join(f"{column}: {', '.join(kinds)}" for column, kinds in list(bad.items())[:5]) or "see the quarantine"
