"""Int8 weights of the TFT: what rounding may change, that the file forecasts what was learnt, that planted faults are seen."""

import numpy as np
import pytest
import torch
from synthetic import series_arrays

import models.tft.quantisation as quantisation
import models.tft.training
from models.checkpoint import CheckpointError, Snapshot, checkpoint_bytes, load_weights, read_checkpoint_bytes
from models.config import EarlyStopping
from models.tft.config import TFTConfig
from models.tft.evaluation import pinball_numpy
from models.tft.loss import pinball
from models.tft.network import TemporalFusionTransformer
from models.tft.plan import plan
from models.tft.quantisation import FakeQuantisation, matrices, packed, quantised, restored, unpacked
from models.tft.selection import VariableSelection
from models.tft.training import forecast, train

SIZES = (3, 20, 4)
SERIES = series_arrays({"AAA": 220, "BBB": 180})
CONFIG = TFTConfig(
    context=8, horizon=3, hidden_size=8, num_heads=2, grn_layers=1, updates_per_epoch=3, batch_size=4, windows_per_start=2,
    epochs=2, early_stopping=EarlyStopping(patience=0), device="cpu", quantisation="int8",
)  # fmt: skip


def network(sizes=SIZES, seed=0, **change):
    torch.manual_seed(seed)
    return TemporalFusionTransformer(CONFIG.model_copy(update=change), sizes)


def inputs(starts=4, windows=2, seed=1):
    torch.manual_seed(seed)
    rows = windows + CONFIG.context - 1, windows + CONFIG.horizon - 1
    return torch.randn(starts, SIZES[0]), torch.randn(starts, rows[0], SIZES[1]), torch.randn(starts, rows[1], SIZES[2])


class Run:
    """One training with its files; a stop is asked for at the update of that number."""

    def __init__(self, stop_at=None, resume=None, series=SERIES, **change):
        self.files, self.finals, self.asked = [], [], 0

        def stop_requested():
            self.asked += 1
            return self.asked == stop_at

        def on_checkpoint(epoch, is_final, weights, state):
            self.files.append((epoch, is_final))
            if is_final:
                self.finals.append(checkpoint_bytes(weights))
                self.state = state and checkpoint_bytes(state)

        self.result = train(
            CONFIG.model_copy(update=change), series, on_epoch=lambda row: None, on_checkpoint=on_checkpoint,
            stop_requested=stop_requested, resume=resume and read_checkpoint_bytes(resume, None),
        )  # fmt: skip

    @property
    def final(self):
        (data,) = self.finals
        return read_checkpoint_bytes(data, None)


@pytest.fixture(scope="module")
def whole():
    return Run()


# --- rounding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 12, 5), (12, 9)])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_rounding_is_off_by_half_a_step_at_most(shape, size):
    torch.manual_seed(0)
    weight = torch.randn(shape) * size * torch.logspace(-4, 0, shape[-1])
    weight[..., 0] = 0
    values, scale = quantised(weight)
    assert values.dtype == torch.int8
    assert scale.numel() == weight.numel() // weight.shape[1]
    back = restored(values, scale).double()
    assert bool(((weight.double() - back).abs() <= scale.double() / 2 * (1 + 1e-5)).all())
    largest = values.abs().amax(1)
    assert bool((largest[weight.abs().amax(1) > 0] == 127).all())


def test_a_scale_belongs_to_one_output_of_one_variable():
    """Making one variable's one output larger changes the rounding of nothing else."""
    net = network()
    weight = net.historical_selection.second_weight.detach().clone()
    before = restored(*quantised(weight))
    weight[2, :, 5] *= 1000
    changed = restored(*quantised(weight)) != before
    changed[2, :, 5] = False
    assert not changed.any()


@pytest.mark.parametrize("change", [{"hidden_size": 128}, {}], ids=["hidden 128", "defaults"])
def test_nearly_all_parameters_are_int8_and_the_file_is_a_third(change):
    net = TemporalFusionTransformer(TFTConfig(**change), (5, 210, 10))
    rounded = sum(p.numel() for p in matrices(net).values())
    assert rounded >= 0.9 * sum(p.numel() for p in net.parameters())
    sizes = [len(checkpoint_bytes(Snapshot(t, {}))) for t in (packed(net), net.state_dict())]
    assert sizes[0] <= 0.35 * sizes[1]
    named = {name.rpartition(".")[2] for name in matrices(net)}
    assert {"first_weight", "joint_skip_weight", "weight_hh_l0", "weight"} <= named
    assert not named & {"embed_weight", "norm_weight", "first_bias"}


