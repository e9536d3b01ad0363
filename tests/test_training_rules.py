"""What both families promise of every run: which checkpoints, which weights, how it stops, exact resume."""

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from synthetic import series_arrays

import models.dqn.learner
import models.dqn.training
import models.tft.training
from models.checkpoint import checkpoint_bytes, checkpoint_name, read_checkpoint_bytes
from models.config import EarlyStopping
from models.dqn.config import DQNConfig
from models.tft.config import TFTConfig

SERIES = series_arrays({"AAA": 220, "BBB": 180})
OFF = EarlyStopping(patience=0)
TRAINERS = {"tft": models.tft.training.train, "dqn": models.dqn.training.train}
CONFIGS = {
    "tft": TFTConfig(
        context=8, horizon=3, hidden_size=8, num_heads=2, grn_layers=1, updates_per_epoch=3, batch_size=4,
        windows_per_start=2, epochs=3, early_stopping=OFF, device="cpu",
    ),
    "dqn": DQNConfig(
        hidden_sizes=(16,), updates_per_epoch=6, batch_size=16, num_envs=4, epochs=3, early_stopping=OFF, device="cpu",
        epsilon_decay_updates=10, target_update=4,
    ),
}  # fmt: skip
both = pytest.mark.parametrize("family", ["tft", "dqn"])


class Run:
    """One training with everything it said."""

    def __init__(self, family, series=SERIES, resume=None, stop_requested=lambda: False, **change):
        self.epochs, self.files, self.resume = [], [], {}

        def on_checkpoint(epoch, is_final, weights, resume):
            self.files.append((epoch, is_final))
            self.weights = weights
            if resume is not None:
                self.resume[epoch] = checkpoint_bytes(resume)
            if is_final:
                self.final = checkpoint_bytes(weights)

        self.result = TRAINERS[family](
            CONFIGS[family].model_copy(update=change), series, on_epoch=self.epochs.append, on_checkpoint=on_checkpoint,
            stop_requested=stop_requested, resume=resume and read_checkpoint_bytes(resume, None),
        )  # fmt: skip

    @property
    def sha256(self):
        return hashlib.sha256(self.final).hexdigest()

    def names(self, family):
        return [checkpoint_name(family, *file) for file in self.files]


def network_of(weights):
    return {k: v for k, v in weights.tensors.items() if k.startswith("network.")}


@both
@pytest.mark.parametrize(("epochs", "every"), [(7, 5), (5, 5), (3, 1), (2, 3)])
def test_regular_checkpoints_and_one_final(family, epochs, every):
    run = Run(family, epochs=epochs, checkpoint_every=every)
    regular = [f"{family}_epoch_{n}.safetensors" for n in range(every, epochs + 1, every)]
    assert run.names(family) == [*regular, f"{family}_final_epoch{epochs}.safetensors"]
    assert (run.result.stop_reason, run.result.epochs) == ("all_epochs", epochs)
    assert [row.epoch for row in run.epochs] == list(range(1, epochs + 1))


def worse_after(monkeypatch, family, epoch):
    """Validation scores that fall from `epoch` on."""
    calls = []

    if family == "tft":

        def score(*arguments):
            calls.append(1)
            return float(len(calls)) if len(calls) <= epoch else -float(len(calls))

        monkeypatch.setattr(models.tft.training, "_validation_score", score)
    else:
        sound = models.dqn.training.evaluate

        def evaluate(*arguments, **options):
            calls.append(1)
            found = sound(*arguments, **options)
            found["net_return_per_bar"] = float(len(calls)) if len(calls) <= epoch else -float(len(calls))
            return found

        monkeypatch.setattr(models.dqn.training, "evaluate", evaluate)


@both
@pytest.mark.parametrize(("best", "patience", "every"), [(3, 2, 5), (4, 1, 5), (1, 3, 1), (5, 2, 5)])
def test_final_checkpoint_follows_early_stopping_with_the_best_weights(family, best, patience, every, monkeypatch):
    worse_after(monkeypatch, family, best)
    run = Run(family, epochs=20, checkpoint_every=every, early_stopping=EarlyStopping(patience=patience))
    stopped = best + patience
    assert (run.result.stop_reason, run.result.epochs, run.result.best_epoch) == ("early_stopping", stopped, best)
    assert run.files[-1] == (stopped, True)
    assert [final for _, final in run.files].count(True) == 1
    assert [n for n, final in run.files if not final] == list(range(every, stopped + 1, every))
    assert run.weights.metadata["weights"] == "best"
    whole = Run(family, epochs=best, checkpoint_every=1, final_weights="last", early_stopping=OFF)
    if family == "tft":  # its learning rate does not depend on the number of epochs
        for name, value in network_of(whole.weights).items():
            assert torch.equal(value, run.weights.tensors[name]), name


