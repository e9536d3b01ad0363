"""What stands in a store and in which order it gets there: datasets, run claims, published models, the champion alias,
resume states. Layout and protocol: docs/operations.md. Objects and conditional writes: tasks/storage.py."""

from __future__ import annotations

import hashlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from models.checkpoint import CheckpointError, Snapshot, read_checkpoint_bytes
from models.features import canonical_json
from models.manifest import NAME, Checkpoint, Dataset, Family, ModelConfig, ModelManifest, StopReason, StoredFile
from tasks.storage import ArtifactIntegrityError, ObjectMissing, ObjectStore, StoreError, digest, split_uri

MANIFEST_LIMIT = 4 * 2**20
ALIAS_LIMIT = 64 * 2**10
VERSION_LIMIT = 1_000_000
INT8_LIMIT = 0.02
"""How much worse than its float weights, relative to their loss, a model with int8 weights may be and become champion."""


class TrainedRun(BaseModel):
    """A finished training whose files stand in `folder` on this machine, not yet published."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    run_key: str
    model: str
    family: Family
    folder: str
    checkpoints: tuple[Checkpoint, ...]
    config: ModelConfig
    dataset: Dataset
    dataset_uri: str
    metrics: dict[str, Any]
    epochs: int
    stop_reason: StopReason
    best_epoch: int | None
    weights: Literal["best", "last"]
    versions: dict[str, str]
    extras: tuple[str, ...] = ("report.html",)  # files in `folder` that are published beside the checkpoints


def encode(value: BaseModel) -> bytes:
    """Canonical JSON bytes of a value: what is hashed is what is stored."""
    return canonical_json(value.model_dump(mode="json")).encode()


def read_dataset(uri: str) -> Dataset:
    """The dataset behind the URI of its dataset.json. Raises ArtifactIntegrityError when it is none."""
    store, key = split_uri(uri, "datasets")
    try:
        dataset = Dataset.model_validate_json(store.get(key, limit=MANIFEST_LIMIT))
    except ValidationError as error:
        raise ArtifactIntegrityError(f"{uri}: no dataset.json of this project: {error}") from error
    if f"/{dataset.fingerprint}/" not in uri:
        raise ArtifactIntegrityError(f"{uri}: holds the dataset {dataset.fingerprint}")
    return dataset


@cache
def code_version() -> str:
    """Package version and a digest of the sources that decide a model's numbers (not of docs or flows)."""
    root = Path(__file__).parent.parent
    total = hashlib.sha256()
    for path in sorted([*(root / "models").rglob("*.py"), root / "tasks" / "series.py"]):
        total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    try:
        release = version("forecastle")
    except PackageNotFoundError:
        release = "source"
    return f"{release}+{total.hexdigest()[:12]}"


def run_key(dataset: Dataset, config: ModelConfig, model: str, again: str = "") -> str:
    """sha256 of everything a training depends on; `again` makes another one of the same."""
    parts = {
        "dataset": dataset.fingerprint,
        "contract": dataset.contract.fingerprint,
        "config": config.model_dump(mode="json"),
        "model": model,
        "code": code_version(),
        **({"again": again} if again else {}),
    }
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()


# --- the claim: one training per run key ---------------------------------------------------------------------------


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
        self._update(state="published")
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
) -> Iterator[RunClaim]:
    """Hold the run key while the block trains and publishes, or get the published manifest.

    A claim held by somebody else is waited for. It is taken over only when its beat has stood still for
    `stale_seconds` of this process's own clock, so clocks of different machines are never compared.
    """
    if not NAME.fullmatch(model):
        raise ValueError(f"{model!r} is no name for a model: letters, digits, '.', '_' and '-'")
    claim = RunClaim(store, key, model, uuid.uuid4().hex)
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
        if record["state"] == "released" or time.monotonic() - since > stale:
            number = record["version"] or _next_version(store, claim.model, claim.run_key)
            mine = {"owner": claim.owner, "beat": record["beat"] + 1, "version": number, "state": "training"}
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


# --- publication ---------------------------------------------------------------------------------------------------