# --- learning through rounded weights ------------------------------------------------------------------------------


def test_gradients_of_rounded_weights_move_the_float_ones():
    net, kept = network(dropout=0.0), {}
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    fake = FakeQuantisation(net)
    with fake():
        kept = {name: p.detach().clone() for name, p in net.named_parameters()}
        net(*inputs()).square().mean().backward()
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    other = network(dropout=0.0, seed=5)
    other.load_state_dict(kept)
    other(*inputs()).square().mean().backward()
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
        assert torch.equal(kept[name], before[name]) is (name not in matrices(net)), name


def test_float_weights_come_back_after_an_error():
    net = network()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    with pytest.raises(MemoryError), FakeQuantisation(net)():
        raise MemoryError
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


def test_recomputation_changes_no_bit_under_fake_quantisation():
    found = {}
    for setting in ("none", "full", 0.5):
        net = network(gradient_checkpointing=setting, dropout=0.3)
        torch.manual_seed(3)
        with FakeQuantisation(net)():
            loss = pinball(net(*inputs()), torch.ones(4, 2, CONFIG.horizon), CONFIG.quantiles).mean()
            torch.autograd.backward(loss)
        found[setting] = [loss.detach(), *(p.grad for p in net.parameters())]
    for setting in ("full", 0.5):
        assert all(torch.equal(a, b) for a, b in zip(found["none"], found[setting], strict=True)), setting


# --- the file forecasts what was learnt ----------------------------------------------------------------------------


def prepared(net):
    with torch.no_grad(), FakeQuantisation(net)():
        return net.eval()(*inputs())


def reloaded(net):
    """Forward of the file's bytes in another network."""
    data = checkpoint_bytes(Snapshot(packed(net), {}))
    other = network(seed=9).eval()
    load_weights(other, unpacked(read_checkpoint_bytes(data, None).tensors))
    with torch.no_grad():
        return other(*inputs())


def test_prepared_and_reloaded_forward_are_equal_to_the_bit():
    net = network()
    assert torch.equal(prepared(net), reloaded(net))
    assert not torch.equal(prepared(net), net(*inputs()))


def test_planted_wrong_axis_is_caught(monkeypatch):
    net = network()
    sound = reloaded(net)
    monkeypatch.setattr(quantisation, "INPUTS", 0)
    assert not torch.equal(prepared(net), sound)


def test_planted_rounding_after_folding_is_caught(monkeypatch):
    net = network()
    sound, fold = reloaded(net), VariableSelection.folded
    stacked = {name: p for name, p in matrices(net).items() if "first_weight" not in name and "skip_weight" not in name}
    monkeypatch.setattr(quantisation, "matrices", lambda network: stacked)
    rounded = lambda t: restored(*quantised(t)) if t.dim() > 1 else t  # noqa: E731
    monkeypatch.setattr(
        VariableSelection, "folded", lambda self, *to: tuple(tuple(map(rounded, part)) for part in fold(self, *to))
    )
    assert not torch.equal(prepared(net), sound)


@pytest.mark.parametrize("fault", ["scale gone", "scale too long", "not int8"])
def test_damaged_int8_weights_are_refused(fault):
    tensors = packed(network())
    name = "historical_selection.first_weight"
    if fault == "scale gone":
        del tensors[f"{name}.scale"]
    elif fault == "scale too long":
        tensors[f"{name}.scale"] = tensors[f"{name}.scale"].repeat(1, 8, 1)
    else:
        tensors[f"{name}.int8"] = tensors[f"{name}.int8"].float()
    with pytest.raises(CheckpointError, match=name):
        load_weights(network(), unpacked(tensors))


# --- training ------------------------------------------------------------------------------------------------------


