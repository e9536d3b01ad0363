"""An update: equal to autograd's to the bit, the same with and without what is kept ready, and silent to the host."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.dqn.config import DQNConfig
from models.dqn.learner import Learner
from models.dqn.network import Passes
from models.dqn.plain import PlainLearner

ROWS = 700
SMALL = {"hidden_sizes": (24, 16), "batch_size": 48, "num_envs": 8, "target_update": 7, "replay_size": 300, "epochs": 1}


def learner(kind=Learner, **change):
    torch.manual_seed(0)
    returns, segments = 0.01 * torch.randn(ROWS, dtype=torch.float64), torch.tensor([[0, 300], [310, ROWS]])
    # All sizes but the last are eights: Adam rounds a vector's tail otherwise, and our parameters are one vector
    return kind(DQNConfig(**{**SMALL, **change}), torch.randn(ROWS, 16), returns, segments, 0.01, "cpu")


def moved_on(agent, updates=60):
    """The losses of so many updates, from random numbers of their own."""
    torch.manual_seed(1)
    return torch.stack([agent.update() for _ in range(updates)])


@pytest.mark.parametrize("change", [{}, {"backup": "full"}, {"hidden_sizes": (), "fill": "next"}, {"positions": "long_only"}])
def test_update_by_hand_equals_autograd_to_the_bit(change):
    ours, plain = learner(**change), learner(PlainLearner, **change)
    assert torch.equal(moved_on(ours), moved_on(plain))
    assert torch.equal(ours.flat, torch.cat([p.flatten() for p in plain.online.parameters()]))
    assert torch.equal(ours.flat_target, torch.cat([p.flatten() for p in plain.target_network.parameters()]))


def test_a_gradient_that_is_off_by_a_millionth_is_caught(monkeypatch):
    sound = Passes.backward

    def backward(self, gradient):
        sound(self, gradient)
        self.layers[0].weight.grad[0, 0] += 1e-6  # a factor would cancel: Adam divides by the gradient's own size

    monkeypatch.setattr(Passes, "backward", backward)
    ours, plain = learner(), learner(PlainLearner)
    assert not torch.equal(moved_on(ours), moved_on(plain))


def test_gradients_are_clipped_to_the_norm():
    agent = learner(gradient_clip=1e-3)
    agent.update()
    assert float(agent.flat.grad.norm()) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("tau", [1.0, 0.3])
def test_target_values_are_kept_where_that_pays_and_change_nothing(tau):
    """690 rows to go to: an interval of 20 updates asks for 960 of them, one of 7 for 336."""
    assert learner().cached is None
    kept, plain = learner(target_update=20, target_tau=tau), learner(target_update=20, target_tau=tau)
    assert (kept.cached is not None) is (tau == 1)
    plain.cached = None
    assert torch.equal(moved_on(kept), moved_on(plain))
    if tau == 1:
        kept.cached += 1e-3  # the planted fault: values of another network
        assert not torch.equal(moved_on(kept), moved_on(plain))


class NoReadBack(TorchDispatchMode):
    """Fails on what makes the host wait for a device: a tensor read as a number, a mask turned into places."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.name().split(".")[0]
        assert name not in {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}, name
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("change", [{}, {"backup": "full"}, {"target_update": 20}, {"target_tau": 0.5}])
def test_an_update_reads_nothing_back(change):
    agent = learner(**change)
    with NoReadBack():
        for _ in range(25):
            agent.update()
    with pytest.raises(AssertionError, match="scalar"), NoReadBack():
        bool(agent.env.rows[0] > 0)


@pytest.mark.parametrize(("positions", "cells"), [("long_short", range(9)), ("long_only", range(3, 9))])
def test_every_position_that_may_be_held_is_replayed_with_every_action(positions, cells):
    """Flat too, though no action but hold leads there when selling goes short."""
    agent = learner(positions=positions, epsilon_start=0.3)
    moved_on(agent)
    counts = torch.bincount(agent.replay.cell.long(), minlength=9)
    assert [cell for cell in range(9) if counts[cell] > 0.02 * agent.replay.filled] == list(cells), counts