def publish_run(run: TrainedRun, store: ObjectStore, claim: RunClaim) -> ModelManifest:
    """Publish: files, each read back and compared, then the manifest, then the claim's record.

    A second try after a crash at any point finishes the same version with the same bytes, even where training again came
    to other bits: files are kept under runs/<run_key>/files/ by content before the one manifest that names them is built
    there, and are published from there. Raises ValueError for an interrupted run, StoreConflict on other bytes.
    """
    if run.stop_reason == "interrupted":
        raise ValueError("an interrupted run is never published; run it again to continue")
    folder = Path(run.folder)
    files = {c.name: StoredFile(sha256=c.sha256, size=c.size) for c in run.checkpoints}
    files |= {name: digest(folder / name) for name in run.extras}
    for name, file in files.items():
        if digest(folder / name) != file:
            raise ArtifactIntegrityError(f"{folder / name}: not the bytes that training wrote ({file.sha256})")
        store.put_if_absent(kept_file(run.run_key, file, name), folder / name)
    final = next(c.name for c in run.checkpoints if c.is_final)
    manifest = ModelManifest(
        version=claim.version, files=files, final=final, code_version=code_version(),
        **run.model_dump(exclude={"folder", "checkpoints", "extras"}),
    )  # fmt: skip
    data = _once(store, f"runs/{run.run_key}/manifest.json", lambda: encode(manifest))
    manifest = ModelManifest.model_validate_json(data)
    place = f"models/{run.model}/{manifest.version}"
    for name, file in manifest.files.items():
        key = f"{place}/{name}"
        kept = kept_file(run.run_key, file, name)
        store.put_if_absent(key, _same(store.get(kept, limit=file.size), kept, file))
        _same(store.get(key, limit=file.size), key, file)
    store.put_if_absent(f"{place}/manifest.json", data)
    claim.published(manifest)
    return manifest


def kept_file(key: str, file: StoredFile, name: str) -> str:
    """Where a run keeps a file before it is published: by content, since another machine may come to other bits."""
    return f"runs/{key}/files/{file.sha256[:16]}/{name}"


def _once(store: ObjectStore, key: str, build: Callable[[], bytes]) -> bytes:
    """The object's bytes as first built, whoever built them."""
    try:
        return store.get(key)
    except ObjectMissing:
        data = build()
        store.put_if_absent(key, data)
        return data


def _same(data: bytes, key: str, expected: StoredFile) -> bytes:
    if (found := digest(data)) != expected:
        raise ArtifactIntegrityError(
            f"{key}: sha256 {found.sha256}, {found.size} bytes; expected {expected.sha256}, {expected.size} bytes"
        )
    return data


def read_manifest(store: ObjectStore, model: str, which: int | Literal["champion"]) -> ModelManifest:
    """The manifest of a version, or of the champion (whose alias holds the manifest's sha256).

    Raises ObjectMissing, and ArtifactIntegrityError when the bytes are not what was published.
    """
    expected: str | None = None
    if which == "champion":
        alias = _champion(store, model)
        if alias is None:
            raise ObjectMissing(f"{model} has no champion in {store.uri}; name a version, or promote one")
        which, expected = int(alias[0]["version"]), alias[0]["manifest_sha256"]
    key = f"models/{model}/{which}/manifest.json"
    data = store.get(key, limit=MANIFEST_LIMIT)
    if expected is not None and (found := digest(data).sha256) != expected:
        raise ArtifactIntegrityError(f"{key}: sha256 {found}, the champion alias says {expected}")
    try:
        manifest = ModelManifest.model_validate_json(data)
    except ValidationError as error:
        raise ArtifactIntegrityError(f"{key}: no manifest of this project: {error}") from error
    if (manifest.model, manifest.version) != (model, which) or manifest.final not in manifest.files:
        raise ArtifactIntegrityError(f"{key}: speaks of {manifest.model} version {manifest.version}")
    if odd := [name for name in manifest.files if not NAME.fullmatch(name)]:
        raise ArtifactIntegrityError(f"{key}: illegal file names {odd}")
    return manifest


def fetch_file(store: ObjectStore, manifest: ModelManifest, name: str, folder: Path) -> Path:
    """A published file, downloaded to `folder` and verified. Raises ArtifactIntegrityError."""
    path = folder / name
    store.download(f"models/{manifest.model}/{manifest.version}/{name}", path, manifest.files[name])
    return path


