"""The registry of models: the champion alias and its history, versions, lineage. How files get there stands in
tasks/artifacts.py, what may become champion by itself in tasks/promotion.py, clearing up in tasks/garbage.py."""

from __future__ import annotations

import json
import platform
import uuid
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from models.manifest import NAME, ModelManifest, StoredFile
from tasks.artifacts import (
    MANIFEST_LIMIT,
    Champion,
    champion_version,
    code_version,
    encode,
    fetch_file,
    load_published,
    read_champion,
    read_dataset,
    read_manifest,
    verify,
)
from tasks.storage import ArtifactIntegrityError, ObjectMissing, ObjectStore, StoreConflict, StoreError, digest, split_uri


class Change(BaseModel):
    """One entry of a model's history: which version took whose place, by which rule and why. `previous` is the sequence
    number of the entry before; `evidence` is what the rule was decided on."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    sequence: int = Field(ge=1)
    previous: int | None
    from_version: int | None = Field(alias="from")
    to_version: int = Field(alias="to")
    rule: str
    why: str
    evidence: list[dict[str, Any]] = []
    writer: str = Field(description="Of which try this is: two may write under one number, and one is turned away.")


def history(store: ObjectStore, model: str) -> list[Change]:
    """What happened to the alias, the latest last: the chain of entries that the alias names. An entry outside of it was
    written by a process that ended, or was overtaken, before its swap. Raises ArtifactIntegrityError."""
    found = read_champion(store, model)
    chain: list[Change] = []
    sequence = found[0].sequence if found else None
    while sequence is not None:
        key = f"models/{model}/history/{sequence}.json"
        try:
            entry = Change.model_validate_json(store.get(key, limit=MANIFEST_LIMIT))
        except (ObjectMissing, ValidationError) as error:
            raise ArtifactIntegrityError(f"{key}: missing or damaged, though the history leads there: {error}") from error
        if entry.sequence != sequence or (entry.previous or 0) >= sequence:
            raise ArtifactIntegrityError(f"{key}: speaks of entry {entry.sequence} after {entry.previous}")
        chain.append(entry)
        sequence = entry.previous
    return chain[::-1]


def swap_champion(
    store: ObjectStore, model: str, number: int, seen: tuple[Champion, str] | None, *, rule: str, why: str,
    evidence: list[dict[str, Any]] | None = None,
) -> bool:  # fmt: skip
    """Make a version champion if the alias is still as it was `seen`; False when somebody else was quicker.

    The history entry is written before the swap, under the sequence number that the swap will carry: a crash in between
    leaves an entry whose swap never happened, and the next change takes the next number.
    """
    current, etag = seen or (None, None)
    sequence = (current.sequence if current else 0) + 1
    while True:
        entry = Change(
            sequence=sequence, previous=current.sequence if current else None, from_version=current.version if current else None,
            to_version=number, rule=rule, why=why, evidence=evidence or [], writer=uuid.uuid4().hex,
        )  # fmt: skip
        try:
            data = json.dumps(entry.model_dump(mode="json", by_alias=True), sort_keys=True).encode()
            store.put_if_absent(f"models/{model}/history/{sequence}.json", data)
            break  # found there already it is ours too, by its writer: the answer to the first try was lost
        except StoreConflict:
            sequence += 1
    sha256 = digest(store.get(f"models/{model}/{number}/manifest.json", limit=MANIFEST_LIMIT)).sha256
    alias = Champion(version=number, manifest_sha256=sha256, sequence=sequence, previous=current.version if current else None)
    return store.swap(f"models/{model}/champion.json", encode(alias), etag)


def promote(store: ObjectStore, model: str, number: int, *, why: str) -> bool:
    """Make a version champion by hand, after reading every byte of it; False when it is champion already."""
    verify(store, model, number)
    for _ in range(100):
        seen = read_champion(store, model)
        if seen and seen[0].version == number:
            return False
        if swap_champion(store, model, number, seen, rule="by hand", why=why):
            return True
    raise StoreError(f"{model}: the champion kept changing; try again")


def rollback(store: ObjectStore, model: str, *, why: str) -> int:
    """Give the alias back to the champion before the present one, and tell its version; a second rollback goes one further.

    Raises StoreError when there is none before, ArtifactIntegrityError when its files are damaged: then nothing changes.
    """
    for _ in range(100):
        seen = read_champion(store, model)
        if seen is None:
            raise ObjectMissing(f"{model} has no champion in {store.uri}")
        line = standing(history(store, model))
        if len(line) < 2 or line[-1] != seen[0].version:
            raise StoreError(f"{model}: no champion before version {seen[0].version}; promote one by hand")
        verify(store, model, line[-2])
        if swap_champion(store, model, line[-2], seen, rule="rollback", why=why):
            return line[-2]
    raise StoreError(f"{model}: the champion kept changing; try again")


def standing(changes: list[Change]) -> list[int]:
    """The champions that a rollback can go back through, the present one last."""
    line: list[int] = []
    for change in changes:
        if change.rule == "rollback":
            line.pop()
        else:
            line.append(change.to_version)
    return line


class VersionRow(BaseModel):
    """One published version in a list."""

    model_config = ConfigDict(frozen=True)
    model: str
    version: int
    champion: bool
    family: str
    epochs: int
    stop_reason: str
    dataset: str
    run_key: str


class ModelList(BaseModel):
    """Versions by their number, what happened to each model's champion, and what of either cannot be read."""

    model_config = ConfigDict(frozen=True)
    versions: list[VersionRow]
    history: dict[str, list[Change]]
    damaged: list[str]

    def for_people(self) -> str:
        """One line per version and per change of a champion."""
        lines = [
            f"{'*' if row.champion else ' '} {row.model} {row.version}  {row.family}, {row.stop_reason} after {row.epochs} epochs"
            f", dataset {row.dataset[:12]}"
            for row in self.versions
        ]
        for model, changes in self.history.items():
            lines += [change_line(model, change) for change in changes]
        lines += [f"! {text}" for text in self.damaged]
        return "\n".join(lines) or "nothing is published here"


