"""What stands under runs/<run_key>/: the claim, so that one training is made once, and resume states. What is published stands
in tasks/artifacts.py."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from models.checkpoint import CheckpointError, Snapshot, read_checkpoint_bytes
from models.features import canonical_json
from models.manifest import NAME, ModelManifest
from tasks.artifacts import encode, read_manifest
from tasks.storage import ObjectMissing, ObjectStore, StoreError, digest

RESUME_STATES = 3
"""How many resume states of a run are kept."""


class RunClaim:
    """Our hold on a run key. `manifest` is set when the run is published already; otherwise `version` is ours."""

    def __init__(self, store: ObjectStore, key: str, model: str, owner: str) -> None:
        self.store, self.run_key, self.model, self.owner = store, key, model, owner
        self.version = 0
        self.manifest: ModelManifest | None = None
        self._object = f"runs/{key}/claim.json"
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def _update(self, **change: Any) -> None:
        """Change our own record; raises StoreError when it is somebody else's by now."""
        with self._lock:
            for _ in range(20):
                found = self.store.read_for_swap(self._object)
                record = json.loads(found[0]) if found else {}
                if record.get("owner") != self.owner or not found:
                    raise StoreError(f"run {self.run_key[:12]} was taken over by another process")
                record.update(change)
                record["beat"] += 1
                if self.store.swap(self._object, canonical_json(record).encode(), found[1]):
                    return
        raise StoreError(f"run {self.run_key[:12]}: the claim could not be renewed")

    def _keep_beating(self, seconds: float) -> None:
        while not self._stopped.wait(seconds):
            try:
                self._update()
            except StoreError:
                continue  # told apart at the next update that matters: publishing

    def published(self, manifest: ModelManifest) -> None:
        """Record that the run is published: from now on it is never trained again."""
        self._update(state="published", manifest_sha256=digest(encode(manifest)).sha256)
        self.manifest = manifest


@contextmanager
def claim_run(
    store: ObjectStore,
    key: str,
    model: str,
    *,
    beat_seconds: float = 20.0,
    stale_seconds: float = 90.0,
    poll_seconds: float = 3.0,
    on_wait: Callable[[str], None] = lambda text: None,
    flow_run: str = "",
) -> Iterator[RunClaim]:
    """Hold the run key while the block trains and publishes, or get the published manifest.

    A claim held by somebody else is waited for. It is taken over only when its beat has stood still for
    `stale_seconds` of this process's own clock, so clocks of different machines are never compared;
    at once by the same `flow_run` (its id) that is started again: its process before has ended, or loses at publishing.
    """
    if not NAME.fullmatch(model):
        raise ValueError(f"{model!r} is no name for a model: letters, digits, '.', '_' and '-'")
    claim = RunClaim(store, key, model, f"{flow_run}:{uuid.uuid4().hex}")
    _acquire(claim, stale_seconds, poll_seconds, on_wait)
    if claim.manifest is not None:
        yield claim
        return
    thread = threading.Thread(target=claim._keep_beating, args=(beat_seconds,), daemon=True)
    thread.start()
    try:
        yield claim
    finally:
        claim._stopped.set()
        thread.join()
        if claim.manifest is None:  # failed or interrupted: the next one need not wait for the beat to go stale
            with suppress(StoreError):
                claim._update(state="released")


def _acquire(claim: RunClaim, stale: float, poll: float, on_wait: Callable[[str], None]) -> None:
    store = claim.store
    seen: tuple[str, int] | None = None
    since = time.monotonic()
    while True:
        found = store.read_for_swap(claim._object)
        record: dict[str, Any] = json.loads(found[0]) if found else {"version": None, "beat": 0, "state": "released"}
        if record["state"] == "published":
            claim.manifest = read_manifest(store, claim.model, record["version"])
            return
        mark = (record.get("owner", ""), record["beat"])
        if mark != seen:
            if seen is None and record["state"] == "training":
                on_wait(f"run {claim.run_key[:12]} is being trained elsewhere; waiting for it")
            seen, since = mark, time.monotonic()
        flow_run = claim.owner.partition(":")[0]
        started_again = bool(flow_run) and record.get("owner", "").startswith(f"{flow_run}:")
        if record["state"] == "released" or started_again or time.monotonic() - since > stale:
            number = record["version"] or _next_version(store, claim.model, claim.run_key)
            mine = {
                "owner": claim.owner,
                "beat": record["beat"] + 1,
                "version": number,
                "model": claim.model,
                "state": "training",
            }
            if store.swap(claim._object, canonical_json(mine).encode(), found[1] if found else None):
                claim.version = number
                return
            continue
        time.sleep(poll)


def _next_version(store: ObjectStore, model: str, key: str) -> int:
    """The next number of the model's sequence, by compare-and-swap. A crash right after it leaves a hole, no more."""
    name = f"models/{model}/sequence.json"
    for _ in range(1000):
        found = store.read_for_swap(name)
        number = json.loads(found[0])["last"] + 1 if found else 1
        data = canonical_json({"last": number, "run_key": key}).encode()
        if store.swap(name, data, found[1] if found else None):
            return number
    raise StoreError(f"{name}: no version number to be had")


def save_resume(store: ObjectStore, key: str, label: str, data: bytes) -> None:
    """Keep a resume state under its label and content hash; labels sort by progress. The latest few are kept: one may turn
    out to be damaged. Who may not delete leaves older ones to the garbage collection."""
    place = f"runs/{key}/resume/"
    name = f"{place}{label}-{digest(data).sha256}.safetensors"
    store.put_if_absent(name, data)
    with suppress(StoreError):
        # Later ones are damaged: they were passed over, and say nothing of how many good ones there are
        for old in [key for key in sorted(store.list(place)) if key <= name][:-RESUME_STATES]:
            store.delete(old)


def save_fold(store: ObjectStore, key: str, fold: int, data: bytes) -> None:
    """Keep the TFT of one fold of a run, by number and content, in the place of one of an earlier try."""
    place = f"runs/{key}/folds/{fold:03d}-"
    name = f"{place}{digest(data).sha256}.safetensors"
    store.put_if_absent(name, data)
    for old in store.list(place):
        if old != name:
            store.delete(old)


def kept_folds(store: ObjectStore, key: str) -> dict[int, Snapshot]:
    """The TFTs of a run's folds by number, as far as they are kept and whole."""
    found = {}
    for name in sorted(store.list(f"runs/{key}/folds/")):
        number, _, expected = name.rpartition("/")[2].removesuffix(".safetensors").partition("-")
        with suppress(CheckpointError, ObjectMissing):
            found[int(number)] = read_checkpoint_bytes(store.get(name), expected)
    return found


def newest_resume(store: ObjectStore, key: str) -> tuple[Snapshot | None, list[str]]:
    """The newest valid resume state of a run, or None, and a line for every newer one passed over and why."""
    skipped: list[str] = []
    for name in sorted(store.list(f"runs/{key}/resume/"), reverse=True):
        expected = name.removesuffix(".safetensors").rpartition("-")[2]
        try:
            return read_checkpoint_bytes(store.get(name), expected), skipped
        except (CheckpointError, ObjectMissing) as error:
            skipped.append(f"{name.rpartition('/')[2]}: {error}")
    return None, skipped