def verify(store: ObjectStore, model: str, number: int) -> ModelManifest:
    """Read every byte of a version. Raises ArtifactIntegrityError naming file, expected and found."""
    manifest = read_manifest(store, model, number)
    for name, file in manifest.files.items():
        key = f"models/{model}/{number}/{name}"
        try:
            _same(store.get(key), key, file)
        except ObjectMissing as error:
            raise ArtifactIntegrityError(f"{key}: named by the manifest, but not there") from error
    return manifest


# --- champion ------------------------------------------------------------------------------------------------------


def _champion(store: ObjectStore, model: str) -> tuple[dict[str, Any], str] | None:
    found = store.read_for_swap(f"models/{model}/champion.json")
    if found is None:
        return None
    try:
        record = json.loads(found[0])
        int(record["version"]), str(record["manifest_sha256"]), int(record["sequence"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactIntegrityError(f"models/{model}/champion.json is damaged: {error}") from error
    return record, found[1]


def champion_version(store: ObjectStore, model: str) -> int | None:
    """The champion's version, or None."""
    found = _champion(store, model)
    return int(found[0]["version"]) if found else None


def decide_promotion(manifest: ModelManifest, store: ObjectStore, rule: str) -> tuple[bool, str]:
    """Whether a freshly published version becomes champion, and why."""
    current = champion_version(store, manifest.model)
    if manifest.stop_reason == "non_finite_loss":
        return False, "the loss was not finite"
    if rule == "never":
        return False, "rule is never"
    if manifest.family == "dqn" and not manifest.metrics.get("beats_flat"):
        return False, "does not beat flat on the test block"
    if (int8 := manifest.metrics.get("quantisation")) is not None:
        if int8["delta"] is None:
            return False, "no validation block to compare the int8 weights on"
        if not int8["delta"] <= INT8_LIMIT:
            return False, f"int8 weights lose {int8['delta']:.1%} on the validation block (limit {INT8_LIMIT:.0%})"
    if current == manifest.version:
        return False, "champion already"
    if current is not None and current > manifest.version:
        return False, f"the later version {current} is champion"
    if current is None:
        return True, "first version that qualifies"
    if rule == "always":
        return True, "rule is always"
    return False, f"no bars after both trainings to compare it with champion {current} on (rule better)"


def promote(store: ObjectStore, model: str, number: int, *, rule: str, why: str) -> bool:
    """Make a verified version the champion; False when it is already, or when its rule no longer holds: with `better`
    and `always` the rule is asked again at every try, so that of two promoters at once none goes back silently.

    The history entry is written before the swap, under the sequence number that the swap will carry: a crash in
    between leaves an entry whose swap never happened, which the next promotion overtakes by taking the next number.
    The record inside the alias names the last one that did happen, so the true history is the chain of `previous`.
    """
    manifest = verify(store, model, number)
    sha256 = digest(store.get(f"models/{model}/{number}/manifest.json")).sha256
    for _ in range(100):
        found = _champion(store, model)
        record: dict[str, Any] = found[0] if found else {"version": None, "sequence": 0}
        etag = found[1] if found else None
        if record["version"] == number:
            return False
        if rule in ("better", "always") and not decide_promotion(manifest, store, rule)[0]:
            return False
        sequence = int(record["sequence"]) + 1
        while True:
            entry = {
                "sequence": sequence, "previous": record["sequence"] or None, "from": record["version"], "to": number,
                "rule": rule, "why": why, "writer": uuid.uuid4().hex,
            }  # fmt: skip
            try:
                if store.put_if_absent(f"models/{model}/history/{sequence}.json", canonical_json(entry).encode()):
                    break
            except StoreError as error:
                if type(error).__name__ != "StoreConflict":
                    raise
            sequence += 1
        alias = {"version": number, "manifest_sha256": sha256, "sequence": sequence, "previous": record["version"]}
        if store.swap(f"models/{model}/champion.json", canonical_json(alias).encode(), etag):
            return True
    raise StoreError(f"{model}: the champion kept changing; try again")


# --- resume states -------------------------------------------------------------------------------------------------


def save_resume(store: ObjectStore, key: str, label: str, data: bytes) -> None:
    """Keep a resume state under its label and content hash; labels sort by progress."""
    store.put_if_absent(f"runs/{key}/resume/{label}-{digest(data).sha256}.safetensors", data)


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
