"""What only a GPU can show: equality with cuDNN's LSTM in the recomputed region, no waiting for the GPU inside an update, planned
against allocated memory, exact resume. Needs torch, numpy, pydantic, safetensors and pytest alone: `pytest -m gpu`."""

import pytest
import torch
from test_memory import SERIES, SIZES, config, updates_of
from test_training_rules import Run, network_of

from models.checkpoint import read_checkpoint_bytes
from models.memory import PeakMemory
from models.tft.config import TFTConfig
from models.tft.layers import gpu_tf32
from models.tft.loss import pinball
from models.tft.network import TemporalFusionTransformer
from models.tft.plan import plan
from models.tft.training import Updates, adamw

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = "cuda"


def updates_on_device(c):
    on_cpu, starts = updates_of(c, c.batch_size)
    return Updates(
        on_cpu.network.to(DEVICE), on_cpu.scaler, on_cpu.windows, on_cpu.target, on_cpu.frame, c, DEVICE, c.batch_size
    ), starts


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("setting", ["full", 0.5])
def test_gradient_checkpointing_leaves_gradients_equal(precision, setting):
    found = {}
    for name in ("none", setting):
        torch.manual_seed(1)
        updates, starts = updates_on_device(config(precision=precision, gradient_checkpointing=name, dropout=0.3, device=DEVICE))
        with gpu_tf32(precision == "tf32"):
            loss = updates.gradients(starts)
        found[name] = [loss, *(p.grad for p in updates.network.parameters()), torch.cuda.get_rng_state()]
    assert all(torch.equal(a, b) for a, b in zip(found["none"], found[setting], strict=True))


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_gpu_agrees_with_the_cpu(precision):
    c = config(precision=precision, dropout=0.0)
    on_cpu, starts = updates_of(config(dropout=0.0), c.batch_size)
    expected = on_cpu.gradients(starts)
    updates, _ = updates_on_device(c)
    with gpu_tf32(precision == "tf32"):
        loss = updates.gradients(starts)
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-5 if precision == "float32" else 0.02, atol=0.0)


def test_an_update_never_waits_for_the_gpu():
    c = config(device=DEVICE)
    updates, starts = updates_on_device(c)
    optimizer = adamw(updates.network, c)
    for number in range(3):
        torch.cuda.set_sync_debug_mode("error" if number else "default")  # the first one loads libraries
        try:
            optimizer.zero_grad(set_to_none=True)
            updates.gradients(starts)
            norm = torch.nn.utils.clip_grad_norm_(updates.network.parameters(), c.gradient_clip)
            optimizer.step()
            torch.where(norm.isfinite(), norm, torch.nan)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_allocated_memory_is_what_was_planned(share):
    c = TFTConfig(hidden_size=64, batch_size=32, windows_per_start=2, gradient_checkpointing=share, device=DEVICE)
    inputs = torch.randn(32, SIZES[0]), torch.randn(32, 61, SIZES[1]), torch.randn(32, 11, SIZES[2])
    for _ in range(2):  # the first one loads libraries
        peak = PeakMemory(DEVICE)
        network = TemporalFusionTransformer(c, SIZES).to(DEVICE)
        optimizer = adamw(network, c)
        on_gpu = [x.to(DEVICE) for x in inputs]
        pinball(network(*on_gpu), torch.randn(32, 2, 10, device=DEVICE), c.quantiles).mean().backward()
        optimizer.step()
        measured = peak.growth
        del network, optimizer, on_gpu
    assert plan(c, SIZES, share, 32).peak == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("family", ["tft", "dqn"])
def test_resume_and_a_second_run_come_to_the_same_weights(family):
    whole, again = (Run(family, SERIES, device=DEVICE, epochs=4, checkpoint_every=2) for _ in range(2))
    assert whole.sha256 == again.sha256
    rest = Run(family, SERIES, device=DEVICE, epochs=4, checkpoint_every=2, resume=whole.resume[2])
    expected, found = (network_of(read_checkpoint_bytes(run.final, None)) for run in (whole, rest))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
