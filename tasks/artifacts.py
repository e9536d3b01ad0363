"""What is published and in which order it gets there: datasets, versions of models, the champion alias as readers see it.
Claims and resume states stand in tasks/runs.py, what changes the alias in tasks/registry.py, objects and conditional writes in
tasks/storage.py. Layout and protocol: docs/registry.md."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from models.checkpoint import CheckpointError, Snapshot, load_checkpoint
from models.dqn.config import DQNConfig
from models.features import canonical_json
from models.manifest import NAME, Checkpoint, Dataset, Family, ModelConfig, ModelManifest, StopReason, StoredFile, TFTSource
from models.tft.config import TFTConfig
from tasks.storage import ArtifactIntegrityError, ObjectMissing, ObjectStore, digest, split_uri

if TYPE_CHECKING:
    from tasks.runs import RunClaim

MANIFEST_LIMIT = 4 * 2**20


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
    tft: TFTSource | None = None
    extras: tuple[str, ...] = ("report.html",)  # files in `folder` that are published beside the checkpoints


class Champion(BaseModel):
    """The alias that readers follow: a version, its manifest's sha256, and the history entry that made it so.
    `previous` is the version it took the place of."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    version: int = Field(ge=1)
    manifest_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    sequence: int = Field(ge=1)
    previous: int | None


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


def run_key(dataset: Dataset, config: ModelConfig, model: str, again: str = "", tft: TFTSource | None = None) -> str:
    """sha256 of everything a training depends on, the TFT an agent's forecasts are made like among it; `again` makes another one
    of the same."""
    parts = {
        "dataset": dataset.fingerprint,
        "contract": dataset.contract.fingerprint,
        "config": config.model_dump(mode="json"),
        "model": model,
        "code": code_version(),
        **({"again": again} if again else {}),
        **({"tft": tft.model_dump(mode="json")} if tft else {}),
    }
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()


# --- publication ---------------------------------------------------------------------------------------------------


def publish_run(run: TrainedRun, store: ObjectStore, claim: RunClaim) -> ModelManifest:
    """Publish: files, each read back and compared, then the manifest, then the claim's record.

    A second try after a crash at any point finishes the same version with the same bytes, even where training again came
    to other bits: files are kept under runs/<run_key>/files/ by content before the one manifest that names them is built
    there, and are published from there. Raises ValueError for an interrupted run, ArtifactIntegrityError when a file is not
    what training wrote, StoreConflict on other bytes in the store.
    """
    if run.stop_reason == "interrupted":
        raise ValueError("an interrupted run is never published; run it again to continue")
    folder = Path(run.folder)
    files = {c.name: StoredFile(sha256=c.sha256, size=c.size) for c in run.checkpoints}
    files |= {name: digest(folder / name) for name in run.extras}
    for name, file in files.items():
        store.put_if_absent(kept_file(run.run_key, file, name), folder / name, file)
    final = next(c.name for c in run.checkpoints if c.is_final)
    manifest = ModelManifest(
        version=claim.version, files=files, final=final, code_version=code_version(),
        **run.model_dump(exclude={"folder", "checkpoints", "extras"}),
    )  # fmt: skip
    data = _once(store, f"runs/{run.run_key}/manifest.json", lambda: encode(manifest))
    manifest = ModelManifest.model_validate_json(data)
    place = f"models/{run.model}/{manifest.version}"
    with tempfile.TemporaryDirectory(prefix="forecastle-") as temporary:
        for name, file in manifest.files.items():
            path = folder / name
            if files.get(name) != file:  # the manifest is of an earlier try, and so are its files
                path = Path(temporary) / name
                store.download(kept_file(run.run_key, file, name), path, file)
            store.put_if_absent(f"{place}/{name}", path, file)
    for name, file in manifest.files.items():  # as late as can be: a file found there was nobody's until the manifest
        store.check(f"{place}/{name}", file)
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


def read_manifest(store: ObjectStore, model: str, which: int | Literal["champion"]) -> ModelManifest:
    """The manifest of a version, or of the champion: its sha256 stands in the record of its publication, or in the alias.

    Raises ObjectMissing, and ArtifactIntegrityError when the bytes are not what was published.
    """
    expected: str | None = None
    if which == "champion":
        alias = read_champion(store, model)
        if alias is None:
            raise ObjectMissing(f"{model} has no champion in {store.uri}; name a version, or promote one")
        which, expected = alias[0].version, alias[0].manifest_sha256
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
    if expected is None:
        claim = store.read_for_swap(f"runs/{manifest.run_key}/claim.json")
        record = json.loads(claim[0]) if claim else {}
        # Between manifest and record stands the crash that a second try of the publisher repairs
        if record.get("state") == "published" and record["manifest_sha256"] != (sha256 := digest(data).sha256):
            raise ArtifactIntegrityError(
                f"{key}: sha256 {sha256}, the record of publication expected {record['manifest_sha256']}"
            )
    return manifest


