"""Memory of training: the plan, micro-batches, running out of memory, and leaks that speak up."""

import gc
import logging
import platform
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from synthetic import series_arrays

import models.tft.training as training
from models.checkpoint import checkpoint_bytes
from models.config import EarlyStopping
from models.memory import HeapHoles, LeakGuard, LiveTensors, PeakMemory, in_use, large_tensor, out_of_memory, parse_size
from models.tft.config import TFTConfig
from models.tft.loss import pinball
from models.tft.network import TemporalFusionTransformer
from models.tft.plan import MemoryBudgetError, fitting_plan, plan
from models.tft.scaling import Scaler
from models.windows import WindowDataset, block_rows

SERIES = series_arrays({"AAA": 220, "BBB": 180})
SIZES = SERIES.contract.sizes


def config(**change):
    small = {
        "context": 8, "horizon": 3, "hidden_size": 8, "num_heads": 2, "grn_layers": 1, "updates_per_epoch": 3, "batch_size": 5,
        "windows_per_start": 2, "epochs": 2, "early_stopping": EarlyStopping(patience=0), "device": "cpu",
    }  # fmt: skip
    return TFTConfig(**{**small, **change})


def train(c, series=SERIES):
    finals = []
    result = training.train(
        c, series, on_epoch=lambda row: None, on_checkpoint=lambda e, final, w, r: finals.append(w) if final else None
    )
    return finals[0].tensors, result


def updates_of(c, micro_batch):
    """Gradients of one batch, `micro_batch` starts at a time; its last start has windows past the block's end."""
    target = SERIES.target(None)
    rows = block_rows(SERIES, c.split, c.horizon)["train"]
    windows = WindowDataset(SERIES, rows, c.context, c.horizon)
    torch.manual_seed(0)
    network = TemporalFusionTransformer(c, SIZES)
    scaler = Scaler.fit(SERIES, rows, target, "auto", c.horizon)
    updates = training.Updates(network, scaler, windows, target, scaler.frame(SERIES, target), c, "cpu", micro_batch)
    starts = windows.random_starts(c.batch_size, 2, np.random.default_rng(3))
    starts[-1] = 1, windows.last_origin[1]
    assert windows.batch(starts, 2).valid.sum() == 2 * c.batch_size - 1
    return updates, starts


# --- the plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("hidden", [32, 64])
def test_plan_is_what_the_tensors_of_an_update_hold(share, hidden):
    c = config(hidden_size=hidden, gradient_checkpointing=share, batch_size=16, context=20)
    planned = plan(c, SIZES, share, 16)
    with LiveTensors() as live:
        network = TemporalFusionTransformer(c, SIZES)
        moments = [torch.zeros_like(p) for p in network.parameters() for _ in range(2)]
        x = torch.randn(16, SIZES[0]), torch.randn(16, 21, SIZES[1]), torch.randn(16, 4, SIZES[2])
        pinball(network(*x), torch.randn(16, 2, 3), c.quantiles).mean().backward()
    assert moments
    assert planned.peak == pytest.approx(live.peak, rel=0.03)
    parameters = sum(4 * p.numel() for p in network.parameters())
    assert planned.fixed == 4 * parameters
    assert sum(row.parameters for row in planned.layers) == parameters


RESIDENT = """
import sys, torch
import models.memory
from benchmarks.tft_memory import config, measure_memory
torch.set_num_threads(1)
if sys.argv[1] == "holes":
    models.memory.close_holes = lambda: None
    models.memory.LARGE = 2**40
print(measure_memory(config(hidden_size=32, batch_size=64, gradient_checkpointing="full"), "cpu", tracked=False))
"""