@both
def test_early_stop_in_epoch_one_is_named_so(family, monkeypatch):
    worse_after(monkeypatch, family, 0)
    monkeypatch.setattr(models.progress.BestEpoch, "exhausted", lambda self, rule: True)
    run = Run(family, epochs=9, checkpoint_every=5, early_stopping=EarlyStopping(patience=1))
    assert run.names(family) == [f"{family}_final_epoch1.safetensors"]


def poison(monkeypatch, family, updates):
    """The loss becomes NaN after `updates` good ones."""
    calls = []
    module, name = (models.tft.training, "pinball") if family == "tft" else (models.dqn.learner, "huber")
    sound = getattr(module, name)

    def loss(*arguments, **options):
        calls.append(1)
        found, spoilt = sound(*arguments, **options), float("nan") if len(calls) > updates else 1.0
        return found * spoilt if family == "tft" else (found[0] * spoilt, found[1])

    monkeypatch.setattr(module, name, loss)


def saved_already(on_checkpoint, config):
    """The final file left out where a regular one of that epoch exists."""
    return lambda n, final, *rest: (final and n % config.checkpoint_every == 0) or on_checkpoint(n, final, *rest)


def twice(on_checkpoint, config):
    return lambda n, final, *rest: [on_checkpoint(n, final, *rest) for _ in range(1 + final)]


def by_plan(on_checkpoint, config):
    """The final file named by the epochs that were to be, not by those that were."""
    return lambda n, final, *rest: on_checkpoint(config.epochs if final else n, final, *rest)


@both
@pytest.mark.parametrize("fault", [saved_already, twice, by_plan])
def test_wrong_final_names_do_not_pass(family, fault, monkeypatch):
    sound = TRAINERS[family]

    def faulty(config, series, *, on_checkpoint, **options):
        return sound(config, series, on_checkpoint=fault(on_checkpoint, config), **options)

    monkeypatch.setitem(TRAINERS, family, faulty)
    test, *arguments = (test_regular_checkpoints_and_one_final, family, 2, 2)
    if fault is by_plan:
        test, *arguments = (test_early_stop_in_epoch_one_is_named_so, family, monkeypatch)
    with pytest.raises(AssertionError):
        test(*arguments)


@both
@pytest.mark.parametrize("epoch", [1, 3])
def test_non_finite_loss_ends_with_the_last_good_epoch(family, epoch, monkeypatch):
    per_epoch = CONFIGS[family].updates_per_epoch
    good = Run(family, epochs=max(1, epoch - 1), checkpoint_every=1, final_weights="last")
    poison(monkeypatch, family, (epoch - 1) * per_epoch + 1)
    run = Run(family, epochs=8, checkpoint_every=5)
    assert (run.result.stop_reason, run.result.epochs) == ("non_finite_loss", epoch - 1)
    assert run.names(family) == [f"{family}_final_epoch{epoch - 1}.safetensors"]
    assert run.weights.metadata["weights"] == "last"
    for name, value in network_of(run.weights).items():
        assert torch.isfinite(value).all(), name
        if epoch > 1 and family == "tft":
            assert torch.equal(value, good.weights.tensors[name]), name


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_tft_stop_after_a_non_finite_update_keeps_the_last_good_epoch(fault, monkeypatch):
    """Asked to stop in the very epoch whose weights are spoilt: the final file holds good weights, under its true reason."""
    good = Run("tft", epochs=1, checkpoint_every=1, final_weights="last")
    calls, sound = [], models.tft.training.pinball

    def loss(forecast, *arguments):
        calls.append(1)
        spoilt = forecast.sum() * float("nan") if fault == "loss" else (forecast.sum() * 0).sqrt()
        return sound(forecast, *arguments) + (spoilt if len(calls) > 3 else 0.0)

    monkeypatch.setattr(models.tft.training, "pinball", loss)
    run = Run("tft", epochs=8, checkpoint_every=5, stop_requested=StopAfter(5))
    assert run.names("tft") == ["tft_final_epoch1.safetensors"]
    assert (run.result.stop_reason, run.result.epochs) == ("non_finite_loss", 1)
    for name, value in network_of(run.weights).items():
        assert torch.equal(value, good.weights.tensors[name]), name


class StopAfter:
    """Asks to stop at the n-th look."""

    def __init__(self, looks):
        self.left = looks

    def __call__(self):
        self.left -= 1
        return self.left < 0


@both
@pytest.mark.parametrize("looks", [0, 4, 7])
def test_stopped_and_resumed_equals_never_stopped(family, looks):
    whole = Run(family, checkpoint_every=2)
    stopped = Run(family, checkpoint_every=2, stop_requested=StopAfter(looks))
    completed = looks // CONFIGS[family].updates_per_epoch
    assert (stopped.result.stop_reason, stopped.result.epochs) == ("interrupted", completed)
    assert stopped.files[-1] == (completed, True)
    torch.manual_seed(12345)
    resumed = Run(family, checkpoint_every=2, resume=stopped.resume[completed])
    assert resumed.sha256 == whole.sha256
    drop = lambda rows: [(r.epoch, r.train_loss, r.score) for r in rows]  # noqa: E731
    assert drop(resumed.result.history) == drop(whole.result.history)


