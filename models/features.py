"""The feature contract: which columns a bar of a market series has. Values are checked in
tasks/expectations.py; windows over the rows are cut in models/windows.py. Loads without torch."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class ContractError(ValueError):
    """Columns that do not fit a contract, or a contract that contradicts itself."""


def canonical_json(value: Any) -> str:
    """The one spelling of a JSON value: sorted keys, no spaces, no NaN. Hashes are taken of this."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


class ColumnPrefix(BaseModel):
    """Columns found by the start of their name, in the order of the sorted names."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    prefix: str = Field(min_length=1, description="Start of the column names.")
    count: int | None = Field(None, ge=0, description="How many columns there must be; none: at least one.")


Columns = tuple[str, ...] | ColumnPrefix


class FeatureContract(BaseModel):
    """Columns of one bar of one series: the key, the price, the targets and three ordered feature groups.

    Groups are lists of names, or a `ColumnPrefix` until `resolve` has seen the columns of a source.
    `historical` values are known up to and including their bar, `future` ones are known in advance for any
    bar, `static` ones are constant per series. Features are float32, price and targets float64.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    entity: str = Field("entity_id", description="Column that names the series.")
    timestamp: str = Field("timestamp", description="Column with the bar's time, UTC.")
    price: str = Field("price", description="Column with the bar's closing price (positive).")
    targets: Columns = Field(ColumnPrefix(prefix="target"), description="Columns that may be forecast.")
    static: Columns = Field(ColumnPrefix(prefix="static_", count=5), description="Constant per series.")
    historical: Columns = Field(ColumnPrefix(prefix="hist_", count=210), description="Known up to their bar.")
    future: Columns = Field(ColumnPrefix(prefix="fut_", count=10), description="Known in advance.")
    bar_interval: str | None = Field(None, description="Usual time between bars, such as '1d' or '60min'.")
    lookback_bars: int = Field(120, ge=0, description="Longest history a feature uses, in bars: the purge gap.")

    @field_validator("targets", "static", "historical", "future", mode="before")
    @classmethod
    def _lists_become_tuples(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _names_are_unique(self) -> FeatureContract:
        if not self.resolved:
            return self
        named = [self.entity, self.timestamp, self.price, *(t for t in self.target_names if t != self.price)]
        seen: dict[str, str] = {}
        for name in (*named, *self.features):
            if name.lower() in seen:
                raise ValueError(f"columns {seen[name.lower()]!r} and {name!r} are the same name (case does not count)")
            seen[name.lower()] = name
        if not self.targets or not self.historical:
            raise ValueError("a contract needs at least one target and one historical column")
        return self

    @property
    def resolved(self) -> bool:
        """Whether every group is a list of names."""
        return not any(isinstance(g, ColumnPrefix) for g in (self.targets, *self._raw_groups().values()))

    def _raw_groups(self) -> dict[str, Columns]:
        return {"static": self.static, "historical": self.historical, "future": self.future}

    def groups(self) -> dict[str, tuple[str, ...]]:
        """Feature columns by group, in the networks' order. Raises ContractError before `resolve`."""
        out: dict[str, tuple[str, ...]] = {}
        for group, columns in self._raw_groups().items():
            if isinstance(columns, ColumnPrefix):
                raise ContractError("the contract still holds prefixes: call resolve(columns) first")
            out[group] = columns
        return out

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of static, historical and future columns. Raises ContractError for a prefix that sets no count."""
        sizes = [g.count if isinstance(g, ColumnPrefix) else len(g) for g in self._raw_groups().values()]
        if None in sizes:
            raise ContractError("a prefix without a count: how many columns there are is known only with a source")
        return tuple(sizes)  # type: ignore[return-value]

    @property
    def target_names(self) -> tuple[str, ...]:
        """Names of the columns that may be forecast. Raises ContractError before `resolve`."""
        if isinstance(self.targets, ColumnPrefix):
            raise ContractError("the contract still holds prefixes: call resolve(columns) first")
        return self.targets

    @property
    def features(self) -> tuple[str, ...]:
        """All feature columns: static, historical, future."""
        return tuple(name for names in self.groups().values() for name in names)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column once, in the order in which a dataset stores them."""
        return tuple(dict.fromkeys((self.entity, self.timestamp, self.price, *self.target_names, *self.features)))

    def resolve(self, columns: Iterable[str]) -> FeatureContract:
        """The same contract with prefixes replaced by the names found in `columns` (sorted, so that neither
        file order nor column order matters). Raises ContractError with the expected and found counts."""
        available = sorted(set(columns))
        update: dict[str, tuple[str, ...]] = {}
        for group, wanted in {"targets": self.targets, **self._raw_groups()}.items():
            if not isinstance(wanted, ColumnPrefix):
                continue
            keys = {self.entity, self.timestamp, self.price}
            found = tuple(c for c in available if c.startswith(wanted.prefix) and c not in keys)
            if (wanted.count is None and not found) or (wanted.count is not None and len(found) != wanted.count):
                expected = "at least one column" if wanted.count is None else f"{wanted.count} columns"
                raise ContractError(f"{group}: expected {expected} named '{wanted.prefix}*', found {len(found)}")
            update[group] = found
        return FeatureContract(**{**self.model_dump(), **update}) if update else self

    @property
    def fingerprint(self) -> str:
        """sha256 of the resolved contract's canonical JSON."""
        self.groups()
        return hashlib.sha256(canonical_json(self.model_dump(mode="json")).encode()).hexdigest()

    @classmethod
    def from_toml(cls, path: Path | str) -> FeatureContract:
        """The contract in a TOML file: the fields of this class; a group is a list of names or
        `{prefix = "...", count = N}`. Raises ContractError that names the file."""
        try:
            values: Mapping[str, Any] = tomllib.loads(Path(path).read_text())
            return cls(**values)
        except (OSError, ValueError) as error:
            raise ContractError(f"{path}: {error}") from error


MARKET_FEATURES = FeatureContract()
"""5 static, 210 historical, 10 future columns by prefix: the default."""
