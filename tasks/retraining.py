"""One training, from claim to promotion: what the retrain flows do, for either family. The same dataset,
configuration and code are trained once, whoever asks (a person, a trigger, a retry). Uses Prefect."""

from __future__ import annotations

import uuid
from typing import Any

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from pydantic import BaseModel, ConfigDict

from models.manifest import Family, ModelConfig, ModelManifest, StopReason, StoredFile
from tasks import default_store
from tasks.artifacts import (
    RunClaim,
    TrainedRun,
    champion_version,
    claim_run,
    decide_promotion,
    promote,
    publish_run,
    read_dataset,
    run_key,
    verify,
)
from tasks.report import show_lineage
from tasks.storage import ObjectStore, StoreError, open_store


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
    from prefect.runtime import flow_run

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


def retrain(
    train: Task[..., TrainedRun], config: ModelConfig, dataset_uri: str, store: str | None, model: str, again: bool
) -> RetrainReport:
    """Train with `train`, publish and decide on promotion, unless this run key is published already: then its files are
    verified and shown."""
    logger = get_run_logger()
    opened = open_store(default_store(store))
    dataset = read_dataset(dataset_uri)
    key = run_key(dataset, config, model, again=uuid.uuid4().hex if again else "")
    already = True
    with claim_run(opened, key, model, on_wait=logger.info) as claim:
        if claim.manifest is not None:
            logger.info("%s: already trained as version %d (run key %s)", model, claim.manifest.version, key[:12])
            verify(opened, model, claim.manifest.version)
            manifest = claim.manifest
        else:
            run = train(config, dataset, dataset_uri, opened.uri, key, model)
            manifest = publish(run, opened.uri, claim)
            already = False
    # Also of a version published before: the process may have died between publishing and promoting
    promoted, why = decide_promotion(manifest, opened, config.promotion)
    if promoted:
        promoted = promote(opened, model, manifest.version, rule=config.promotion, why=why)
        if not promoted:  # another version was quicker: its rule decides now
            why = decide_promotion(manifest, opened, config.promotion)[1]
    text = why if why == "champion already" else ("champion: " if promoted else "not promoted: ") + why
    logger.info("%s version %d %s", model, manifest.version, text)
    report = _report(manifest, opened, text, already_trained=already)
    show_lineage(manifest, dataset, report.uri, text)
    if already:
        return report
    emit_event(
        "model.published",
        resource={"prefect.resource.id": f"model.{model}"},
        payload={"model": model, "version": manifest.version, "store": opened.uri, "promoted": promoted, "why": why},
    )
    return report


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