def test_training_publishes_int8_weights_that_forecast(whole, monkeypatch):
    assert whole.files == [(2, True)]
    names = {name.removeprefix("network.") for name in whole.final.tensors if name.endswith(".int8")}
    assert names == {f"{name}.int8" for name in matrices(network(SERIES.contract.sizes))}
    found = whole.result.metrics["quantisation"]
    assert set(found) == {"parameters_int8", "file_ratio", "pinball_fp32", "pinball_int8", "delta"}
    assert found["delta"] == pytest.approx(found["pinball_int8"] / found["pinball_fp32"] - 1)
    assert 0.5 < found["parameters_int8"] < 1
    assert 0 < found["file_ratio"] < 1
    quantiles = [f.quantiles for f in forecast(whole.final, SERIES)]
    assert np.isfinite(quantiles).all()
    plain = {f"network.{k}": t for k, t in unpacked(whole.final.part("network.")).items()}
    scaler = {k: t for k, t in whole.final.tensors.items() if not k.startswith("network.")}
    again = [f.quantiles for f in forecast(Snapshot(plain | scaler, whole.final.metadata), SERIES)]
    assert np.array_equal(quantiles, again)


def test_reported_loss_is_that_of_the_published_weights(whole, monkeypatch):
    sound, losses = models.tft.training.block_metrics, []

    def block_metrics(found, *arguments):
        losses.append(float(pinball_numpy(found.normalised, found.normalised_actual, CONFIG.quantiles).mean()))
        return sound(found, *arguments)

    monkeypatch.setattr(models.tft.training, "block_metrics", block_metrics)
    rounded, tuned = Run(quantisation_epochs=0).result.metrics["quantisation"], whole.result.metrics["quantisation"]
    assert losses[0] == rounded["pinball_int8"]
    assert rounded["pinball_fp32"] == tuned["pinball_fp32"] != rounded["pinball_int8"]
    # The best of the epochs, rounding alone among them
    assert tuned["pinball_int8"] <= rounded["pinball_int8"]


def test_fine_tuning_moves_the_rounded_weights():
    tuned, rounded = (Run(final_weights="last", quantisation_epochs=n).final.tensors for n in (1, 0))
    same = [name for name in matrices(network()) if torch.equal(tuned[f"network.{name}.scale"], rounded[f"network.{name}.scale"])]
    assert not same


def test_without_quantisation_nothing_of_it_is_published():
    plain = Run(quantisation="none")
    assert not [name for name in plain.final.tensors if name.endswith((".int8", ".scale"))]
    assert "quantisation" not in plain.result.metrics
    rounded = Run(quantisation_epochs=0).final
    net = network(SERIES.contract.sizes)
    load_weights(net, plain.final.part("network."))
    for name, tensor in packed(net).items():
        assert torch.equal(tensor, rounded.tensors[f"network.{name}"]), name


@pytest.mark.parametrize("stop_at", [7, 9, 12])
def test_a_stop_in_the_fine_tuning_ends_with_one_final_and_resumes_to_the_same_bytes(whole, stop_at):
    stopped = Run(stop_at=stop_at)
    assert (stopped.result.stop_reason, stopped.files) == ("interrupted", [(2, True)])
    assert not [name for name in stopped.final.tensors if name.endswith(".int8")]
    rest = Run(resume=stopped.state)
    assert rest.files == [(2, True)]
    assert rest.finals == whole.finals


def test_a_loss_that_is_not_finite_in_the_fine_tuning_keeps_the_rounded_weights(monkeypatch):
    sound, calls = models.tft.training.pinball, []

    def loss(*arguments):
        calls.append(1)
        return sound(*arguments) * (float("nan") if len(calls) > 7 else 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(models.tft.training, "pinball", loss)
        run = Run()
    assert run.result.stop_reason == "all_epochs"
    assert len(calls) > 7
    for name, tensor in Run(quantisation_epochs=0).final.tensors.items():
        assert torch.equal(tensor, run.final.tensors[name]), name


def test_after_a_loss_that_is_not_finite_nothing_is_fine_tuned(monkeypatch):
    monkeypatch.setattr(models.tft.training, "pinball", lambda *arguments: pinball(*arguments) * float("nan"))
    run = Run()
    assert (run.result.stop_reason, run.files) == ("non_finite_loss", [(0, True)])
    assert "quantisation" not in run.result.metrics


def test_the_plan_counts_the_float_weights_that_wait():
    weights = sum(p.numel() * p.element_size() for p in network().parameters())
    peaks = [plan(CONFIG.model_copy(update={"quantisation": q}), SIZES, 1.0, 1).peak for q in ("none", "int8")]
    assert peaks[1] - peaks[0] == weights
