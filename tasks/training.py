"""Training as tasks: device, run log, resume state, checkpoint files, stop signals. The loops themselves stand in
models/tft/training.py and models/dqn/training.py; publishing stands in tasks/artifacts.py. Uses Prefect and torch."""

from __future__ import annotations

import contextlib
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import prefect.utilities.engine
import torch
from prefect import get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.runtime import flow_run

import models.dqn.training
import models.tft.training
from models.checkpoint import Snapshot, checkpoint_bytes, save_checkpoint, write_atomically
from models.config import RunConfig
from models.dqn.config import DQNConfig
from models.dqn.forecasts import walk_forward
from models.manifest import Checkpoint, Dataset, ModelConfig, StoredFile, TFTSource
from models.progress import EpochRow, TrainResult
from tasks import forecastle_home
from tasks.artifacts import TrainedRun, kept_file
from tasks.interpretation import interpretation_parquet
from tasks.report import show_training, write_report
from tasks.run_record import run_record
from tasks.runs import kept_folds, newest_resume, save_fold, save_resume
from tasks.series import load_series
from tasks.storage import ObjectStore, open_store

GPU_LIMIT = "gpu"


class TrainingInterrupted(RuntimeError):
    """The run was asked to stop; its state is saved and a rerun continues from it."""


def resolve_device(config: RunConfig) -> str:
    """`cuda` or `cpu`. Raises ValueError when a GPU is asked for and none is there."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("config.device is cuda, but torch sees no GPU; use auto or cpu")
    return "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"


def library_versions() -> dict[str, str]:
    """Versions that decide a run's numbers."""
    from importlib.metadata import version

    names = ("torch", "numpy", "safetensors", "duckdb", "pyarrow", "great-expectations", "prefect", "pydantic")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Turn SIGTERM and Ctrl-C into a flag that the training loop reads at its update boundary.

    On leaving, the handlers from before are back and a signal that came is handed on to them: Prefect's own handler
    then ends the run as cancelled. A second signal is handed on at once. Outside the main thread signals stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    # A signal that is ignored (nohup, a job in the background) stays so
    before = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}

    def remember(number: int, frame: Any) -> None:
        if received:
            hand_on(number, frame)
        received.append(number)

    def hand_on(number: int, frame: Any) -> None:
        previous = before[signal.Signals(number)]
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL:
            raise TrainingInterrupted(f"stopped by {signal.Signals(number).name}")

    # A worker asks the run whether Prefect's own handler is in place before it tells it that a SIGTERM means cancel; without
    # an answer a cancelled run ends as Crashed. Ours stands for it, since it hands on to it.
    prefects = getattr(prefect.utilities.engine, "_prefect_sigterm_handler", None)
    stand_in = prefects is not None and before.get(signal.SIGTERM) is prefects
    for number in before:
        signal.signal(number, remember)
    if stand_in:
        prefect.utilities.engine._prefect_sigterm_handler = remember  # type: ignore[assignment]
    try:
        yield lambda: bool(received)
    finally:
        if stand_in:
            prefect.utilities.engine._prefect_sigterm_handler = prefects  # type: ignore[assignment]
        for number, previous in before.items():
            signal.signal(number, previous)
    if received:
        hand_on(received[0], None)


def _in_gpu_pool(client: SyncPrefectClient) -> bool:
    """Whether this run, or the run that it is part of, came through the work pool `gpu`."""
    root = flow_run.root_flow_run_id
    return root is not None and client.read_flow_run(UUID(root)).work_pool_name == GPU_LIMIT