def resident(heap):
    done = subprocess.run([sys.executable, "-c", RESIDENT, heap], check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_plan_is_what_a_process_that_recomputes_takes():
    wide = TFTConfig(context=60, horizon=10, hidden_size=32, batch_size=64, gradient_checkpointing="full", windows_per_start=1)
    planned = fitting_plan(wide, (5, 210, 10))
    assert planned.peak == pytest.approx(resident("tidied"), rel=0.1)


def test_holes_are_closed_when_they_have_grown_and_not_before(monkeypatch):
    closed, used = [], 1000

    def close():
        closed.append(1)
        memory["holes"] = 0

    memory = {"outside": 300, "holes": 200}
    monkeypatch.setattr("models.memory.close_holes", close)
    monkeypatch.setattr("models.memory.in_use", lambda device: used)
    monkeypatch.setattr("models.memory._resident", lambda: used + memory["outside"] + memory["holes"])
    holes = HeapHoles()
    steps = [(300, 200, 1), (300, 45, 1), (300, 55, 2), (100, 0, 2), (100, 45, 2), (100, 55, 3), (400, 0, 4), (400, 45, 4)]
    for outside, left, wanted in steps:  # what the rest of the process holds may shrink, and may grow
        memory |= {"outside": outside, "holes": left}
        holes()
        assert len(closed) == wanted, (outside, left)


@pytest.mark.slow
@pytest.mark.skipif(
    not ("glibc", "2.0") < platform.libc_ver() < ("glibc", "2.38"), reason="here aligned blocks leave no such holes"
)
def test_planted_holes_of_the_heap_take_more_than_was_planned():
    assert resident("holes") > 1.1 * resident("tidied")


def test_plan_without_the_selection_networks_would_be_far_off():
    """Planted: what the first design called the whole is a small part of it."""
    found = plan(config(hidden_size=32, batch_size=64), SIZES, 0.0, 64)
    without = sum(row.kept for row in found.layers if not row.layer.endswith("selection"))
    assert without < 0.5 * found.kept


def test_auto_recomputes_as_little_as_fits_then_splits_the_batch():
    c = config(batch_size=16, context=30, hidden_size=32)
    free, full, one = plan(c, SIZES, 0.0, 16), plan(c, SIZES, 1.0, 16), plan(c, SIZES, 1.0, 1)

    def fitted(peak):
        return fitting_plan(
            c.model_copy(update={"gradient_checkpointing": "auto", "memory_budget": f"{peak / 1e6:.3f}MB"}), SIZES
        )

    loose = fitted(free.peak + 10_000)
    assert (loose.share, loose.starts) == (0.0, 16)
    between = fitted((free.peak + full.peak) / 2)
    assert 0 < between.share < 1
    assert between.starts == 16
    assert plan(c, SIZES, between.share - 0.1, 16).peak > (free.peak + full.peak) / 2
    tight = fitted((one.peak + full.peak) / 2)
    assert tight.starts < 16
    assert tight.peak <= (one.peak + full.peak) / 2
    with pytest.raises(MemoryBudgetError, match=r"takes \d+ MiB, .*lower hidden_size"):
        fitted(one.peak * 0.9)


def test_auto_trains_to_the_same_weights_as_what_it_chose():
    c = config(batch_size=16, context=20, hidden_size=16)
    budget = f"{(plan(c, SIZES, 0.0, 16).peak + plan(c, SIZES, 1.0, 16).peak) / 2e6:.3f}MB"
    plain, _ = train(c)
    fitted, result = train(c.model_copy(update={"gradient_checkpointing": "auto", "memory_budget": budget}))
    assert 0 < result.metrics["memory"]["recomputed_share"] < 1
    for name, value in plain.items():
        assert torch.equal(value, fitted[name]), name


def test_auto_and_its_budget_go_together():
    with pytest.raises(ValueError, match="go together"):
        TFTConfig(gradient_checkpointing="auto")
    with pytest.raises(ValueError, match="go together"):
        TFTConfig(memory_budget="4GiB")
    assert [parse_size(t) for t in ("4GiB", "1.5 MB", "2KiB")] == [4 * 2**30, 1_500_000, 2048]


# --- micro-batches and running out of memory -----------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4])
def test_micro_batches_sum_up_to_the_gradients_of_the_batch(micro_batch):
    whole, starts = updates_of(config(dropout=0.0), 5)
    parts, _ = updates_of(config(dropout=0.0), micro_batch)
    torch.testing.assert_close(whole.gradients(starts), parts.gradients(starts), rtol=1e-5, atol=1e-6)
    for a, b in zip(whole.network.parameters(), parts.network.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)


def test_planted_mean_of_means_is_caught(monkeypatch):
    whole, starts = updates_of(config(dropout=0.0), 5)
    parts, _ = updates_of(config(dropout=0.0), 4)
    sound = training.Updates.summed_loss

    def mean_of_means(self, batch):
        return sound(self, batch) / batch.windows * 9 / 2

    expected = whole.gradients(starts)
    monkeypatch.setattr(training.Updates, "summed_loss", mean_of_means)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(expected, parts.gradients(starts), rtol=1e-5, atol=1e-6)


MESSAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
    ),
    MemoryError(),
]


