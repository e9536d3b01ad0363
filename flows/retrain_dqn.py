"""Retrain the DQN: dataset in, published agent out."""

from __future__ import annotations

from prefect import flow

from models.dqn.config import DQNConfig
from tasks.retraining import Resume, RetrainReport, retrain, run_name
from tasks.training import train_dqn


@flow(name="retrain-dqn", flow_run_name=run_name)
def retrain_dqn(
    dataset: str,
    store: str | None = None,
    name: str = "dqn",
    config: DQNConfig = DQNConfig(),
    again: bool = False,
    resume: Resume = "auto",
) -> RetrainReport:
    """Train a DQN trading agent on one validated dataset and publish it.

    Args:
        dataset: URI of a dataset.json.
        store: file:// or s3:// prefix to publish under; none takes FORECASTLE_STORE, else this machine's own store.
        name: Name of the model: versions are counted and a champion is kept under it.
        config: How to learn.
        again: Train even when this dataset and configuration are trained already.
        resume: auto goes on from the newest valid state of this run; never begins anew.
    """
    return retrain(train_dqn, config, dataset, store, name, again, resume)