@contextlib.contextmanager
def gpu_slot(device: str) -> Iterator[None]:
    """One training per GPU: hold a slot of the global limit `gpu`, made when missing, while the block runs. Also on a CPU
    when the run came through the work pool `gpu`; nothing for any other run on a CPU.

    The slot has a lease of 90 s that is renewed while this process lives: of a killed one it comes back by itself.
    """
    with get_client(sync_client=True) as client:
        if device == "cpu" and not _in_gpu_pool(client):
            yield
            return
        # strict=True refuses a missing limit, strict=False would run without any
        try:
            limit = client.read_global_concurrency_limit_by_name(GPU_LIMIT)
            if limit.active_slots >= limit.limit:
                get_run_logger().info("waiting for a GPU: %d of %d slots are taken", limit.active_slots, limit.limit)
        except ObjectNotFound:
            with contextlib.suppress(ObjectAlreadyExists):
                new = GlobalConcurrencyLimitCreate(name=GPU_LIMIT, limit=max(torch.cuda.device_count(), 1))
                client.create_global_concurrency_limit(new)
    asked = time.monotonic()
    with concurrency(GPU_LIMIT, occupy=1, strict=True, lease_duration=90):
        get_run_logger().info("GPU slot after %.0f s", time.monotonic() - asked)
        yield


class _EpochLog:
    """One log line and one step of the progress artifact per epoch; a bar on a terminal."""

    def __init__(self, family: str, epochs: int) -> None:
        self.logger = get_run_logger()
        self.family, self.epochs = family, epochs
        self.artifact: Any = create_progress_artifact(0.0, key=f"{family}-progress", description=f"{family} epochs")
        self.bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self.bar = Progress(console=Console(stderr=True))
            self.bar.start()
            self.bar_task = self.bar.add_task(f"{family} epochs", total=epochs)

    def __call__(self, row: EpochRow) -> None:
        numbers = {"train_loss": row.train_loss, "score": row.score, **row.values, "seconds": row.seconds}
        text = " ".join(f"{k}={v:.5g}" for k, v in numbers.items() if v is not None)
        self.logger.info("%s epoch=%d/%d %s", self.family, row.epoch, self.epochs, text)
        update_progress_artifact(self.artifact, 100.0 * row.epoch / self.epochs)
        if self.bar:
            self.bar.update(self.bar_task, completed=row.epoch)

    def close(self, finished: bool) -> None:
        if self.bar:
            self.bar.stop()
        if finished:  # early stopping too: nothing is left to do
            update_progress_artifact(self.artifact, 100.0)


Train = Callable[..., TrainResult]


