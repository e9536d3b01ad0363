"""Dataset files to arrays: row-major float32 features and offsets, in a local cache keyed by the dataset's fingerprint.
Windows over them are cut in models/windows.py. Uses pyarrow."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models.features import FeatureContract, canonical_json
from models.manifest import Dataset
from models.windows import SeriesArrays
from tasks.datasets import row_batches
from tasks.staging import StagedFiles
from tasks.storage import ArtifactIntegrityError, digest, split_uri

ATTEMPTS = 3
CACHE_GIB = 50  # of arrays on this machine, unless FORECASTLE_CACHE_GIB says otherwise
FILLING = ".filling-"
FINGERPRINT = re.compile("[0-9a-f]{64}")
ARRAYS = ("timestamps", "price", "targets", "static", "historical", "future", "offsets", "history_rows")


def load_series(dataset: Dataset, dataset_uri: str, cache: Path) -> SeriesArrays:
    """The dataset's rows as arrays, memory-mapped from the cache, which is filled and verified first.

    Raises ArtifactIntegrityError when a stored part is not what dataset.json says.
    """
    folder = cache / dataset.fingerprint
    for _ in range(ATTEMPTS):  # another process may put a damaged one away meanwhile, or make room
        if (found := _from_cache(folder, dataset.contract)) is not None:
            return found
        _fill(dataset, dataset_uri, folder)
        _make_room(folder, float(os.environ.get("FORECASTLE_CACHE_GIB", CACHE_GIB)) * 2**30)
    raise ArtifactIntegrityError(f"{folder}: the cache just written cannot be read; is the disk full?")


def _fill(dataset: Dataset, dataset_uri: str, folder: Path) -> None:
    """Read the dataset into a folder of arrays and put it in place, whole or not at all."""
    cache = folder.parent
    cache.mkdir(parents=True, exist_ok=True)
    store, key = split_uri(dataset_uri, "datasets")
    place = key.rpartition("/")[0]
    with tempfile.TemporaryDirectory(dir=cache, prefix=FILLING) as temporary:
        parts = [Path(temporary) / name for name in sorted(dataset.files)]
        for path in parts:
            store.download(f"{place}/{path.name}", path, dataset.files[path.name])
        filled = Path(temporary) / "arrays"
        filled.mkdir()
        series = _read(parts, dataset.contract, dataset.rows, future_rows=0, folder=filled)
        if dict(zip(series.names, np.diff(series.offsets).tolist(), strict=True)) != dataset.series:
            raise ArtifactIntegrityError(f"{dataset_uri}: the parts hold other series than dataset.json says")
        sizes: dict[str, Any] = {}
        for name in ARRAYS:
            path = filled / f"{name}.npy"
            if not path.exists():
                np.save(path, getattr(series, name), allow_pickle=False)
            sizes[name] = digest(path).model_dump()
        (filled / "names.json").write_text(canonical_json({"names": series.names, "files": sizes}))
        try:
            os.rename(filled, folder)  # another process may have been quicker
        except OSError:
            if _from_cache(folder, dataset.contract) is None:  # a damaged one goes as a whole too
                with contextlib.suppress(OSError):
                    os.rename(folder, Path(temporary) / "damaged")
                    os.rename(filled, folder)


def _make_room(kept: Path, limit: float) -> None:
    """Remove what was used longest ago while the cache holds more than `limit` bytes, never `kept`; and what a killed process
    left a day ago. Who has an array mapped keeps it: its bytes go when the last one lets go."""
    cache = kept.parent
    for left in cache.glob(f"{FILLING}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 86_400:
                shutil.rmtree(left, ignore_errors=True)
    held: list[tuple[float, int, Path]] = []
    for folder in cache.iterdir():
        with contextlib.suppress(OSError):
            if FINGERPRINT.fullmatch(folder.name):
                held.append((folder.stat().st_mtime, sum(file.stat().st_size for file in folder.iterdir()), folder))
    total = sum(size for _, size, _ in held)
    for _, size, folder in sorted(held):
        if total <= limit:
            return
        if folder == kept:
            continue
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=cache, prefix=FILLING) as temporary:
            os.rename(folder, Path(temporary) / "evicted")  # a reader finds it whole or not at all
            total -= size


def _from_cache(folder: Path, contract: FeatureContract) -> SeriesArrays | None:
    """The cached arrays, or None when there are none or their bytes are not those that were written."""
    try:
        index = json.loads((folder / "names.json").read_text())
        arrays = {}
        for name in ARRAYS:
            path = folder / f"{name}.npy"
            if digest(path).model_dump() != index["files"][name]:
                return None
            arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
        os.utime(folder)  # used now
    except (OSError, ValueError, KeyError):
        return None
    return SeriesArrays(contract=contract, names=tuple(index["names"]), **arrays)


def series_from_staged(staged: StagedFiles) -> SeriesArrays:
    """The staged rows as arrays; rows that hold key and future columns alone may end a series."""
    return _read(staged.parts, staged.contract, staged.rows, staged.future_rows)


def _read(
    parts: Sequence[Path | str], contract: FeatureContract, rows: int, future_rows: int, folder: Path | None = None
) -> SeriesArrays:
    """The rows of the parts. With a folder, arrays as long as the rows are files in it, so memory does not grow with them."""

    def array(name: str, dtype: type, *width: int) -> Any:
        if folder is None or 0 in width:
            return np.empty((rows, *width), dtype)
        return np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, (rows, *width))

    groups = contract.groups()
    timestamps, price = array("timestamps", np.int64), array("price", np.float64)
    targets = array("targets", np.float64, len(contract.target_names))
    historical = array("historical", np.float32, len(groups["historical"]))
    future = array("future", np.float32, len(groups["future"]))
    ahead = np.zeros(rows, bool)
    names: list[str] = []
    offsets: list[int] = []
    static: list[list[float]] = []
    at = 0
    for batch in row_batches(parts, contract):
        size = batch.num_rows
        place = slice(at, at + size)
        columns = dict(zip(contract.columns, batch.columns, strict=True))
        values = {
            n: c.fill_null(0).to_numpy(zero_copy_only=False)
            for n, c in columns.items()
            if n not in (contract.entity, contract.timestamp)
        }
        ahead[place] = columns[contract.price].is_null().to_numpy(zero_copy_only=False)
        timestamps[place] = columns[contract.timestamp].cast("int64").to_numpy()
        price[place] = values[contract.price]
        for block, of in ((targets, contract.target_names), (historical, groups["historical"]), (future, groups["future"])):
            for i, name in enumerate(of):
                block[place, i] = values[name]
        entities = np.asarray(columns[contract.entity].to_pylist(), dtype=object)
        starts = np.flatnonzero(entities[1:] != entities[:-1]) + 1
        for start in (0, *starts.tolist()):
            if not names or names[-1] != entities[start]:
                names.append(str(entities[start]))
                offsets.append(at + start)
                static.append([float(values[name][start]) for name in groups["static"]])
        at += size
    if at != rows:
        raise ArtifactIntegrityError(f"the parts hold {at} rows, expected {rows}")
    bounds = np.array([*offsets, rows], np.int64)
    spans = zip(names, itertools.pairwise(bounds.tolist()), strict=True)
    history = np.array([_history(name, ahead[a:b], future_rows) for name, (a, b) in spans], np.int64)
    return SeriesArrays(
        contract=contract, names=tuple(names), offsets=bounds, history_rows=history, timestamps=timestamps, price=price,
        targets=targets, static=np.array(static, np.float32).reshape(len(names), -1), historical=historical, future=future,
    )  # fmt: skip


def _history(name: str, ahead: Any, future_rows: int) -> int:
    """Complete rows of a series; raises DataContractError unless rows without history come last and are few."""
    from tasks.expectations import DataContractError

    complete = int((~ahead).sum())
    if ahead[:complete].any():
        raise DataContractError(f"series {name}: a row without price and history lies before complete ones")
    if len(ahead) - complete > future_rows:
        raise DataContractError(f"series {name}: {len(ahead) - complete} rows ahead, at most {future_rows} are used")
    return complete
