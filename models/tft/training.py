"""Training of the Temporal Fusion Transformer: AdamW on the pinball loss of normalised targets, early stopping on the
validation block, the test block for the report alone. How a run starts, stops and resumes is read from top to bottom
in `train`."""

from __future__ import annotations

import gc
import logging
import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.checkpoint import CheckpointError, Snapshot, check_weights, checkpoint_bytes, load_weights
from models.features import FeatureContract
from models.memory import LeakGuard, PeakMemory, out_of_memory, steady_heap
from models.progress import BestEpoch, EpochRow, OnCheckpoint, OnEpoch, StopRequested, TrainResult
from models.tft.calibration import conformal_shift, shifted
from models.tft.config import TFTConfig
from models.tft.evaluation import block_metrics, calibrated, covered, forecast_block, interpretation, pinball_numpy, samples
from models.tft.layers import gpu_tf32, random_state, set_random_state
from models.tft.loss import pinball
from models.tft.network import TemporalFusionTransformer
from models.tft.plan import fitting_plan
from models.tft.quantisation import fine_tune, unpacked
from models.tft.rolling import more_models
from models.tft.scaling import Floats, Frame, Scaler
from models.windows import SeriesArrays, UnfitSeriesError, WindowBatch, WindowDataset, block_rows, last_windows

logger = logging.getLogger(__name__)


def _copy(network: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}


def adamw(network: torch.nn.Module, config: TFTConfig) -> torch.optim.AdamW:
    """The optimizer with its moments in place: made in the first update, they would lie where its activations were, and the
    next update's would no longer fit there."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)
    moments = {
        index: {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        for index, p in enumerate(network.parameters())
    }
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    return optimizer


@dataclass
class Updates:
    """Makes the gradients of a batch of window starts, `micro_batch` starts at a time: what memory holds then does not
    depend on the batch. Halves `micro_batch` when memory runs out all the same."""

    network: TemporalFusionTransformer
    scaler: Scaler
    windows: WindowDataset
    target: Floats
    frame: Frame
    config: TFTConfig
    device: str
    micro_batch: int
    halvings: int = 0

    def gradients(self, starts: NDArray[np.int64]) -> Tensor:
        """Adds the gradients of the mean pinball loss (normalised units, masked windows do not count) and returns that loss.

        Out of memory: the pass starts again from the same random state with half the starts at a time. Raises the
        allocator's error when one start is too much.
        """
        device = torch.device(self.device)
        state = random_state(device)
        while True:
            try:
                return self._pass(starts)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) or self.micro_batch == 1:
                    raise
                said = next(iter(str(error).splitlines()), type(error).__name__)
            # Out here the error is gone, and with its traceback every tensor of the pass that failed
            self.network.zero_grad(set_to_none=True)
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()
            set_random_state(device, state)
            self.micro_batch = (self.micro_batch + 1) // 2
            self.halvings += 1
            logger.warning("out of memory (%s): from now on %d window starts at a time", said, self.micro_batch)

    def _pass(self, starts: NDArray[np.int64]) -> Tensor:
        batches = [
            self.windows.batch(starts[i : i + self.micro_batch], self.config.windows_per_start)
            for i in range(0, len(starts), self.micro_batch)
        ]
        terms = sum(batch.windows for batch in batches) * self.config.horizon * len(self.config.quantiles)
        total = torch.zeros((), device=self.device)
        for batch in batches:
            # The sum over all windows of the whole batch: a mean of means is wrong when the last part is smaller
            loss = self.summed_loss(batch) / terms
            torch.autograd.backward(loss)
            total += loss.detach()
        return total

    def summed_loss(self, batch: WindowBatch) -> Tensor:
        """Summed pinball loss of the batch's windows, in normalised units; masked windows do not count."""
        aim = self.scaler.normalise(self.target[self.windows.target_rows(batch)], self.frame.at(batch.origins))
        inputs = [to_device(t, self.device) for t in self.scaler.inputs(batch, self.scaler.rows_of(self.windows.series))]
        wanted, counted = (to_device(torch.from_numpy(x), self.device) for x in (aim.astype(np.float32), batch.valid))
        with torch.autocast(self.device, torch.bfloat16, enabled=self.config.precision == "bfloat16"):
            quantiles = self.network(*inputs)
        return (pinball(quantiles, wanted, self.config.quantiles) * counted[:, :, None, None]).sum()


