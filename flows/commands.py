"""Commands of the command line that are more than one flow: the whole job with its services, training from a source,
the local S3 server, the UI and the registry."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect.client.orchestration import get_client

from flows.ingest import ingest
from flows.pipeline import PipelineReport, pipeline
from flows.retrain_dqn import retrain_dqn
from flows.retrain_tft import retrain_tft
from models.config import IngestConfig
from models.dqn.config import DQNConfig
from models.manifest import ModelManifest
from models.tft.config import TFTConfig
from tasks import default_store, forecastle_home, local_s3
from tasks.artifacts import read_manifest, verify
from tasks.garbage import DAY, HOUR, Garbage, collect
from tasks.registry import ModelList, ShownModel, fetch, list_models, promote, rollback, show
from tasks.retraining import Resume, RetrainReport
from tasks.storage import open_store


def say(text: str) -> None:
    """One line for a person."""
    print(text, file=sys.stderr)


def reach_prefect() -> None:
    """Start Prefect's temporary server, or reach the user's own, before anything long begins.

    A temporary server inherits a blocked SIGINT: Ctrl-C in a terminal goes to every process there, and without its server
    the run could neither be recorded as ended nor end within a minute. It is stopped by SIGTERM when this process ends.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with get_client(sync_client=True) as client:
            client.hello()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextlib.contextmanager
def local_storage(store: str | None) -> Iterator[str]:
    """The store to use. With none named, this machine's own S3 server runs meanwhile; it is stopped afterwards when
    it was started here. Where its program does not exist, a plain folder that is labelled so."""
    home = forecastle_home() / "s3"
    if store or os.environ.get("FORECASTLE_STORE"):
        yield default_store(store)
        return
    was_running = local_s3.running(home)
    try:
        local_s3.start(home)
    except local_s3.SeaweedFSMissing as error:
        say(f"{error}: using a plain folder instead, which is not S3")
        yield default_store(None)
        return
    try:
        os.environ.update(local_s3.environment(home))
        yield os.environ["FORECASTLE_STORE"]
    finally:
        if not was_running:
            local_s3.stop(home)


def run(
    source: str | None = None,
    store: str | None = None,
    contract: str | None = None,
    tft: TFTConfig = TFTConfig(),
    dqn: DQNConfig = DQNConfig(),
    ingesting: IngestConfig = IngestConfig(),
) -> PipelineReport:
    """The whole job: ingest, validate, train both models, publish.

    Args:
        source: Folder, file or glob of Parquet files; none takes real daily share prices from a PyPI data package.
        store: file:// or s3:// prefix; none takes FORECASTLE_STORE, else this machine's own S3 server.
        contract: TOML file with the feature contract.
        tft: How the forecaster learns.
        dqn: How the trading agent learns.
        ingesting: How to ingest.
    """
    reach_prefect()
    with local_storage(store) as uri:
        if source is None:
            from tasks.demo_features import write_demo_features

            folder = forecastle_home() / "demo-shares"
            say("making features from real daily share prices (PyPI package bokeh-sampledata)")
            write_demo_features(folder)
            source = str(folder)
        report = pipeline(source, uri, contract, tft, dqn, ingesting)
        for model in (report.tft, report.dqn):
            verify(open_store(uri), model.model, model.version)
    say(f"\npublished under {uri} and verified byte by byte")
    if uri.startswith("s3://") and not store and local_s3.known(forecastle_home() / "s3"):
        say('the store again, with its environment:  eval "$(forecastle storage start)"')
    say("the runs in the Prefect UI:              forecastle ui")
    return report


def _dataset(dataset: str | None, source: str | None, store: str | None, contract: str | None) -> str:
    if (dataset is None) == (source is None):
        raise UsageError("name one of --dataset URI and --source SOURCE")
    return dataset or ingest(source, store, contract).dataset  # type: ignore[arg-type]


class UsageError(ValueError):
    """Options that do not go together."""


def train_tft(
    *,
    dataset: str | None = None,
    source: str | None = None,
    store: str | None = None,
    contract: str | None = None,
    name: str = "tft",
    config: TFTConfig = TFTConfig(),
    again: bool = False,
    resume: Resume = "auto",
) -> RetrainReport:
    """Train a Temporal Fusion Transformer and publish it.

    Args:
        dataset: URI of a dataset.json.
        source: Parquet to ingest first, instead of a dataset.
        store: file:// or s3:// prefix; none takes FORECASTLE_STORE, else this machine's own store.
        contract: TOML file with the feature contract, for --source.
        name: Name of the model.
        config: How to learn; --config FILE reads a TOML file.
        again: Train even when this dataset and configuration are trained already.
        resume: auto goes on from the newest valid state of this run; never begins anew.
    """
    reach_prefect()
    return retrain_tft(_dataset(dataset, source, store, contract), store, name, config, again, resume)