@both
def test_resume_from_a_regular_checkpoint_equals_never_stopped(family):
    whole = Run(family, epochs=4, checkpoint_every=2)
    torch.manual_seed(999)
    assert Run(family, epochs=4, checkpoint_every=2, resume=whole.resume[2]).sha256 == whole.sha256


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("tft", "optimizer."), ("tft", "rng."), ("dqn", "optimizer."), ("dqn", "target_network."), ("dqn", "replay."),
        ("dqn", "rng."), ("dqn", "env."),
    ],
)  # fmt: skip
def test_leaving_out_any_part_of_the_state_changes_the_weights(family, part):
    """The planted fault for exact resume: a state with one part from another moment."""
    change = {"epochs": 4, "checkpoint_every": 2, "final_weights": "last"}
    whole, other = Run(family, **change), Run(family, **change, seed=5)
    state, wrong = read_checkpoint_bytes(whole.resume[2], None), read_checkpoint_bytes(other.resume[2], None)
    state.tensors.update({k: v for k, v in wrong.tensors.items() if k.startswith(part)})
    assert Run(family, **change, resume=whole.resume[2]).sha256 == whole.sha256
    assert Run(family, **change, resume=checkpoint_bytes(state)).sha256 != whole.sha256


@both
def test_same_seed_same_bytes_other_seed_other_bytes(family):
    assert Run(family).sha256 == Run(family).sha256 != Run(family, seed=1).sha256


@both
def test_metadata_says_what_the_file_is(family):
    run = Run(family)
    metadata = run.weights.metadata
    assert metadata["config"] == CONFIGS[family].model_dump(mode="json")
    assert metadata["contract_fingerprint"] == SERIES.contract.fingerprint
    assert metadata["series"] == ["AAA", "BBB"]
    assert metadata["stop_reason"] == "all_epochs"
    assert any(name.startswith("scaler.") for name in run.weights.tensors)


@both
def test_too_short_series_are_refused_by_name(family):
    with pytest.raises(ValueError, match="TINY"):
        Run(family, series=series_arrays({"TINY": 2 if family == "tft" else 1}))


def test_dqn_resume_is_refused_on_other_data():
    state = Run("dqn", checkpoint_every=2).resume[2]
    other = series_arrays({"AAA": 220, "BBB": 180}, seed=9)
    with pytest.raises(ValueError, match="other features or prices"):
        Run("dqn", series=other, resume=state)


def test_tft_ratio_below_zero_is_refused_by_name_in_training_and_in_forecasts():
    target = SERIES.targets.copy()
    target[[200, 216]] = -1.0  # in the test block of AAA, the second one its last origin
    sunk = dataclasses.replace(SERIES, targets=target)
    with pytest.raises(ValueError, match=r"above zero.*: AAA$"):
        Run("tft", series=sunk)
    assert np.isfinite(Run("tft", series=sunk, anchor="difference").result.metrics["test"]["naive_pinball"])
    with pytest.raises(ValueError, match=r"above zero.*: AAA$"):
        models.tft.training.forecast(read_checkpoint_bytes(Run("tft").final, None), sunk)


def test_tft_forecast_rebuilds_the_network_from_the_file():
    run = Run("tft")
    found = models.tft.training.forecast(read_checkpoint_bytes(run.final, None), SERIES)
    assert [f.series for f in found] == ["AAA", "BBB"]
    assert all((np.diff(f.quantiles, axis=1) >= 0).all() for f in found)
    assert found[0].timestamps.tolist() == SERIES.timestamps[217:220].tolist()


def test_dqn_decides_for_every_series_and_position():
    run = Run("dqn")
    found = models.dqn.training.decide(read_checkpoint_bytes(run.final, None), SERIES)
    assert [d.series for d in found] == ["AAA", "BBB"]
    for decision in found:
        assert set(decision.actions) == {"short", "flat", "long"}
        assert set(decision.actions.values()) <= {"sell", "hold", "buy"}


def test_dqn_stopped_in_the_epoch_of_a_nan_loss_still_writes_its_final_file(monkeypatch):
    poison(monkeypatch, "dqn", 1)
    run = Run("dqn", stop_requested=StopAfter(4))
    assert (run.result.stop_reason, run.files) == ("non_finite_loss", [(0, True)])


@both
def test_a_report_that_raises_does_not_cost_the_final_file(family, monkeypatch):
    def broken(*arguments, **options):
        raise AssertionError("a bug or a leak")

    monkeypatch.setitem(TRAINERS[family].__globals__, "_final_report" if family == "dqn" else "block_metrics", broken)
    files = []
    with pytest.raises(AssertionError, match="leak"):
        TRAINERS[family](
            CONFIGS[family], SERIES, on_epoch=lambda row: None, on_checkpoint=lambda n, final, *rest: files.append((n, final))
        )
    assert files == [(3, True)]