def to_device(tensor: Tensor, device: str) -> Tensor:
    """The tensor on the device; to a GPU from pinned memory, so that the copy does not wait."""
    return tensor if device == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def train(
    config: TFTConfig,
    series: SeriesArrays,
    *,
    on_epoch: OnEpoch,
    on_checkpoint: OnCheckpoint,
    stop_requested: StopRequested = lambda: False,
    resume: Snapshot | None = None,
) -> TrainResult:
    """Train on the train block, choose by the validation block, report on the test block.

    Calls `on_checkpoint` after every `checkpoint_every` epochs and exactly once with `is_final`, however training ends.
    Raises ValueError naming the series when none is long enough or a ratio's target is not above zero,
    MemoryBudgetError when `memory_budget` is too small, KeyError for a target that is not there.
    """
    with steady_heap(), gpu_tf32(config.precision == "tf32"):
        result = _train(config, series, on_epoch, on_checkpoint, stop_requested, resume)
    # Last of all: the final checkpoint is written, and nothing here can take it back
    ended_well = result.stop_reason in ("all_epochs", "early_stopping")
    if (config.rolling_cuts or config.extra_seeds) and ended_well and "test" in result.metrics:
        further = more_models(config, series, train, result.metrics["test"], stop_requested)
        result = replace(result, metrics={**result.metrics, **further})
    return result