def _train(
    family_train: Train,
    config: ModelConfig,
    dataset: Dataset,
    dataset_uri: str,
    store: ObjectStore,
    key: str,
    model: str,
    resume_from: str,
    tft: TFTSource | None = None,
) -> TrainedRun:
    """Train to a folder of checkpoint files and a report. Raises TrainingInterrupted after a stop signal: then the
    final file and the resume state stand under runs/<key>/ in the store."""
    logger = get_run_logger()
    device = resolve_device(config)
    folder = forecastle_home() / "runs" / key
    series = load_series(dataset, dataset_uri, forecastle_home() / "cache")
    resume, skipped = newest_resume(store, key) if resume_from == "auto" else (None, [])
    for line in skipped:
        logger.warning("resume state passed over: %s", line)
    checkpoints: dict[str, Checkpoint] = {}
    if resume is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        logger.info("resuming %s after %d completed epochs", model, resume.metadata["epoch"])
        for record in resume.metadata["checkpoints"]:
            earlier = Checkpoint.model_validate(record)
            file = StoredFile(sha256=earlier.sha256, size=earlier.size)
            store.download(_place(key, earlier), folder / earlier.name, file)
            checkpoints[earlier.name] = earlier

    def on_checkpoint(epoch: int, is_final: bool, weights: Snapshot, resume: Snapshot | None) -> None:
        # Nothing of the store or the run: the same data, config, seed and device give the same bytes anywhere
        weights.metadata.update(dataset=dataset.fingerprint, versions=library_versions(), device=device)
        saved = save_checkpoint(folder, config.family, epoch, is_final, weights)
        if resume is None:
            checkpoints[saved.name] = saved
            return
        # Kept in the store while the run goes on: another machine can continue, with every file so far. The final file
        # of an interrupted run stands there too, and is no file of the resumed one.
        store.put_if_absent(_place(key, saved), folder / saved.name, StoredFile(sha256=saved.sha256, size=saved.size))
        if not is_final:
            checkpoints[saved.name] = saved
        resume.metadata["checkpoints"] = [c.model_dump() for c in checkpoints.values()]
        save_resume(store, key, f"{resume.metadata['update']:012d}", checkpoint_bytes(resume))

    log = _EpochLog(config.family, config.epochs)
    started = time.perf_counter()
    with gpu_slot(device), stop_signals() as stop_requested:
        result: TrainResult | None = None
        try:
            given: dict[str, Any] = {}
            if tft is not None and isinstance(config, DQNConfig):
                given["forecasts"] = walk_forward(
                    config, tft.config, series, kept=kept_folds(store, key) if resume_from == "auto" else {},
                    keep=lambda fold, made: save_fold(store, key, fold, checkpoint_bytes(made)), stop_requested=stop_requested,
                )  # fmt: skip
            if None not in given.values():
                result = family_train(
                    config,
                    series,
                    on_epoch=log,
                    on_checkpoint=on_checkpoint,
                    stop_requested=stop_requested,
                    resume=resume,
                    **given,
                )
        finally:
            log.close(finished=result is not None and result.stop_reason != "interrupted")
    if result is None:
        raise TrainingInterrupted(f"{model}: stopped while its TFTs were trained; a rerun continues with those that are done")
    if result.stop_reason == "interrupted":  # no signal of ours to hand on: a stop asked for in another way
        raise TrainingInterrupted(f"{model}: stopped after {result.epochs} epochs; a rerun continues from there")
    logger.info("%s ended: %s after %d epochs", model, result.stop_reason, result.epochs)
    looked = result.report.get("interpretation")
    *regular, final = checkpoints.values()
    if config.keep_checkpoints is not None:
        regular = regular[max(0, len(regular) - config.keep_checkpoints) :]
    run = TrainedRun(
        run_key=key,
        model=model,
        family=config.family,
        folder=str(folder),
        checkpoints=(*regular, final),
        config=config,
        dataset=dataset,
        dataset_uri=dataset_uri,
        metrics=result.metrics,
        epochs=result.epochs,
        stop_reason=result.stop_reason,
        best_epoch=result.best_epoch,
        weights=result.weights,
        versions=library_versions(),
        tft=tft,
        extras=("report.html",) if looked is None else ("report.html", "interpretation.parquet"),
    )
    if looked is not None:
        write_atomically(folder / "interpretation.parquet", interpretation_parquet(looked))
    write_report(run, result, folder / "report.html")
    write_atomically(folder / "run.json", run.model_dump_json(indent=1).encode())
    show_training(run, result, run_record(device, time.perf_counter() - started))
    return run


def _place(key: str, checkpoint: Checkpoint) -> str:
    """Where a run in progress keeps a file. The final file of an interrupted run is never published: it stands apart."""
    file = StoredFile(sha256=checkpoint.sha256, size=checkpoint.size)
    kept = kept_file(key, file, checkpoint.name)
    return kept.replace("/files/", "/interrupted/") if checkpoint.is_final else kept


@task(name="train-tft", task_run_name="train-tft[{model}]", cache_policy=NO_CACHE)
def train_tft(
    config: ModelConfig, dataset: Dataset, dataset_uri: str, store: str, key: str, model: str, resume: str = "auto"
) -> TrainedRun:
    """Train a Temporal Fusion Transformer on one dataset; files stay on this machine until they are published."""
    return _train(models.tft.training.train, config, dataset, dataset_uri, open_store(store), key, model, resume)


@task(name="train-dqn", task_run_name="train-dqn[{model}]", cache_policy=NO_CACHE)
def train_dqn(
    config: ModelConfig, dataset: Dataset, dataset_uri: str, store: str, key: str, model: str, resume: str = "auto",
    tft: TFTSource | None = None,
) -> TrainedRun:  # fmt: skip
    """Train a DQN agent on one dataset, with forecasts of TFTs like `tft` where one is given; files stay on this machine until
    they are published."""
    return _train(models.dqn.training.train, config, dataset, dataset_uri, open_store(store), key, model, resume, tft)