def train_dqn(
    *,
    dataset: str | None = None,
    source: str | None = None,
    store: str | None = None,
    contract: str | None = None,
    name: str = "dqn",
    config: DQNConfig = DQNConfig(),
    again: bool = False,
    resume: Resume = "auto",
) -> RetrainReport:
    """Train a DQN trading agent and publish it.

    Args:
        dataset: URI of a dataset.json.
        source: Parquet to ingest first, instead of a dataset.
        store: file:// or s3:// prefix; none takes FORECASTLE_STORE, else this machine's own store.
        contract: TOML file with the feature contract, for --source.
        name: Name of the model.
        config: How to learn; --config FILE reads a TOML file.
        again: Train even when this dataset and configuration are trained already.
        resume: auto goes on from the newest valid state of this run; never begins anew.
    """
    reach_prefect()
    return retrain_dqn(_dataset(dataset, source, store, contract), store, name, config, again, resume)


def list_versions(name: str | None = None, *, store: str | None = None) -> ModelList:
    """Published versions by number, champions marked, and what happened to the champions.

    Args:
        name: Name of the model; none lists all.
        store: file:// or s3:// prefix.
    """
    return list_models(open_store(default_store(store)), name)


def show_model(name: str, *, version: int | None = None, store: str | None = None) -> ShownModel:
    """A version from source files to weights, whether this machine could make it again, and the champion's history.

    Args:
        name: Name of the model.
        version: Version; none is the champion.
        store: file:// or s3:// prefix.
    """
    return show(open_store(default_store(store)), name, version or "champion")


def verify_model(name: str, *, version: int | None = None, store: str | None = None) -> ModelManifest:
    """Read every byte of a version and compare its sha256.

    Args:
        name: Name of the model.
        version: Version; none is the champion.
        store: file:// or s3:// prefix.
    """
    opened = open_store(default_store(store))
    return verify(opened, name, version or read_manifest(opened, name, "champion").version)


def promote_model(name: str, version: int, *, why: str, store: str | None = None) -> dict[str, Any]:
    """Make a version the champion by hand; the reason is kept in the history.

    Args:
        name: Name of the model.
        version: Version to promote.
        why: Reason, for the record.
        store: file:// or s3:// prefix.
    """
    return {"promoted": promote(open_store(default_store(store)), name, version, why=why)}


def rollback_model(name: str, *, why: str, store: str | None = None) -> dict[str, Any]:
    """Make the champion before the present one champion again; the version rolled back from never comes back by itself.

    Args:
        name: Name of the model.
        why: Reason, for the record.
        store: file:// or s3:// prefix.
    """
    return {"champion": rollback(open_store(default_store(store)), name, why=why)}


def fetch_model(name: str, folder: Path, *, version: int | None = None, store: str | None = None) -> ModelManifest:
    """Download every file of a version to FOLDER, verify each, and load the network from the final one.

    Args:
        name: Name of the model.
        folder: Folder to write to.
        version: Version; none is the champion.
        store: file:// or s3:// prefix.
    """
    return fetch(open_store(default_store(store)), name, version or "champion", folder)


def collect_garbage(
    *,
    apply: bool = False,
    grace_hours: float = 24,
    unfinished_days: float = 30,
    keep_versions: int | None = None,
    store: str | None = None,
) -> Garbage:
    """Show, and with --apply delete, what no manifest, alias or live run names.

    Args:
        apply: Delete; without it nothing is.
        grace_hours: Nothing younger is touched; longer than the longest publication.
        unfinished_days: Runs never published are kept so long after their last sign of life.
        keep_versions: Also drop versions before the latest so many, save those that are or were champion.
        store: file:// or s3:// prefix.
    """
    opened = open_store(default_store(store))
    return collect(
        opened, grace=grace_hours * HOUR, unfinished_runs=unfinished_days * DAY, keep_versions=keep_versions, apply=apply
    )


def _exports(environment: dict[str, str]) -> str:
    import shlex

    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items())


def storage_start() -> str:
    """Start the local S3 server and print its environment as export lines."""
    home = forecastle_home() / "s3"
    local_s3.start(home)
    return _exports(local_s3.environment(home))


def storage_stop() -> None:
    """Stop the local S3 server; its data stay."""
    local_s3.stop(forecastle_home() / "s3")


def storage_env() -> str:
    """The local S3 server's environment as export lines."""
    return _exports(local_s3.environment(forecastle_home() / "s3"))


def ui(*, port: int = 4200) -> None:
    """The Prefect server with its UI on this project's runs, until Ctrl-C.

    Args:
        port: Port on 127.0.0.1.
    """
    say(f"Prefect UI: http://127.0.0.1:{port}")
    # Without this the pages ask the default port, whatever port serves them
    os.environ["PREFECT_SERVER_UI_API_URL"] = f"http://127.0.0.1:{port}/api"
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    os.execv(sys.executable, command)
