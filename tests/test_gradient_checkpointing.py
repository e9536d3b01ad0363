"""Gradient checkpointing of the TFT: losses, gradients and random state equal to the bit, whatever is recomputed. Every property
is shown to catch a planted fault."""

import socket

import pytest
import torch
from test_tft import config, inputs, network

import models.tft.layers as layers
import models.tft.selection as selection
from models.tft.layers import Recompute
from models.tft.loss import pinball
from models.tft.selection import WeightedGRNs


def three_steps(gradient_checkpointing, dropout=0.3):
    """Losses, gradients of every step, RNG state at the end, and how often every region ran in the last step."""
    c = config(gradient_checkpointing=gradient_checkpointing, dropout=dropout)
    net = network(c)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x, target = inputs(c)
    torch.manual_seed(7)
    losses, gradients = [], []
    for _ in range(3):
        net.recompute.calls.clear()
        loss = pinball(net(*x), target, c.quantiles).mean()
        optimizer.zero_grad()
        loss.backward()
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()})
        losses.append(loss.detach())
        optimizer.step()
    return losses, gradients, torch.get_rng_state(), dict(net.recompute.calls)


def assert_equal_runs(plain, other):
    for a, b in zip(plain[0], other[0], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(plain[1], other[1], strict=True):
        for name in a:
            assert a[name] is not None, name
            assert b[name] is not None, name
            assert torch.equal(a[name], b[name]), name
    assert torch.equal(plain[2], other[2])


def assert_ran_twice(plain, other):
    for region, count in plain[3].items():
        assert other[3][region] == 2 * count, region


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_checkpointing_leaves_gradients_equal(dropout):
    plain, full = three_steps("none", dropout), three_steps("full", dropout)
    assert_equal_runs(plain, full)
    assert_ran_twice(plain, full)
    assert {
        "historical vsn",
        "historical weights",
        "static encoder",
        "historical encoder",
        "future encoder",
        "lstm",
        "attention",
    } <= set(full[3])


@pytest.mark.parametrize(("share", "again"), [(0.2, 2), (0.3, 3), (0.5, 4), (0.7, 4), (0.9, 4)])
def test_share_of_activations_is_recomputed_with_equal_gradients(share, again):
    """Twenty variables are four chunks; a share of 2 / 5.25 already drops something of each."""
    plain, part = three_steps("none"), three_steps(share)
    assert_equal_runs(plain, part)
    assert (plain[3]["historical vsn"], part[3]["historical vsn"]) == (4, 4 + again)
    assert part[3]["lstm"] == 2


def test_recomputation_drops_the_cheapest_first_and_in_the_end_everything():
    def kept(share):
        return {name: 70 - count for name, count in selection._dropped(share, 70).items()}

    assert set(kept(0.0).values()) == {70}
    assert set(kept(1.0).values()) == {0}
    assert kept(0.5) == {"normed": 0, "rstd": 0, "h1": 0, "gates": 48, "h2": 70, "keep": 70}
    for share in (0.1, 0.3, 0.5, 0.8, 0.95):
        left = kept(share)
        size = left["normed"] + left["h1"] + 2 * left["gates"] + left["h2"] + left["keep"] / 4
        assert size / (5.25 * 70) == pytest.approx(1 - share, abs=0.01)


def test_planted_detach_is_caught(monkeypatch):
    monkeypatch.setattr(layers, "checkpoint", lambda region, *x, use_reentrant: region(*(t.detach() for t in x)))
    with pytest.raises(AssertionError):
        assert_equal_runs(three_steps("none"), three_steps("full"))


def test_planted_ignored_flag_is_caught(monkeypatch):
    plain = three_steps("none")
    monkeypatch.setattr(layers, "checkpoint", lambda region, *x, use_reentrant: region(*x))
    with pytest.raises(AssertionError):
        assert_ran_twice(plain, three_steps("full"))


@pytest.mark.parametrize("where", [layers, selection])
def test_planted_private_mask_generator_is_caught(monkeypatch, where):
    private = torch.Generator().manual_seed(3)

    def private_bytes(*shape, device):
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=private)

    monkeypatch.setattr(where, "random_bytes", private_bytes)
    plain = three_steps("none")
    private.manual_seed(3)
    with pytest.raises(AssertionError):
        assert_equal_runs(plain, three_steps("full"))


def test_planted_second_mask_in_recomputation_is_caught(monkeypatch):
    plain, sound = three_steps("none"), selection._Chunk.run

    def fresh(self, have, into, scratch):
        made = sound(self, have, into, scratch)
        if into is scratch and self.cut:
            made["keep"] = made["keep"].roll(1, -1)
        return made

    monkeypatch.setattr(selection._Chunk, "run", fresh)
    with pytest.raises(AssertionError):
        assert_equal_runs(plain, three_steps("full"))


def test_selection_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    shapes = [(4, 5), (4, 5), (4, 3), (4, 3), (4, 3, 3), (4, 3), (4, 3, 6), (4, 6), (4, 3), (4, 3), (4, 3), (4, 3)]
    x = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *t: WeightedGRNs.apply(Recompute(0.5), "any", 0.0, *t), x)


def test_gradients_of_gradients_are_refused_by_name():
    c = config(dropout=0.0)
    net = network(c)
    x, target = inputs(c)
    loss = pinball(net(*x), target, c.quantiles).mean()
    first = torch.autograd.grad(loss, net.historical_selection.second_weight, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("setting", ["full", 0.5])
def test_gradient_checkpointing_is_exact_in_mixed_precision_and_for_inputs_in_evaluation(setting):
    def run(setting, autocast, training):
        c = config(gradient_checkpointing=setting)
        net = network(c).train(training)
        x, target = inputs(c)
        x = [t.requires_grad_() for t in x]
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            forecast = net(*x)
        loss = pinball(forecast.float(), target, c.quantiles).mean()
        return loss.detach(), torch.autograd.grad(loss, [*x, *net.parameters()])

    for autocast in (False, True):
        for training in (False, True):
            (plain, expected), (loss, found) = run("none", autocast, training), run(setting, autocast, training)
            assert torch.equal(plain, loss)
            for a, b in zip(expected, found, strict=True):
                assert torch.equal(a, b)
                assert a.abs().sum() > 0
    exact, low = run("none", False, False), run("none", True, False)
    assert not torch.equal(exact[0], low[0])
    torch.testing.assert_close(low[0], exact[0], rtol=0.02, atol=0.0)
    everything = [torch.cat([g.flatten() for g in side[1]]) for side in (exact, low)]
    assert torch.nn.functional.cosine_similarity(*everything, dim=0) > 0.995


def _ddp_gradients(rank, port, setting, out):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    c = config(gradient_checkpointing=setting, dropout=0.0)
    net = network(c)
    x, target = inputs(c)
    mine = slice(2 * rank, 2 * rank + 2)
    shared = torch.nn.parallel.DistributedDataParallel(net)
    pinball(shared(*(t[mine] for t in x)), target[mine], c.quantiles).mean().backward()
    if rank == 0:
        out.put({name: p.grad.numpy() for name, p in net.named_parameters()})
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("setting", ["none", "full"])
def test_two_processes_come_to_the_gradients_of_one(setting):
    c = config(gradient_checkpointing=setting, dropout=0.0)
    net = network(c)
    x, target = inputs(c)
    pinball(net(*x), target, c.quantiles).mean().backward()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    out = context.Queue()
    processes = [context.Process(target=_ddp_gradients, args=(rank, port, setting, out)) for rank in range(2)]
    for process in processes:
        process.start()
    found = out.get(timeout=120)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(torch.from_numpy(found[name]), parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