@pytest.mark.parametrize("error", MESSAGES)
def test_messages_of_every_allocator_are_recognised(error):
    assert out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"), OSError()]
)
def test_other_errors_are_not_taken_for_it(error):
    assert not out_of_memory(error)


@pytest.mark.parametrize("make", [torch.empty, large_tensor])
def test_the_real_allocator_says_what_we_recognise(make):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        make(2**60, dtype=torch.uint8)
    assert out_of_memory(caught.value)


@pytest.mark.parametrize("error", MESSAGES[:5:2])
def test_out_of_memory_halves_the_micro_batch_and_comes_to_the_same_weights(monkeypatch, caplog, error):
    c = config(batch_size=8, windows_per_start=1)
    sound, graphs = training.Updates.summed_loss, []

    def hungry(self, batch):
        loss = sound(self, batch)
        # The graphs of earlier failures are gone before the next try starts
        assert all(graph() is None for graph in graphs)
        if batch.windows > 2:
            graphs.append(weakref.ref(loss))
            raise type(error)(*error.args)  # a fresh one: the error's own traceback would hold the graph
        return loss

    monkeypatch.setattr(training.Updates, "summed_loss", hungry)
    with caplog.at_level(logging.WARNING):
        found, result = train(c)
    assert len(graphs) == 2
    assert [r.getMessage().split(": ")[-1] for r in caplog.records if "out of memory" in r.getMessage()] == [
        "from now on 4 window starts at a time", "from now on 2 window starts at a time",
    ]  # fmt: skip
    assert result.metrics["memory"]["out_of_memory"] == 2
    assert result.metrics["memory"]["starts_at_a_time"] == 2
    monkeypatch.setattr(training.Updates, "summed_loss", sound)
    monkeypatch.setattr(training, "fitting_plan", lambda c, sizes: plan(c, sizes, 0.0, 2))
    expected, _ = train(c)
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def test_planted_retry_inside_the_handler_keeps_the_old_graph():
    """Why the retry stands outside: in the handler, the error's traceback still holds the frames with their tensors."""

    def failing():
        loss = torch.ones(3, requires_grad=True).sum()
        graphs.append(weakref.ref(loss))
        raise RuntimeError("out of memory")

    graphs = []
    try:
        failing()
    except RuntimeError:
        gc.collect()
        assert graphs[0]() is not None
    assert graphs[0]() is None


def test_one_start_that_is_too_much_raises_the_allocators_own_error(monkeypatch):
    def never(*arguments):
        raise MESSAGES[0]

    monkeypatch.setattr(training.Updates, "summed_loss", never)
    with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB"):
        train(config())


# --- leaks ---------------------------------------------------------------------------------------------------------


def big(**change):
    large = {"batch_size": 48, "windows_per_start": 16, "context": 30, "horizon": 10, "epochs": 5, "updates_per_epoch": 8}
    return config(**{**large, **change})


def leaking(monkeypatch, kind):
    """Plant a leak into training; returns what holds it."""
    kept, sound = [], training.Updates.summed_loss

    def loss_of(self, batch):
        if kind == "attention":
            hook = self.network.attention.register_forward_hook(lambda module, inputs, output: kept.append(output))
            try:
                return sound(self, batch) + 0 * sum(w.sum() for _, w in kept[-1:])
            finally:
                hook.remove()
        metric = sound(self, batch)  # of a forward that no backward frees
        if kind == "metrics":
            kept.append(metric)
        else:
            kept[:] = [sum(kept) + metric]
        return sound(self, batch)

    monkeypatch.setattr(training.Updates, "summed_loss", loss_of)
    return kept


