"""Mixed precision of the TFT's training: what runs in bfloat16 and what never does."""

import numpy as np
import pytest
import torch
from test_memory import SERIES, SIZES, config, train, updates_of
from torch.utils._python_dispatch import TorchDispatchMode

import models.tft.training as training
from models.memory import LiveTensors
from models.tft.evaluation import forecast_block
from models.tft.layers import gpu_tf32
from models.tft.loss import pinball
from models.tft.network import TemporalFusionTransformer
from models.tft.plan import plan

PRODUCTS, EXACT = ("mm", "addmm", "bmm", "baddbmm"), ("_softmax", "softplus", "mkldnn_rnn_layer")


class Dtypes(TorchDispatchMode):
    """The dtypes that each operation was given, by its name."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()}
        self.seen.setdefault(func.overloadpacket.__name__, set()).update(given)
        return func(*args, **(kwargs or {}))


def operations(precision):
    updates, starts = updates_of(config(precision=precision, batch_size=4), 4)
    with Dtypes() as dtypes:
        loss = updates.gradients(starts)
    return dtypes.seen, loss, updates


def test_bfloat16_products_run_in_it_and_softmax_lstm_heads_loss_and_gradients_do_not():
    seen, loss, updates = operations("bfloat16")
    assert all(torch.bfloat16 in seen[name] for name in PRODUCTS)
    assert {name: seen[name] for name in EXACT} == {name: {torch.float32} for name in EXACT}
    assert loss.dtype == torch.float32
    assert (
        {p.grad.dtype for p in updates.network.parameters()} == {p.dtype for p in updates.network.parameters()} == {torch.float32}
    )
    plain, exact, _ = operations("float32")
    assert not any(torch.bfloat16 in dtypes for dtypes in plain.values())
    assert loss != exact
    assert float(loss) == pytest.approx(float(exact), rel=0.02)


def test_evaluation_runs_in_float32(monkeypatch):
    seen = []

    def spied(*arguments):
        with Dtypes() as dtypes:
            found = forecast_block(*arguments)
        seen.append(dtypes.seen)
        return found

    monkeypatch.setattr(training, "forecast_block", spied)
    train(config(precision="bfloat16"))
    assert seen
    assert not any(torch.bfloat16 in dtypes for one in seen for dtypes in one.values())


@pytest.mark.parametrize("setting", ["full", 0.5])
def test_bfloat16_training_comes_to_the_same_weights_whatever_is_recomputed(setting):
    plain, _ = train(config(precision="bfloat16"))
    other, result = train(config(precision="bfloat16", gradient_checkpointing=setting))
    assert all(torch.equal(plain[name], other[name]) for name in plain)
    assert np.isfinite(result.metrics["test"]["pinball"])
    exact, _ = train(config())
    assert not all(torch.equal(plain[name], exact[name]) for name in plain)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_plan_counts_half_precision_activations(share):
    c = config(hidden_size=64, gradient_checkpointing=share, batch_size=16, context=20, precision="bfloat16")
    with LiveTensors() as live:
        network = TemporalFusionTransformer(c, SIZES)
        moments = [torch.zeros_like(p) for p in network.parameters() for _ in range(2)]
        x = torch.randn(16, SIZES[0]), torch.randn(16, 21, SIZES[1]), torch.randn(16, 4, SIZES[2])
        with torch.autocast("cpu", torch.bfloat16):
            quantiles = network(*x)
        pinball(quantiles, torch.randn(16, 2, 3), c.quantiles).mean().backward()
    assert moments
    # What is not variable selection is planned in float32
    planned = plan(c, SIZES, share, 16)
    assert planned.peak == pytest.approx(live.peak, rel=0.1)
    if not share:
        exact = plan(c.model_copy(update={"precision": "float32"}), SIZES, share, 16)
        low, high = (sum(row.kept for row in p.layers if row.layer.endswith("selection")) for p in (planned, exact))
        assert 0.5 < low / high < 0.75


def test_tf32_is_on_inside_alone_and_off_for_float32():
    place = torch.backends.cuda.matmul
    before = place.fp32_precision
    for on, name in ((True, "tf32"), (False, "ieee")):
        with gpu_tf32(on):
            assert (place.fp32_precision, torch.backends.cudnn.rnn.fp32_precision) == (name, name)
        assert place.fp32_precision == before


def test_training_tells_the_gpu_which_products_it_wants(monkeypatch):
    seen = []
    monkeypatch.setattr(training, "_train", lambda *a: seen.append(torch.backends.cuda.matmul.fp32_precision) or _Ended())
    for name in ("float32", "tf32", "bfloat16"):
        training.train(config(precision=name), SERIES, on_epoch=print, on_checkpoint=print)
    assert seen == ["ieee", "tf32", "ieee"]


class _Ended:
    stop_reason, metrics = "interrupted", {}