def change_line(model: str, change: Change) -> str:
    """One change of a champion for a terminal."""
    before = f"version {change.from_version}" if change.from_version else "none"
    return f"  {model} #{change.sequence}: {before} -> version {change.to_version} ({change.rule}: {change.why})"


def versions(store: ObjectStore, model: str) -> list[int]:
    """Numbers of the published versions, rising. Folders without a manifest are not published."""
    place = f"models/{model}/"
    parts = (key.removeprefix(place).split("/") for key in store.list(place))
    return sorted(int(p[0]) for p in parts if len(p) == 2 and p[1] == "manifest.json" and p[0].isdigit())


def list_models(store: ObjectStore, model: str | None) -> ModelList:
    """Every version of one model or of all; a damaged one hides no other. Raises ObjectMissing when the named model has none."""
    if model is not None and not NAME.fullmatch(model):
        raise StoreError(f"{model!r} is no name for a model: letters, digits, '.', '_' and '-'")
    names = [model] if model else sorted({key.split("/")[1] for key in store.list("models/")})
    rows, changes, damaged = [], {}, []
    for name in names:
        champion = None
        try:
            champion = champion_version(store, name)
            changes[name] = history(store, name)
        except ArtifactIntegrityError as error:
            damaged.append(str(error))
        for number in versions(store, name):
            try:
                found = read_manifest(store, name, number)
            except ArtifactIntegrityError as error:
                damaged.append(str(error))
                continue
            row = VersionRow(
                model=name, version=number, champion=champion == number, family=found.family,
                epochs=found.epochs, stop_reason=found.stop_reason, dataset=found.dataset.fingerprint, run_key=found.run_key,
            )  # fmt: skip
            rows.append(row)
    if model and not (rows or damaged):
        raise ObjectMissing(f"no version of {model} in {store.uri}")
    return ModelList(versions=rows, history=changes, damaged=damaged)


class Lineage(BaseModel):
    """Source files -> dataset -> configuration -> weights. `sources` holds, by the record of each ingest that led to the
    dataset, its files; `rerun` says what running it again on this machine would give."""

    model_config = ConfigDict(frozen=True)
    sources: dict[str, dict[str, StoredFile]]
    rerun: Literal["the same bits", "other bits", "not possible"]
    differences: list[str]


