"""Ingest: Parquet in, validated dataset out."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict

from models.config import IngestConfig
from models.features import MARKET_FEATURES, FeatureContract
from models.manifest import Dataset, StoredFile
from models.tft.config import TFTConfig
from tasks import default_store, forecastle_home
from tasks.datasets import ingest_record, write_dataset
from tasks.drift import check_drift, keep_profile, show_drift
from tasks.expectations import DataContractError, validate_features
from tasks.leaks import check_leaks
from tasks.report import IngestLog, link_data_docs, show_validation, whole_source_refused
from tasks.run_record import stop_crash_loop
from tasks.staging import stage_parquet
from tasks.storage import StoreError, open_store
from tasks.suites import check_suites

stage = task(name="stage-parquet", cache_policy=NO_CACHE)(stage_parquet)
run_suites = task(name="run-suites", cache_policy=NO_CACHE)(check_suites)
look_for_leaks = task(name="check-leaks", cache_policy=NO_CACHE)(check_leaks)
look_for_drift = task(name="check-drift", cache_policy=NO_CACHE)(check_drift)
validate = task(name="validate-features", cache_policy=NO_CACHE)(validate_features)
retried: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "retries": 3,
    "retry_delay_seconds": [1, 5, 15],
    "retry_condition_fn": lambda task, run, state: isinstance(state.result(raise_on_failure=False), StoreError),
}
write = task(name="write-dataset", **retried)(write_dataset)
keep = task(name="keep-profile", **retried)(keep_profile)


class IngestReport(BaseModel):
    """What was ingested: `dataset` is the URI of dataset.json; `series` counts rows by name."""

    model_config = ConfigDict(frozen=True)
    dataset: str
    fingerprint: str
    rows: int
    series: dict[str, int]
    skipped_series: list[str]
    quarantined_rows: int
    files: dict[str, StoredFile]
    data_docs: str


@flow(name="ingest", flow_run_name="ingest[{source}]", persist_result=False)
def ingest(
    source: str, store: str | None = None, contract: str | None = None, config: IngestConfig = IngestConfig()
) -> IngestReport:
    """Read feature Parquet, check it and keep it as an immutable dataset.

    Args:
        source: Folder, file, glob or s3:// address of Parquet files, or a .txt file that lists such: the whole dataset.
        store: file:// or s3:// prefix; none takes FORECASTLE_STORE, else this machine's own store.
        contract: TOML file with the feature contract; none finds 5 static, 210 historical and 10 future columns by prefix.
        config: How to ingest.
    """
    stop_crash_loop()
    wanted = FeatureContract.from_toml(contract) if contract else MARKET_FEATURES
    opened = open_store(default_store(store))
    known = forecastle_home() / "cache" / "files"
    if config.spill_folder:
        Path(config.spill_folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="forecastle-", dir=config.spill_folder) as folder:
        try:
            staged = stage(source, wanted, config, Path(folder), cache=known, on_progress=IngestLog())
            report = look_for_leaks(staged, run_suites(staged, validate(staged)))
            report, drift = look_for_drift(staged, report, opened)
        except DataContractError as refused:
            show_validation(refused.table or whole_source_refused(refused), source)  # with the failing features by name
            raise
        show_validation(report.table, source)
        for line in report.table:
            if line["result"] == "warning":
                get_run_logger().warning("%s: %s", line["rule"], line["columns"] or line["rows"])
        dataset, uri = write(staged, report, opened)
    docs = f"{opened.uri.rstrip('/')}/ingests/{ingest_record(staged, report, dataset.fingerprint)[0]}/docs/index.html"
    link_data_docs(docs, source)
    keep(opened, dataset.fingerprint, drift.profile)
    show_drift(drift, source)
    # Within a pipeline or a backfill it is the caller that decides what is trained; of two events one starts it
    retrain = not flow_run.parent_flow_run_id
    payload = {"dataset": uri, "fingerprint": dataset.fingerprint, "rows": dataset.rows, "store": opened.uri}
    emit_event("dataset.landed", resource=about(dataset, retrain and not drift.drifted), payload=payload)
    if drift.drifted:
        compared = [drift.model_dump(mode="json", exclude={"features"}) for drift in drift.comparisons]
        moved = {**payload, "features": drift.drifted, "compared": compared}
        emit_event("dataset.drifted", resource=about(dataset, retrain), payload=moved)
    return IngestReport(
        dataset=uri,
        fingerprint=dataset.fingerprint,
        rows=dataset.rows,
        series=dataset.series,
        skipped_series=too_short(dataset),
        quarantined_rows=staged.quarantined_rows,
        files=staged.sources,
        data_docs=docs,
    )


def about(dataset: Dataset, retrain: bool) -> dict[str, str]:
    """The resource of an event about a dataset; automations train on it where it says so."""
    return {"prefect.resource.id": f"dataset.{dataset.fingerprint[:16]}", "forecastle.retrain": str(retrain).lower()}


def too_short(dataset: Dataset) -> list[str]:
    """Series with fewer rows than one window of the default TFT needs."""
    config = TFTConfig()
    return [name for name, rows in dataset.series.items() if rows < config.context + config.horizon]
