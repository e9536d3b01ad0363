"""The Gymnasium environment: it passes Gymnasium's own check and is the tensor environment, bar by bar."""

import warnings

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from synthetic import series_arrays

from models.dqn.config import DQNConfig
from models.dqn.gym_env import GymMarket
from models.dqn.market import FLAT, MarketEnv, market_of, segments_of, targets_of_actions

SERIES = series_arrays({"AAA": 60, "BBB": 40, "TINY": 1}, lookback_bars=2)


def both(**change):
    """The two environments on the same train block, the tensor one with a single copy."""
    config = DQNConfig(device="cpu", fee=0.01, **change)
    market = market_of(config, SERIES)
    tensors = MarketEnv(
        market.returns, segments_of(market.blocks["train"]), targets_of_actions(config.positions), fee=config.fee,
        reward_scale=market.scale, fill=config.fill, num_envs=1,
    )  # fmt: skip
    return GymMarket(market, config), tensors, market


def difference(gym, tensors, market):
    """The first bar at which the two differ, of every row of the block and random actions; None when none does."""
    random = np.random.default_rng(0)
    for row, end in zip(tensors.bars.tolist(), tensors.last_rows.tolist(), strict=True):
        seen, _ = gym.reset(options={"row": row})
        tensors.rows[:], tensors.held[:], tensors.ends[:] = row, FLAT, end
        truncated = False
        while not truncated:
            shown = np.append(market.table[tensors.rows[0]].numpy(), np.float32(tensors.held[0] - FLAT))
            action = random.integers(3)
            if not np.array_equal(seen, shown):
                return row
            reward, ended = tensors.step(torch.tensor([action]))
            seen, paid, terminated, truncated, info = gym.step(action)
            if (paid, truncated, terminated) != (float(reward), bool(ended), False) or info["row"] > end:
                return row
    return None


@pytest.mark.parametrize("fill", ["close", "next"])
@pytest.mark.parametrize("positions", ["long_only", "long_short"])
def test_it_is_the_tensor_environment_bar_by_bar(fill, positions):
    gym, tensors, market = both(fill=fill, positions=positions)
    assert difference(gym, tensors, market) is None
    gym._rewards = gym._rewards.copy()
    gym._rewards[20] *= np.float32(1 + 1e-6)  # the planted faults: one bar paid otherwise, one feature of the next row
    assert difference(gym, tensors, market) is not None
    gym, tensors, market = both(fill=fill, positions=positions)
    gym._table = np.roll(gym._table, -1, axis=0)
    assert difference(gym, tensors, market) is not None


def test_gymnasiums_own_check_passes_without_a_warning():
    gym = both()[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # made from data, not from a registered name: Gymnasium could not make a second one
        check_env(gym, skip_render_check=True)
    gym._table = gym._table + 99  # the planted fault: observations outside their space
    with pytest.raises(AssertionError):
        check_env(gym, skip_render_check=True)


def test_resets_are_seeded_and_stay_inside_the_block():
    gym, tensors, market = both()
    first = [gym.reset(seed=3)[1]["row"], *(gym.reset()[1]["row"] for _ in range(200))]
    assert first == [gym.reset(seed=3)[1]["row"], *(gym.reset()[1]["row"] for _ in range(200))]
    assert set(first) <= set(tensors.bars.tolist())
    with pytest.raises(KeyError):
        gym.reset(options={"row": int(market.blocks["train"][0, 1]) - 1})
    one = market_of(DQNConfig(split={"train": 0.9, "val": 0.1}), SERIES)
    with pytest.raises(ValueError, match="test block has no bar"):
        GymMarket(one, DQNConfig(), "test")