def _train(
    config: TFTConfig, series: SeriesArrays, on_epoch: OnEpoch, on_checkpoint: OnCheckpoint, stop_requested: StopRequested,
    resume: Snapshot | None,
) -> TrainResult:  # fmt: skip
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    target = series.target(config.target)
    blocks = block_rows(series, config.split, series.contract.lookback_bars + config.horizon)
    training, validation, test = (
        WindowDataset(series, blocks[name], config.context, config.horizon) for name in ("train", "val", "test")
    )  # fmt: skip
    if not len(training):
        raise UnfitSeriesError(
            f"no series is long enough for context {config.context} + horizon {config.horizon} in its train block; "
            f"rows by series: {training.short_series}"
        )
    if training.short_series:
        logger.warning("left out, too short for a window in the train block; rows by series: %s", training.short_series)
    scaler = Scaler.fit(series, blocks["train"], target, config.anchor, config.horizon)
    scaler.check_ratio(series, target, np.arange(len(target)))
    memory = fitting_plan(config, series.contract.sizes)
    peak_memory = PeakMemory(device)
    torch.manual_seed(config.seed)
    network = TemporalFusionTransformer(config, series.contract.sizes).to(device)
    network.recompute.share = memory.share
    optimizer = adamw(network, config)
    if not len(validation):
        logger.warning("no validation windows after the purge gap: no early stopping, the last epoch's weights are kept")
        if config.conformal:
            logger.warning("no validation windows: the quantiles are not calibrated")

    frame = scaler.frame(series, target)
    updates = Updates(network, scaler, training, target, frame, config, device, memory.starts)
    leak_guard = LeakGuard(device)
    best, history = BestEpoch(), []
    epoch, in_epoch, loss_sum, elapsed = 0, 0, 0.0, 0.0
    best_weights = last_weights = _copy(network)
    if resume is not None:
        meta, tensors = resume.metadata, resume.tensors
        load_weights(network, resume.part("network."))
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in resume.part("optimizer.").items():
            index, _, moment = name.partition(".")
            moments.setdefault(int(index), {})[moment] = value.clone()
        optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
        torch.set_rng_state(tensors["rng.torch"])
        if device == "cuda" and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"])
        best, history = BestEpoch(**meta["best"]), [EpochRow(**row) for row in meta["history"]]
        epoch, in_epoch, loss_sum, elapsed = meta["epoch"], meta["in_epoch"], meta["loss_sum"], meta["elapsed"]
        updates.micro_batch, updates.halvings = meta["micro_batch"], meta["halvings"]
        best_weights, last_weights = resume.part("best."), resume.part("last.")

    def weights(tensors: dict[str, Tensor], which: str, stop_reason: str | None) -> Snapshot:
        metadata: dict[str, Any] = {
            "family": "tft", "config": config.model_dump(mode="json"), "contract": series.contract.model_dump(mode="json"),
            "contract_fingerprint": series.contract.fingerprint, "series": list(series.names), "anchor": scaler.anchor,
            "epoch": epoch, "best_epoch": best.epoch, "weights": which, "stop_reason": stop_reason,
        }  # fmt: skip
        return Snapshot({**{f"network.{k}": v for k, v in tensors.items()}, **scaler.tensors()}, metadata)

    def resume_state() -> Snapshot:
        tensors = {f"network.{k}": v for k, v in _copy(network).items()} | {"rng.torch": torch.get_rng_state()}
        if device == "cuda":  # dropout masks come from there
            tensors["rng.cuda"] = torch.cuda.get_rng_state()
        for index, values in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value).clone() for name, value in values.items()}
        tensors |= {f"best.{k}": v for k, v in best_weights.items()} | {f"last.{k}": v for k, v in last_weights.items()}
        metadata = {
            "epoch": epoch, "in_epoch": in_epoch, "update": epoch * config.updates_per_epoch + in_epoch,
            "micro_batch": updates.micro_batch, "halvings": updates.halvings,
            "loss_sum": loss_sum, "elapsed": elapsed, "best": asdict(best), "history": [asdict(row) for row in history],
        }  # fmt: skip
        return Snapshot(tensors, metadata)

    stop_reason: Any = "all_epochs"
    finished = resume is not None and best.exhausted(config.early_stopping) and in_epoch == 0
    if finished:
        stop_reason = "early_stopping"
    while epoch < config.epochs and not finished:
        started = time.perf_counter()
        network.train()
        # All starts of an epoch from (seed, epoch): a resumed epoch draws the same ones
        generator = np.random.default_rng([config.seed, epoch])
        starts = training.random_starts(
            config.updates_per_epoch * config.batch_size, config.windows_per_start, generator
        ).reshape(config.updates_per_epoch, config.batch_size, 2)
        losses = torch.zeros((), dtype=torch.float64, device=device)
        while in_epoch < config.updates_per_epoch:
            if stop_requested():
                stop_reason = "interrupted"
                break
            optimizer.zero_grad(set_to_none=True)  # before the pass: the old gradients need not stand beside its activations
            loss = updates.gradients(starts[in_epoch])
            norm = torch.nn.utils.clip_grad_norm_(network.parameters(), config.gradient_clip)
            optimizer.step()
            # A finite loss with a gradient that is not spoils the weights all the same
            losses += torch.where(norm.isfinite(), loss.double(), math.nan)
            in_epoch += 1
        loss_sum += float(losses)
        elapsed += time.perf_counter() - started
        finite = math.isfinite(loss_sum)
        if finite and stop_reason == "interrupted":
            break
        score = (
            _validation_score(network, scaler, validation, target, frame, config, device) if finite and len(validation) else None
        )
        if not finite or (score is not None and not math.isfinite(score)):
            logger.error("tft epoch %d: the loss is not finite; the weights of epoch %d are kept", epoch + 1, epoch)
            stop_reason = "non_finite_loss"
            break
        epoch += 1
        last_weights = _copy(network)
        row = EpochRow(epoch, loss_sum / config.updates_per_epoch, score, elapsed)
        history.append(row)
        if score is not None and best.update(epoch, score, config.early_stopping):
            best_weights = last_weights
        in_epoch, loss_sum, elapsed = 0, 0.0, 0.0
        on_epoch(row)
        copies = {t.data_ptr(): t.nbytes for t in (*best_weights.values(), *last_weights.values())}
        leak_guard(on_purpose=sum(copies.values()) if device == "cpu" else 0)
        if epoch % config.checkpoint_every == 0:
            on_checkpoint(epoch, False, weights(last_weights, "last", None), resume_state())
        if score is not None and best.exhausted(config.early_stopping):
            stop_reason = "early_stopping"
            break

    use_best = config.final_weights == "best" and best.epoch is not None and stop_reason != "non_finite_loss"
    final, tuned = best_weights if use_best else last_weights, None
    if config.quantisation == "int8" and stop_reason in ("all_epochs", "early_stopping"):
        network.load_state_dict(final)
        score_of = (
            (lambda: _validation_score(network, scaler, validation, target, frame, config, device)) if len(validation) else None
        )
        tuned = fine_tune(network, optimizer, config, training, updates.gradients, score_of, stop_requested)
        if tuned is None:  # resumed, it begins with the same weights again
            stop_reason = "interrupted"
            network.load_state_dict(last_weights)
    if stop_reason == "interrupted":
        on_checkpoint(epoch, True, weights(_copy(network), "last", stop_reason), resume_state())
        return TrainResult(epoch, stop_reason, best.epoch, "last", tuple(history), {}, {})
    measured = peak_memory.growth
    network.load_state_dict(unpacked(tuned.tensors) if tuned else final)
    which: Literal["best", "last"] = "best" if use_best else "last"
    snapshot, shift = weights(tuned.tensors if tuned else final, which, stop_reason), None
    if config.conformal and len(validation):
        seen = forecast_block(network, scaler, validation, target, frame, device)
        shift = conformal_shift(seen.normalised, seen.normalised_actual, config.quantiles)
        snapshot.tensors["conformal.shift"] = torch.from_numpy(shift)
    # Before the report: whatever that may raise, the final file exists
    on_checkpoint(epoch, True, snapshot, None)
    metrics: dict[str, Any] = {
        "validation_score": best.score, "anchor": scaler.anchor, "short_series": training.short_series,
        "windows": {"train": len(training), "val": len(validation), "test": len(test)},
        "memory": {
            "planned_mib": round(memory.peak / 2**20, 1), "recomputed_share": memory.share,
            "starts_at_a_time": updates.micro_batch, "out_of_memory": updates.halvings,
        },
    }  # fmt: skip
    if tuned is not None:
        whole = len(checkpoint_bytes(weights(final, which, stop_reason)))
        metrics["quantisation"] = tuned.metrics(len(checkpoint_bytes(snapshot)) / whole)
    report: dict[str, Any] = {"memory_plan": memory.rows(), "memory_peak": measured}
    for name, windows in (("val", validation), ("test", test)):
        if len(windows):
            found = raw = forecast_block(network, scaler, windows, target, frame, device)
            # The shift was learnt from the validation block: only the test block can say what it is worth
            if shift is not None and name == "test":
                found = calibrated(raw, shift, scaler, frame)
            metrics[name] = block_metrics(found, series, blocks["train"], target, config, scaler.anchor)
            if found is not raw:
                metrics[name]["coverage_raw"] = float(covered(raw.quantiles, raw.actual).mean())
            if name == "test":
                report["samples"] = samples(found, series)
                report["interpretation"] = interpretation(network, scaler, windows, device)
    return TrainResult(epoch, stop_reason, best.epoch, which, tuple(history), metrics, report)


