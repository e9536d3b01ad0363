"""One training, from claim to promotion: what the retrain flows do, for either family. The same dataset,
configuration and code are trained once, whoever asks (a person, a trigger, a retry). Uses Prefect."""

from __future__ import annotations

import contextlib
import re
import uuid
from typing import Any, Literal

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict

from models.manifest import Family, ModelConfig, ModelManifest, StopReason, StoredFile
from tasks import default_store, forecastle_home
from tasks.artifacts import TrainedRun, champion_version, publish_run, read_dataset, read_manifest, run_key, tft_source, verify
from tasks.promotion import Decision, challenge
from tasks.registry import versions
from tasks.report import show_comparison, show_lineage, show_versions
from tasks.run_record import stop_crash_loop
from tasks.runs import RunClaim, claim_run
from tasks.storage import ArtifactIntegrityError, ObjectMissing, ObjectStore, StoreError, open_store

Resume = Literal["auto", "never"]
RUN_KEY = re.compile("[0-9a-f]{6,64}")
VERSIONS_SHOWN = 10


class RetrainReport(BaseModel):
    """What a retraining led to. `metrics` are the published version's own."""

    model_config = ConfigDict(frozen=True)
    model: str
    version: int
    family: Family
    files: dict[str, StoredFile]
    metrics: dict[str, Any]
    epochs: int
    stop_reason: StopReason
    promoted: bool
    promotion: str
    already_trained: bool
    run_key: str
    uri: str

    def for_people(self) -> str:
        """A few lines for a terminal."""
        files = "\n".join(f"    {name}  {f.size} bytes  sha256 {f.sha256}" for name, f in sorted(self.files.items()))
        state = "already trained, verified" if self.already_trained else f"{self.stop_reason} after {self.epochs} epochs"
        return f"{self.model} version {self.version}: {state}; {self.promotion}\n  {self.uri}\n{files}"


def run_name() -> str:
    """`retrain-tft[fae29117]`: the flow and the start of the dataset's fingerprint."""
    uri = str((flow_run.parameters or {}).get("dataset", ""))
    return f"{flow_run.flow_name}[{uri.rpartition('/dataset.json')[0].rpartition('/')[2][:8] or uri}]"


def _is_store_error(task: Any, run: Any, state: Any) -> bool:
    return isinstance(state.result(raise_on_failure=False), StoreError)


@task(
    name="publish",
    task_run_name="publish[{run.model}]",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=[1, 5, 15],
    retry_condition_fn=_is_store_error,
)
def publish(run: TrainedRun, store: str, claim: RunClaim) -> ModelManifest:
    """Publish the run's files, the manifest last. Retried: what is already there with the same bytes is left."""
    return publish_run(run, open_store(store), claim)


@task(
    name="promote",
    task_run_name="promote[{manifest.model}]",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=[1, 5, 15],
    retry_condition_fn=_is_store_error,
)
def decide_on_promotion(manifest: ModelManifest, store: str) -> Decision:
    """Hold the version against the champion by the rule of its configuration, and promote it or not."""
    decision = challenge(open_store(store), manifest, manifest.config.promotion)
    if decision.comparisons:
        show_comparison(manifest, decision)
    return decision


def retrain(
    train: Task[..., TrainedRun],
    config: ModelConfig,
    dataset_uri: str,
    store: str | None,
    model: str,
    again: bool,
    resume: Resume = "auto",
) -> RetrainReport:
    """Train with `train`, publish and decide on promotion, unless this run key is published already: then its files are
    verified and shown."""
    stop_crash_loop()
    logger = get_run_logger()
    opened = open_store(default_store(store))
    dataset = read_dataset(dataset_uri)
    tft = tft_source(opened, config)
    key = run_key(dataset, config, model, again=uuid.uuid4().hex if again else "", tft=tft)
    already = True
    with claim_run(opened, key, model, on_wait=logger.info, flow_run=flow_run.root_flow_run_id or "") as claim:
        if claim.manifest is not None:
            logger.info("%s: already trained as version %d (run key %s)", model, claim.manifest.version, key[:12])
            verify(opened, model, claim.manifest.version)
            manifest = claim.manifest
        else:
            given = {} if tft is None else {"tft": tft}
            run = train(config, dataset, dataset_uri, opened.uri, key, model, resume, **given)
            manifest = publish(run, opened.uri, claim)
            already = False
    return settle(manifest, opened, already=already)


def publish_kept(key: str, store: str | None) -> RetrainReport:
    """Publish a finished run whose files stand on this machine; `key` may be the start of its run key.

    Raises ObjectMissing when no run, or more than one, begins so."""
    opened = open_store(default_store(store))
    found = sorted((forecastle_home() / "runs").glob(f"{key}*/run.json")) if RUN_KEY.fullmatch(key) else []
    if len(found) != 1:
        raise ObjectMissing(f"{len(found)} finished runs here begin with {key!r}; they stand in {forecastle_home() / 'runs'}")
    run = TrainedRun.model_validate_json(found[0].read_bytes())
    with claim_run(opened, run.run_key, run.model, on_wait=get_run_logger().info) as claim:
        if already := claim.manifest is not None:
            manifest = verify(opened, run.model, claim.manifest.version)
        else:
            manifest = publish(run.model_copy(update={"folder": str(found[0].parent)}), opened.uri, claim)
    return settle(manifest, opened, already=already)


def settle(manifest: ModelManifest, store: ObjectStore, *, already: bool) -> RetrainReport:
    """Decide on the promotion of a published version, and tell all of it. Also of a version published before: the process may
    have died between publishing and promoting."""
    decision = decide_on_promotion(manifest, store.uri)
    state = "champion: " if decision.promoted else "not promoted: "
    text = decision.why if decision.why == "champion already" else state + decision.why
    get_run_logger().info("%s version %d %s", manifest.model, manifest.version, text)
    report = _report(manifest, store, text, already_trained=already)
    show_lineage(manifest, manifest.dataset, report.uri, text)
    show_versions(last_versions(store, manifest), champion_version(store, manifest.model))
    if not already:
        emit_event(
            "model.published",
            resource={
                "prefect.resource.id": f"model.{manifest.model}", "forecastle.promoted": str(decision.promoted).lower(),
            },
            payload={
                "model": manifest.model, "version": manifest.version, "store": store.uri, "promoted": decision.promoted,
                "why": decision.why,
            },
        )  # fmt: skip
    return report


def last_versions(store: ObjectStore, manifest: ModelManifest) -> list[ModelManifest]:
    """The model's newest manifests, newest first, ten at most; a damaged one of old is told by `models verify`, not here."""
    found = []
    for number in versions(store, manifest.model)[: -VERSIONS_SHOWN - 1 : -1]:
        with contextlib.suppress(ArtifactIntegrityError):
            found.append(manifest if number == manifest.version else read_manifest(store, manifest.model, number))
    return found


def _report(manifest: ModelManifest, store: ObjectStore, promotion: str, *, already_trained: bool) -> RetrainReport:
    return RetrainReport(
        model=manifest.model,
        version=manifest.version,
        family=manifest.family,
        files=manifest.files,
        metrics=manifest.metrics,
        epochs=manifest.epochs,
        stop_reason=manifest.stop_reason,
        promoted=champion_version(store, manifest.model) == manifest.version,
        promotion=promotion,
        already_trained=already_trained,
        run_key=manifest.run_key,
        uri=f"{store.uri.rstrip('/')}/models/{manifest.model}/{manifest.version}",
    )
