"""Publish: a finished run that could not be published, from this machine's own files."""

from __future__ import annotations

from prefect import flow

from tasks.retraining import RetrainReport, publish_kept


@flow(name="publish", flow_run_name="publish[{run}]")
def publish(run: str, store: str | None = None) -> RetrainReport:
    """Publish a finished run that could not be published, and decide on its promotion.

    Args:
        run: Its run key, or at least the first six digits.
        store: file:// or s3:// prefix; none takes FORECASTLE_STORE, else this machine's own store.
    """
    return publish_kept(run, store)
