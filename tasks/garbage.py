"""What nobody can reach any more in a store: marked from every manifest, claim and alias, swept only when it is older than a
grace period. Nothing else deletes from a store but a training that clears its own older resume states (tasks/runs.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict

from models.manifest import ModelManifest
from tasks.artifacts import read_dataset, read_manifest
from tasks.registry import history, versions
from tasks.runs import RESUME_STATES, newest_resume
from tasks.storage import ObjectStore, StoredObject

HOUR = 3600.0
DAY = 24 * HOUR


class Garbage(BaseModel):
    """Keys that nothing names, oldest reasons first, with bytes in all; `deleted` says whether they are gone now."""

    model_config = ConfigDict(frozen=True)
    deleted: bool
    keys: dict[str, str]
    bytes: int
    unfinished_uploads: list[str]

    def for_people(self) -> str:
        """One line per key with its reason."""
        done = "deleted" if self.deleted else "would be deleted; nothing was: say --apply"
        lines = [f"  {key}  {why}" for key, why in self.keys.items()]
        lines += [f"  {key}  an upload that was never finished" for key in self.unfinished_uploads]
        return "\n".join([*lines, f"{len(lines)} objects, {self.bytes} bytes: {done}"])


def collect(
    store: ObjectStore, *, grace: float = DAY, unfinished_runs: float = 30 * DAY, keep_versions: int | None = None,
    apply: bool = False,
) -> Garbage:  # fmt: skip
    """Find, and with `apply` delete, what no manifest, alias or live run names.

    Nothing younger than `grace` seconds by the store's own clock is touched, nor anything of a run whose claim was renewed
    within it (an owner renews every 20 s). A run that was never published goes after `unfinished_runs` seconds without a
    sign of life. With `keep_versions`, versions before the latest so many go too, save those an alias names or named.
    """
    found: dict[str, tuple[StoredObject, str]] = {}
    for key, why in _garbage(store, unfinished_runs, keep_versions, grace):
        found.setdefault(key.key, (key, why))
    if apply:
        for name in found:
            store.delete(name)
    return Garbage(
        deleted=apply,
        keys={name: why for name, (_, why) in found.items()},
        bytes=sum(entry.size for entry, _ in found.values()),
        unfinished_uploads=[entry.key for entry in store.unfinished(grace, apply)],
    )


def _garbage(
    store: ObjectStore, unfinished_runs: float, keep_versions: int | None, grace: float
) -> Iterator[tuple[StoredObject, str]]:
    """Objects to delete with the reason, in the order of deletion: what makes a thing visible goes first."""
    runs: dict[str, list[StoredObject]] = {}
    for entry in store.entries("runs/"):
        runs.setdefault(entry.key.split("/")[1], []).append(entry)
    claims = {key: _json(store, f"runs/{key}/claim.json") for key in runs}
    alive = {key for key, entries in runs.items() if any(e.key.endswith("/claim.json") and e.age < grace for e in entries)}
    places: dict[tuple[str, str], str] = {
        (str(c["model"]), str(c["version"])): key for key, c in claims.items() if c and c["state"] != "published"
    }
    models: dict[str, list[StoredObject]] = {}
    for entry in store.entries("models/"):
        models.setdefault(entry.key.split("/")[1], []).append(entry)
    for model, entries in models.items():
        yield from _of_model(store, model, entries, places, alive, keep_versions, grace)
    for key, entries in runs.items():
        claim = claims[key]
        if key not in alive:
            yield from _of_run(store, key, entries, claim, grace, unfinished_runs)
    yield from _of_datasets(store, grace)


def _of_model(
    store: ObjectStore, model: str, entries: list[StoredObject], places: dict[tuple[str, str], str], alive: set[str],
    keep_versions: int | None, grace: float,
) -> Iterator[tuple[StoredObject, str]]:  # fmt: skip
    published = versions(store, model)
    chain = history(store, model)
    named = {change.to_version for change in chain} | {change.from_version for change in chain}
    late = published[-keep_versions:] if keep_versions else []
    dropped = [] if keep_versions is None else [n for n in published if n not in named and n not in late]
    kept: dict[str, ModelManifest] = {str(n): read_manifest(store, model, n) for n in published if n not in dropped}
    changes = {str(change.sequence) for change in chain}
    for number in map(str, dropped):
        mine = [e for e in entries if e.key.startswith(f"models/{model}/{number}/")]
        if min(e.age for e in mine) >= grace:
            run = f"runs/{read_manifest(store, model, int(number)).run_key}/"
            # The claim first: without it the run may be trained again, while `already trained` must lead to a version
            records = sorted(store.entries(run), key=lambda e: not e.key.endswith("/claim.json"))
            for entry in [*records, *sorted(mine, key=lambda e: not e.key.endswith("/manifest.json"))]:
                yield entry, f"of version {number}, before the latest {keep_versions}"
    for entry in entries:
        parts = entry.key.split("/")[2:]
        if entry.age < grace or len(parts) < 2:
            continue
        if parts[0] == "history":
            if parts[1].removesuffix(".json") not in changes and parts[1].removesuffix(".json").isdigit():
                yield entry, "a change of the champion that never took place"
        elif parts[0] in kept:
            if parts[1] != "manifest.json" and parts[1] not in kept[parts[0]].files:
                yield entry, "not named by the version's manifest"
        elif int(parts[0]) not in dropped and places.get((model, parts[0])) not in alive:
            yield entry, "of a version that was never published"


def _of_run(
    store: ObjectStore, key: str, entries: list[StoredObject], claim: Any, grace: float, unfinished_runs: float
) -> Iterator[tuple[StoredObject, str]]:
    published = bool(claim) and claim["state"] == "published"
    if not published and min(entry.age for entry in entries) >= unfinished_runs:
        yield from ((entry, "of a run that was never finished") for entry in entries)
        return
    states = sorted(entry.key for entry in entries if "/resume/" in entry.key)
    old = states[: -RESUME_STATES - len(newest_resume(store, key)[1])] if not published and len(states) > RESUME_STATES else []
    for entry in entries:
        if entry.age < grace or entry.key in (f"runs/{key}/claim.json", f"runs/{key}/manifest.json"):
            continue
        if published:
            yield entry, "of a run that is published"
        elif entry.key in old:
            yield entry, "an older resume state"


def _of_datasets(store: ObjectStore, grace: float) -> Iterator[tuple[StoredObject, str]]:
    folders: dict[str, list[StoredObject]] = {}
    for entry in store.entries("datasets/"):
        folders.setdefault(entry.key.rpartition("/")[0], []).append(entry)
    for place, entries in folders.items():
        whole = any(entry.key == f"{place}/dataset.json" for entry in entries)
        named = {"dataset.json", "profile.json", *read_dataset(f"{store.uri}/{place}/dataset.json").files} if whole else set()
        if min(entry.age for entry in entries) >= grace:
            for entry in entries:
                if entry.key.rpartition("/")[2] not in named:
                    yield entry, "not named by the dataset" if whole else "of a dataset that was never finished"


def _json(store: ObjectStore, key: str) -> Any:
    found = store.read_for_swap(key)
    return json.loads(found[0]) if found else None
