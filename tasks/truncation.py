"""Features that know the future, exactly: features are built again from bars that end at a random instant, and every row up to
it must come out the same. Takes a feature builder of the user; the check by statistics stands in tasks/leaks.py. Uses pyarrow."""

from __future__ import annotations

import importlib
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from numpy.typing import NDArray

from models.config import FeatureBuilder
from models.features import FeatureContract

TOLERANCE = 1e-5  # relative; sums in another order differ by less


class BuilderError(RuntimeError):
    """The feature builder failed, or built something that cannot be compared: nothing is known about its features."""


class LookAhead(NamedTuple):
    """A column whose past changes when later bars are taken away, and in how many rows at the cut that shows most."""

    feature: str
    rows: int
    compared: int
    cut: str

    def __str__(self) -> str:
        return f"{self.feature}: {self.rows} of {self.compared} rows up to {self.cut} change when later bars are taken away"


def find_look_ahead(builder: FeatureBuilder, contract: FeatureContract, seed: int = 0) -> list[LookAhead]:
    """Columns of the builder that use later bars, those with most rows first. Targets may look ahead, and are not compared.

    Raises BuilderError.
    """
    build = _function(builder.run)
    try:
        bars = ds.dataset(builder.bars, exclude_invalid_files=False).to_table()
        times = _micros(bars, contract.timestamp)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise BuilderError(f"{builder.bars}: bars cannot be read, or have no {contract.timestamp!r}: {error}") from error
    whole = _rows(build(bars), contract, builder.run)
    instants = np.unique(whole[contract.timestamp].to_numpy())
    if len(instants) < 10:
        raise BuilderError(f"{builder.run}: built rows of {len(instants)} instants, too few to cut between")
    low, high = len(instants) // 10, len(instants) - len(instants) // 20
    found: dict[str, LookAhead] = {}
    for at in np.random.default_rng(seed).integers(low, high, builder.cuts):
        cut = int(instants[at])
        part = _rows(build(bars.filter(pa.array(times <= cut))), contract, builder.run)
        for look in _differences(whole, part, contract, cut):
            if look.feature not in found or look.rows > found[look.feature].rows:
                found[look.feature] = look
    return sorted(found.values(), key=lambda look: (-look.rows, look.feature))


def _function(run: str) -> Callable[[pa.Table], pa.Table]:
    """`module:function` takes and returns a pandas table; anything else is a command with {bars} and {features}."""
    if "{bars}" in run:
        return lambda bars: _command(run, bars)
    module, _, name = run.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BuilderError(f"{run}: neither module:function nor a command with {{bars}} and {{features}}: {error}") from error

    def build(bars: pa.Table) -> pa.Table:
        try:
            return pa.Table.from_pandas(function(bars.to_pandas()), preserve_index=False)
        except Exception as error:
            raise BuilderError(f"{run}: {type(error).__name__}: {error}") from error

    return build


def _command(run: str, bars: pa.Table) -> pa.Table:
    with tempfile.TemporaryDirectory(prefix="forecastle-") as folder:
        names = {"bars": str(Path(folder) / "bars.parquet"), "features": str(Path(folder) / "features.parquet")}
        pq.write_table(bars, names["bars"])
        done = subprocess.run([word.format(**names) for word in shlex.split(run)], capture_output=True, text=True)
        if done.returncode:
            raise BuilderError(f"{run}: ended with {done.returncode}: {done.stderr[-1000:]}")
        try:
            return pq.read_table(names["features"])
        except (OSError, pa.ArrowException) as error:
            raise BuilderError(f"{run}: wrote no Parquet file to {{features}}: {error}") from error


def _micros(table: pa.Table, timestamp: str) -> NDArray[np.int64]:
    column = table[timestamp]
    if column.type.tz is None:
        column = pc.assume_timezone(column.cast(pa.timestamp("us")), "UTC")
    return column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).to_numpy()


def _rows(table: pa.Table, contract: FeatureContract, run: str) -> pa.Table:
    """Key and features, sorted by key, times in microseconds."""
    wanted = [contract.entity, contract.timestamp, *contract.features]
    if missing := [name for name in wanted if name not in table.schema.names]:
        raise BuilderError(f"{run}: built no column {', '.join(map(repr, missing[:5]))} (of {len(missing)} missing)")
    table = table.select(wanted)
    table = table.set_column(1, contract.timestamp, pa.array(_micros(table, contract.timestamp)))
    return table.sort_by([(contract.entity, "ascending"), (contract.timestamp, "ascending")])


def _differences(whole: pa.Table, part: pa.Table, contract: FeatureContract, cut: int) -> list[LookAhead]:
    """Columns that differ in rows of both up to the cut; a row that only one has is a bar whose target is not known yet."""
    key = [contract.entity, contract.timestamp]

    def codes(table: pa.Table) -> list[tuple[Any, ...]]:
        return list(zip(*(table[name].to_pylist() for name in key), strict=True))

    place = {code: i for i, code in enumerate(codes(whole))}
    pairs = [(place[code], i) for i, code in enumerate(codes(part)) if code[1] <= cut and code in place]
    moment = np.datetime_as_string(np.datetime64(cut, "us"), unit="s") + "Z"
    if not pairs:
        raise BuilderError(f"no row up to {moment} is built both with and without later bars: nothing can be compared")
    left, right = np.array(pairs).T
    found = []
    for name in contract.features:
        a, b = (t[name].to_numpy(zero_copy_only=False).astype(np.float64)[i] for t, i in ((whole, left), (part, right)))
        scale = np.nanmax(np.abs(a), initial=0.0, where=np.isfinite(a))
        same = np.isclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * 1e-3 * scale, equal_nan=True)
        if not same.all():
            found.append(LookAhead(name, int((~same).sum()), len(pairs), moment))
    return found