class ShownModel(ModelManifest):
    """A manifest with where it comes from and what happened to the model's champion."""

    lineage: Lineage
    champion: int | None
    history: list[Change]

    def for_people(self) -> str:
        """From source files to weights, and the history of the champion."""
        lines = [f"{self.model} version {self.version}" + (", the champion" if self.champion == self.version else "")]
        for record, files in self.lineage.sources.items():
            lines += [f"  source    {path}  {f.size} bytes  sha256 {f.sha256}  ({record})" for path, f in files.items()]
        config = self.config.model_dump(mode="json", exclude_defaults=True)
        lines += [
            f"  dataset   {self.dataset.fingerprint}  {self.dataset.rows} rows  {self.dataset_uri}",
            *([f"  tft       {t.model} version {t.version}  manifest sha256 {t.manifest_sha256}"] if (t := self.tft) else []),
            f"  config    {json.dumps(config) if config else 'all defaults'}",
            f"  code      {self.code_version}",
            f"  training  {self.stop_reason} after {self.epochs} epochs, {self.weights} weights, run {self.run_key}",
            *(f"  weights   {name}  {f.size} bytes  sha256 {f.sha256}" for name, f in sorted(self.files.items())),
            f"  run again on this machine: {self.lineage.rerun}",
            *(f"    {text}" for text in self.lineage.differences),
            *(change_line(self.model, change) for change in self.history),
        ]
        return "\n".join(lines)


def show(store: ObjectStore, model: str, which: int | Literal["champion"]) -> ShownModel:
    """A version with its lineage and the champion's history."""
    manifest = read_manifest(store, model, which)
    changes = history(store, model)
    champion = changes[-1].to_version if changes else None
    return ShownModel(**dict(manifest), lineage=lineage(manifest), champion=champion, history=changes)


def lineage(manifest: ModelManifest) -> Lineage:
    """Where a version comes from, as far as its dataset's store still tells, and whether it could be made again here."""
    differences, possible = [], True
    try:
        store, key = split_uri(manifest.dataset_uri, "datasets")
        if read_dataset(manifest.dataset_uri) != manifest.dataset:
            raise ArtifactIntegrityError(f"{manifest.dataset_uri}: not the dataset of the manifest")
        for name, file in manifest.dataset.files.items():
            info = store.head(f"{key.rpartition('/')[0]}/{name}")
            if info is None or info.size != file.size:
                raise ArtifactIntegrityError(f"dataset part {name} is missing or has another size")
        sources = dict(_sources(store, manifest.dataset.fingerprint))
    except (StoreError, ArtifactIntegrityError) as error:
        possible, sources = False, {}
        differences.append(f"dataset: {error}")
    if manifest.code_version != code_version():
        differences.append(f"code: {manifest.code_version} then, {code_version()} here")
    for name, then in manifest.versions.items():
        if (here := _version_here(name)) != then:
            differences.append(f"{name}: {then} then, {here} here")
    rerun: Any = ("the same bits" if not differences else "other bits") if possible else "not possible"
    return Lineage(sources=sources, rerun=rerun, differences=differences)


def _version_here(name: str) -> str:
    try:
        return platform.python_version() if name == "python" else version(name)
    except PackageNotFoundError:
        return "missing"


def _sources(store: ObjectStore, fingerprint: str) -> Iterator[tuple[str, dict[str, StoredFile]]]:
    for key in store.list("ingests/"):
        if key.count("/") == 1 and key.endswith(".json"):
            record = json.loads(store.get(key))
            if record["dataset"] == fingerprint:
                yield key, {path: StoredFile(sha256=f["sha256"], size=f["size"]) for path, f in record["sources"].items()}


def fetch(store: ObjectStore, model: str, which: int | Literal["champion"], folder: Path) -> ModelManifest:
    """Bring every file of a version to `folder`, each verified before it stands there under its name, and build the network
    from the final one. Raises ArtifactIntegrityError, and CheckpointError when weights and configuration do not fit."""
    import models.dqn.training
    import models.tft.training

    manifest = read_manifest(store, model, which)
    for name in manifest.files:
        fetch_file(store, manifest, name, folder)
    snapshot = load_published(store, manifest, folder)
    {"tft": models.tft.training, "dqn": models.dqn.training}[manifest.family].rebuilt(snapshot)
    return manifest