@pytest.mark.parametrize("kind", ["attention", "metrics", "accumulation"])
def test_planted_leaks_speak(monkeypatch, caplog, kind):
    kept = leaking(monkeypatch, kind)
    with caplog.at_level(logging.WARNING):
        train(big())
    assert kept
    said = [r.getMessage() for r in caplog.records if "memory grew" in r.getMessage()]
    assert len(said) == 1
    assert "after epoch 2" in said[0]


def test_training_without_a_leak_stays_flat(caplog):
    peak = PeakMemory("cpu")
    with caplog.at_level(logging.WARNING):
        _, result = train(big(epochs=6))
    assert not [r for r in caplog.records if "memory grew" in r.getMessage()]
    assert peak.growth is not None
    assert result.report["memory_peak"] is not None


def test_the_copies_of_best_and_last_epoch_are_no_leak(monkeypatch, caplog):
    """While the last epoch is the best one, one copy of the weights serves both; a worse epoch takes a second copy."""
    scores = iter([1.0, 2.0, 0.0, 0.0])
    monkeypatch.setattr(training, "_validation_score", lambda *arguments: next(scores))
    wide = series_arrays({"AAA": 220}, historical=150)
    c = config(hidden_size=96, batch_size=2, windows_per_start=1, epochs=4, updates_per_epoch=1)
    weights = 4 * sum(p.numel() for p in TemporalFusionTransformer(c, wide.contract.sizes).parameters())
    before = in_use("cpu")
    with caplog.at_level(logging.WARNING):
        _, result = train(c, wide)
    assert result.best_epoch == 2
    assert weights > 0.05 * (before + 5 * weights), "a copy is large enough to be taken for a leak"
    assert not [r for r in caplog.records if "memory grew" in r.getMessage()]


@pytest.mark.parametrize("make", [torch.zeros, lambda n: large_tensor(n, dtype=torch.float32).zero_()])
def test_memory_in_use_counts_what_is_held_and_not_what_was_freed(make):
    before = in_use("cpu")
    held = make(5_000_000)
    assert in_use("cpu") - before >= held.nbytes
    size = held.nbytes
    del held
    assert in_use("cpu") - before < size / 2


def test_leak_guard_compares_with_the_second_epoch(monkeypatch, caplog):
    readings = iter([100, 200, 205, 209, 215, 300])
    monkeypatch.setattr("models.memory.in_use", lambda device: next(readings) * 2**20)
    guard = LeakGuard("cpu")
    for _ in range(6):
        guard(on_purpose=0)
    assert [r.getMessage() for r in caplog.records] == [
        "memory grew from 200 MiB after epoch 2 to 215 MiB after epoch 5: something is kept from update to update"
    ]


def test_a_resumed_run_keeps_its_micro_batch(monkeypatch):
    """Halved once by running out of memory, it stays halved after a resume, and comes to the same weights."""
    c, sound, saved = config(batch_size=4, windows_per_start=1, checkpoint_every=1), training.Updates.summed_loss, []

    def hungry(self, batch):
        if batch.windows > 2:
            raise MemoryError
        return sound(self, batch)

    def on_checkpoint(epoch, final, weights, resume):
        saved.append((weights, resume))

    with monkeypatch.context() as tight:
        tight.setattr(training.Updates, "summed_loss", hungry)
        training.train(c, SERIES, on_epoch=lambda row: None, on_checkpoint=on_checkpoint)
    (_, after_one), (expected, _) = saved[0], saved[-1]
    finals = []
    result = training.train(
        c, SERIES, on_epoch=lambda row: None, resume=after_one,
        on_checkpoint=lambda epoch, final, weights, resume: finals.append(weights) if final else None,
    )  # fmt: skip
    memory = result.metrics["memory"]
    assert (memory["starts_at_a_time"], memory["out_of_memory"]) == (2, 1)
    assert checkpoint_bytes(finals[0]) == checkpoint_bytes(expected)
