"""Retrain the TFT: dataset in, published forecaster out."""

from __future__ import annotations

from prefect import flow

from models.tft.config import TFTConfig
from tasks.retraining import Resume, RetrainReport, retrain, run_name
from tasks.training import train_tft


@flow(name="retrain-tft", flow_run_name=run_name)
def retrain_tft(
    dataset: str,
    store: str | None = None,
    name: str = "tft",
    config: TFTConfig = TFTConfig(),
    again: bool = False,
    resume: Resume = "auto",
) -> RetrainReport:
    """Train a Temporal Fusion Transformer on one validated dataset and publish it.

    Args:
        dataset: URI of a dataset.json.
        store: file:// or s3:// prefix to publish under; none takes FORECASTLE_STORE, else this machine's own store.
        name: Name of the model: versions are counted and a champion is kept under it.
        config: How to learn.
        again: Train even when this dataset and configuration are trained already.
        resume: auto goes on from the newest valid state of this run; never begins anew.
    """
    return retrain(train_tft, config, dataset, store, name, again, resume)