def _validation_score(
    network: TemporalFusionTransformer,
    scaler: Scaler,
    windows: WindowDataset,
    target: Floats,
    frame: Frame,
    config: TFTConfig,
    device: str,
) -> float:
    """Minus the mean pinball loss over all validation windows, in normalised units."""
    found = forecast_block(network, scaler, windows, target, frame, device)
    return -float(pinball_numpy(found.normalised, found.normalised_actual, config.quantiles).mean())


@dataclass(frozen=True)
class Forecast:
    """One forecast of a series: when it was made, for which times, and the quantiles [H, Q] in the target's unit."""

    series: str
    origin: int  # microseconds since 1970 UTC
    timestamps: NDArray[np.int64]  # [H]
    quantiles: Floats


def rebuilt(snapshot: Snapshot) -> tuple[TemporalFusionTransformer, Scaler]:
    """Network in evaluation mode, and scaler, of a published forecaster. Raises CheckpointError when weights and config do
    not fit."""
    config = TFTConfig.model_validate(snapshot.metadata["config"])
    sizes = FeatureContract.model_validate(snapshot.metadata["contract"]).sizes
    weights = unpacked(snapshot.part("network."))
    with torch.device("meta"):  # no memory for a network that the file does not fill
        check_weights(TemporalFusionTransformer(config, sizes), weights)
    network = TemporalFusionTransformer(config, sizes)
    load_weights(network, weights)
    network.eval()
    for name, tensor in snapshot.part("scaler.").items():
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"the scaler's {name} is not finite")
    try:
        return network, Scaler.from_checkpoint(snapshot.tensors, snapshot.metadata)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the scaler cannot be read: {error}") from error


def forecast(snapshot: Snapshot, series: SeriesArrays) -> list[Forecast]:
    """One forecast per series from its last complete row with `horizon` rows ahead. Series too short are left out with a
    warning. Raises CheckpointError when weights and config do not fit, ValueError on another contract or when a ratio's
    last value is not above zero."""
    config = TFTConfig.model_validate(snapshot.metadata["config"])
    trained = FeatureContract.model_validate(snapshot.metadata["contract"])
    if trained.features != series.contract.features:
        raise ValueError("the source has other feature columns than the model was trained on")
    network, scaler = rebuilt(snapshot)
    windows = last_windows(series, config.context, config.horizon)
    if windows.short_series:
        logger.warning("too short to forecast from: %s", windows.short_series)
    if not len(windows):
        raise UnfitSeriesError(
            f"no series has {config.context} complete rows and {config.horizon} rows ahead: {windows.short_series}"
        )
    scaler.warn_unseen(series)
    target, rows = series.target(config.target), scaler.rows_of(series)
    batch = windows.batch(windows.sequential_starts(1), 1)
    scaler.check_ratio(series, target, batch.origins[:, 0])
    with torch.no_grad():
        normalised = network(*scaler.inputs(batch, rows)).double().numpy()
    if "conformal.shift" in snapshot.tensors:
        normalised = shifted(normalised, snapshot.tensors["conformal.shift"].numpy())
    quantiles = scaler.restore(normalised, scaler.frame(series, target).at(batch.origins))[:, 0]
    if not np.isfinite(quantiles).all():
        raise CheckpointError("the model's forecasts are not finite")
    ahead = windows.target_rows(batch)[:, 0]
    return [
        Forecast(series.names[s], int(series.timestamps[batch.origins[i, 0]]), series.timestamps[ahead[i]], quantiles[i])
        for i, s in enumerate(batch.series)
    ]