def read_champion(store: ObjectStore, model: str) -> tuple[Champion, str] | None:
    """The alias and the tag that a swap compares, or None before the first promotion. Raises ArtifactIntegrityError."""
    key = f"models/{model}/champion.json"
    found = store.read_for_swap(key)
    if found is None:
        return None
    try:
        return Champion.model_validate_json(found[0]), found[1]
    except ValidationError as error:
        raise ArtifactIntegrityError(f"{key} is damaged: {error}") from error


def tft_source(store: ObjectStore, config: ModelConfig) -> TFTSource | None:
    """The TFT that a run of this configuration takes as an input; None when it takes none. Raises ObjectMissing without a
    champion, ValueError when that is no TFT."""
    if not isinstance(config, DQNConfig) or not config.tft_folds:
        return None
    found = read_champion(store, name := config.tft_model)
    if found is None:
        raise ObjectMissing(
            f"tft_folds needs a champion of {name} in {store.uri}: train and promote one, or name another tft_model"
        )
    manifest = read_manifest(store, name, found[0].version)
    if not isinstance(manifest.config, TFTConfig):
        raise ValueError(f"tft_model {name} is a {manifest.family}, not a TFT")
    return TFTSource(
        model=name, version=manifest.version, manifest_sha256=found[0].manifest_sha256, config=manifest.config
    )  # fmt: skip


def champion_version(store: ObjectStore, model: str) -> int | None:
    """The champion's version, or None."""
    found = read_champion(store, model)
    return found[0].version if found else None


def fetch_file(store: ObjectStore, manifest: ModelManifest, name: str, folder: Path) -> Path:
    """A published file, downloaded to `folder` and verified. Raises ArtifactIntegrityError."""
    path = folder / name
    store.download(f"models/{manifest.model}/{manifest.version}/{name}", path, manifest.files[name])
    return path


def load_published(store: ObjectStore, manifest: ModelManifest, folder: Path) -> Snapshot:
    """The final checkpoint of a version, by way of a verified file in `folder`. Raises ArtifactIntegrityError when it says
    that it is of another config, contract or dataset than the manifest, CheckpointError when it cannot be trusted."""
    path = fetch_file(store, manifest, manifest.final, folder)
    snapshot = load_checkpoint(path, manifest.files[manifest.final].sha256)
    if odd := [name for name in snapshot.tensors if not name.startswith(("network.", "scaler.", "conformal.", "tft."))]:
        raise CheckpointError(f"{path.name}: tensors that no model of this project has: {odd[:4]}")
    # What was written before a setting existed means its default, in the file as in the manifest
    meant = {"config": manifest.config, "contract": manifest.dataset.contract}
    odd = [name for name, value in meant.items() if _read_as(type(value), snapshot.metadata.get(name)) != value]
    odd += ["dataset"] if snapshot.metadata.get("dataset") != manifest.dataset.fingerprint else []
    if odd:
        raise ArtifactIntegrityError(f"{path.name}: made with another {' and '.join(odd)} than its manifest says")
    _claimed(store, manifest)
    return snapshot


def _read_as(kind: type[BaseModel], value: Any) -> BaseModel | None:
    try:
        return kind.model_validate(value)
    except ValidationError:
        return None


def verify(store: ObjectStore, model: str, number: int) -> ModelManifest:
    """Read every byte of a version, the manifest's too. Raises ArtifactIntegrityError naming file, expected and found."""
    manifest = read_manifest(store, model, number)
    for name, file in manifest.files.items():
        key = f"models/{model}/{number}/{name}"
        try:
            store.check(key, file)
        except ObjectMissing as error:
            raise ArtifactIntegrityError(f"{key}: named by the manifest, but not there") from error
    _claimed(store, manifest)
    return manifest


def _claimed(store: ObjectStore, manifest: ModelManifest) -> None:
    """Raises ArtifactIntegrityError for a manifest of a run that nobody claimed: then nothing says what its bytes should be."""
    if store.head(f"runs/{manifest.run_key}/claim.json") is None:
        place = f"models/{manifest.model}/{manifest.version}/manifest.json"
        raise ArtifactIntegrityError(f"{place}: of a run that nobody claimed ({manifest.run_key[:12]})")
