"""The DQN: the market pays what it says, and the agent learns what can be learnt and no more."""

import dataclasses

import numpy as np
import pytest
import torch
from synthetic import series_arrays

import models.dqn.learner as learner
import models.dqn.market as market_module
import models.dqn.training as training
from models.config import EarlyStopping
from models.dqn.config import DQNConfig
from models.dqn.evaluation import HeldOut, block_bootstrap, constant, drawdown, evaluate, optimum, roll_out
from models.dqn.market import FLAT, FeatureScaler, MarketEnv, feature_table, log_returns, targets_of_actions
from models.dqn.network import Passes, PositionQNetwork
from models.dqn.replay import IndexReplay
from models.windows import SeriesArrays
from tasks.leaks import blocks_of, find_leaks

OFF = EarlyStopping(patience=0)


def market(features, returns, lookback_bars=0) -> SeriesArrays:
    """One series with the given historical features [N, F] and log returns (t -> t + 1) [N]."""
    rows = len(features)
    plain = series_arrays({"AAA": rows}, static=1, historical=features.shape[1], future=1, lookback_bars=lookback_bars)
    price = np.exp(np.concatenate([[0.0], np.cumsum(returns[:-1])]))
    zeros = np.zeros((rows, 1), np.float32)
    return dataclasses.replace(plain, price=price, historical=features.astype(np.float32), future=zeros)


def trained(series, forecasts=None, **change):
    config = DQNConfig(
        **{
            "epochs": 3, "updates_per_epoch": 200, "early_stopping": OFF, "final_weights": "last", "device": "cpu",
            "split": {"train": 0.7, "val": 0.0}, "discount": 0.9, **change,
        }
    )  # fmt: skip
    quiet = {"on_epoch": lambda row: None, "on_checkpoint": lambda *a: None}
    return training.train(config, series, **quiet, forecasts=forecasts)


def sine_market(rows=20_000, noise=223, seed=0):
    """Returns follow a sine whose phase two features carry; the others are noise."""
    random = np.random.default_rng(seed)
    phase = 2 * np.pi * np.arange(rows) / 40
    features = np.concatenate([np.sin(phase)[:, None], np.cos(phase)[:, None], random.normal(size=(rows, noise))], 1)
    return market(features, 0.003 * np.sin(phase) + random.normal(0, 0.0005, rows))


# --- the market ----------------------------------------------------------------------------------------------------


def env_of(returns, fill="close", fee=0.01, scale=2.0, positions="long_short"):
    segments = torch.tensor([[0, len(returns)]])
    env = MarketEnv(
        torch.tensor(returns, dtype=torch.float64), segments, targets_of_actions(positions), fee=fee, reward_scale=scale,
        fill=fill, num_envs=1,
    )  # fmt: skip
    env.rows[:], env.held[:], env.ends[:] = 0, FLAT, len(returns) - 1
    return env


def test_reward_is_new_position_times_return_minus_fee_scaled_by_train_deviation():
    env = env_of([0.1, -0.2, 0.3, 0.0, 0.0])
    paid = [float(env.step(torch.tensor([a]))[0]) for a in (2, 0, 1)]  # buy, sell, hold
    assert paid == pytest.approx([(0.1 - 0.01) / 2, (0.2 - 0.02) / 2, -0.3 / 2])


def test_fill_next_earns_one_bar_with_the_old_position():
    env = env_of([0.1, -0.2, 0.3, 0.0, 0.0], fill="next")
    paid = [float(env.step(torch.tensor([a]))[0]) for a in (2, 1, 1)]
    assert paid == pytest.approx([-0.01 / 2, -0.2 / 2, 0.3 / 2])


def test_sell_is_flat_when_long_only():
    env = env_of([0.1, 0.1, 0.1, 0.1], positions="long_only")
    env.step(torch.tensor([2]))
    env.step(torch.tensor([0]))
    assert env.held.tolist() == [FLAT]


def test_segment_end_truncates_and_restarts_flat_inside_a_segment():
    env = env_of([0.1, 0.1, 0.1])
    assert not env.step(torch.tensor([2]))[1]
    assert env.step(torch.tensor([1]))[1]
    assert env.held.tolist() == [FLAT]
    assert 0 <= int(env.rows) < 2


def test_returns_never_cross_a_series():
    series = series_arrays({"AAA": 5, "BBB": 4})
    returns = log_returns(series)
    assert returns[4] == 0
    assert returns[8] == 0
    assert float(returns[1]) == pytest.approx(np.log(series.price[2] / series.price[1]))


def test_prices_that_are_not_above_zero_are_refused_by_series():
    series = series_arrays({"AAA": 5, "BBB": 4})
    price = series.price.copy()
    price[6:8] = [0.0, -2.0]
    with pytest.raises(ValueError, match="BBB: 2 of 4 prices"):
        log_returns(dataclasses.replace(series, price=price))


def test_feature_table_is_static_historical_future_and_scaled_by_train_rows():
    series = series_arrays({"AAA": 30})
    table = feature_table(series)
    assert table.shape == (30, 27)
    scaler = FeatureScaler.fit(table[:20])
    moved = table.clone()
    moved[20:] *= 1000
    assert torch.equal(FeatureScaler.fit(moved[:20]).mean, scaler.mean)
    assert torch.equal(scaler.scale[:3], torch.ones(3)), "constant static columns have scale 1"
    assert float(scaler.apply(moved).abs().max()) <= 10


def test_replay_holds_row_numbers_in_at_most_11_bytes_and_keeps_the_newest():
    replay = IndexReplay(5)
    assert replay.bytes_per_transition <= 11
    for start in (0, 3, 6):
        n = torch.arange(start, start + 3)
        replay.add(n, n)
    assert sorted(replay.row.tolist()) == [4, 5, 6, 7, 8]
    rows, cells = replay.sample(64)
    assert torch.equal(rows.long(), cells)
    again = IndexReplay(5)
    again.load(replay.state())
    for both in (replay, again):
        both.add(torch.tensor([9, 9]), torch.tensor([0, 0]))
    assert torch.equal(again.row, replay.row)


# --- evaluation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", ["close", "next"])
@pytest.mark.parametrize("positions", ["long_only", "long_short"])
def test_optimum_equals_trying_every_action_sequence(fill, positions):
    returns = np.random.default_rng(1).normal(0, 0.02, 6)
    targets = targets_of_actions(positions).numpy()
    best = -np.inf
    for code in range(3**6):
        actions = np.array([(code // 3**t) % 3 for t in range(6)])
        best = max(best, roll_out(np.repeat(actions[:, None], 3, 1), returns, targets, 0.005, fill).net.sum())
    assert optimum(returns, targets, 0.005, fill).net.sum() == pytest.approx(best, abs=1e-12)


def bar_by_bar(best_action, returns, targets, fee, fill):
    """`roll_out` as a loop: net return and position of every bar."""
    held, out = FLAT, []
    for t, earned in enumerate(returns):
        new = targets[held, best_action[t, held]]
        position = (held if fill == "next" else new) - FLAT
        out.append((position * earned - fee * abs(new - held), position))
        held = new
    return np.array(out).reshape(-1, 2)


@pytest.mark.parametrize("fill", ["close", "next"])
@pytest.mark.parametrize("bars", [0, 1, 2, 7, 64, 1000])
def test_paths_put_together_in_rounds_are_those_walked_bar_by_bar(bars, fill):
    random, targets = np.random.default_rng(bars), targets_of_actions("long_short").numpy()
    returns, actions = random.normal(0, 0.02, bars), random.integers(0, 3, (bars, 3))
    path, walked = roll_out(actions, returns, targets, 0.005, fill), bar_by_bar(actions, returns, targets, 0.005, fill)
    assert np.array_equal(np.stack([path.net, path.position], 1), walked)
    if bars > 2:
        actions[bars // 2] = (actions[bars // 2] + 1) % 3  # the planted fault: one bar acts otherwise
        assert not np.array_equal(bar_by_bar(actions, returns, targets, 0.005, fill), walked)


def test_a_long_optimum_is_that_of_backward_induction():
    returns, targets = np.random.default_rng(5).normal(0, 0.01, 5000), targets_of_actions("long_short").numpy()
    value = np.zeros(3)
    for earned in returns[::-1]:
        moved = np.arange(3)[None, :] - np.arange(3)[:, None]
        value = ((np.arange(3)[None, :] - FLAT) * earned - 0.003 * np.abs(moved) + value[None, :]).max(1)
    assert optimum(returns, targets, 0.003, "close").net.sum() == pytest.approx(value[FLAT], abs=1e-9)


def test_every_baseline_has_the_measures_of_the_agent_and_is_worked_out_once(monkeypatch):
    import models.dqn.evaluation as evaluation

    sound, calls = evaluation.optimum, []
    monkeypatch.setattr(evaluation, "optimum", lambda *a: calls.append(len(a[0])) or sound(*a))
    series = series_arrays({"AAA": 300, "BBB": 200})
    result = trained(series, updates_per_epoch=5, split={"train": 0.6, "val": 0.2}, hidden_sizes=(8,))
    # A purge gap of one row on either side of the validation block; the last row of a block has no bar
    assert sorted(calls) == sorted([40 - 3, 60 - 3, *2 * (40 - 1, 60 - 1)]), "validation once, test once for either fill"
    for fill in ("close", "next"):
        found = result.metrics[f"test_fill_{fill}"]
        names = {"net_return", "sharpe", "sortino", "max_drawdown", "turnover_per_bar", "hit_rate", "trades", "fees", "exposure"}
        assert all(names <= set(row) <= set(found) for row in found["baselines"].values())
        flat, hold, best, top = (found["baselines"][n] for n in ("flat", "buy_and_hold", "best_constant", "optimum"))
        assert set(flat.values()) == {0}
        assert (hold["trades"], hold["exposure"], hold["fees"]) == (2, 1.0 if fill == "close" else 96 / 98, 2 * 5e-4)
        assert max(0.0, hold["net_return"]) <= best["net_return"] <= top["net_return"]
        assert max(found["net_return"], 0.0) <= top["net_return"] == found["optimum_return"]


def test_measures_are_those_worked_out_by_hand():
    returns, targets = np.array([0.1, -0.2, 0.3, -0.1]), targets_of_actions("long_short").numpy()
    buy_sell_hold_buy = np.repeat(np.array([[2], [0], [1], [2]]), 3, 1)  # long, short, short, long
    found = evaluate([buy_sell_hold_buy], HeldOut([returns], [np.arange(4)], targets, 0.01, 100, 0), "close")
    net = np.array([0.1 - 0.01, 0.2 - 0.02, -0.3, -0.1 - 0.02])
    assert drawdown(net) == pytest.approx([0, 0, 1 - np.exp(-0.3), 1 - np.exp(-0.42)])
    hand = {
        "net_return": net.sum(), "gross_return": -0.1, "sharpe": 10 * net.mean() / net.std(),
        "sortino": 10 * net.mean() / np.sqrt((0.3**2 + 0.12**2) / 4), "max_drawdown": 1 - np.exp(-0.42),
        "turnover_per_bar": 5 / 4, "hit_rate": 0.5, "trades": 3, "fees": 0.05, "exposure": 1,
    }  # fmt: skip
    assert {name: found[name] for name in hand} == pytest.approx(hand)


def test_a_return_above_the_optimum_raises(monkeypatch):
    import models.dqn.evaluation as evaluation

    returns, targets = np.full(50, 0.01), targets_of_actions("long_short").numpy()
    always_buy = np.full((50, 3), 2)

    def block():
        return HeldOut([returns], [np.arange(50)], targets, 0.001, 252, 0)

    assert evaluate([always_buy], block(), "close")["fraction_of_optimum"] == pytest.approx(1)
    poorer = dataclasses.replace(optimum(returns, targets, 0.001, "close"), net=returns / 2)
    monkeypatch.setattr(evaluation, "optimum", lambda *a: poorer)
    with pytest.raises(AssertionError, match="leak"):
        evaluate([always_buy], block(), "close")


def test_buying_once_and_holding_is_the_constant_position():
    returns, targets = np.random.default_rng(0).normal(0.001, 0.01, 100), targets_of_actions("long_short").numpy()
    for fill in ("close", "next"):
        path = roll_out(np.full((100, 3), 2), returns, targets, 0.002, fill)
        assert path.net.sum() == pytest.approx(constant(returns, 1, 0.002, fill).net.sum())


def test_bootstrap_interval_covers_the_mean_and_narrows():
    random = np.random.default_rng(0)
    low, high = block_bootstrap(random.normal(0.001, 0.01, 2000), np.arange(2000), seed=0)
    assert low < 0.001 < high
    wide = block_bootstrap(random.normal(0.001, 0.01, 50), np.arange(50), seed=0)
    assert high - low < wide[1] - wide[0]


def test_more_series_that_move_together_are_no_more_evidence():
    net = np.random.default_rng(0).normal(0, 0.01, 300)
    same_time, apart = np.tile(np.arange(300), 10), np.arange(3000)
    alone = block_bootstrap(net, np.arange(300), seed=0)
    assert block_bootstrap(np.tile(net, 10), same_time, seed=0) == pytest.approx(alone)
    low, high = block_bootstrap(np.tile(net, 10), apart, seed=0)  # the planted fault: one series after the other
    assert high - low < 0.5 * (alone[1] - alone[0])


def test_luck_shared_by_all_series_seldom_beats_flat():
    """True mean 0, ten series of correlation 0.5: the lower bound is above 0 in about 3 % of the draws (nominal 2.5)."""
    random, lucky, fooled = np.random.default_rng(0), 0, 0
    for seed in range(500):
        net = np.ravel(random.normal(size=200) + random.normal(size=(10, 200)))
        lucky += block_bootstrap(net, np.tile(np.arange(200), 10), seed=seed, draws=300)[0] > 0
        fooled += block_bootstrap(net, np.arange(2000), seed=seed, draws=300)[0] > 0
    assert lucky < 35
    assert fooled > 70  # the planted fault: one series after the other


def test_report_ends_where_the_metrics_end_and_holds_positions():
    result = trained(series_arrays({"AAA": 3000, "BBB": 2000}), epochs=1, updates_per_epoch=5)
    curve, positions = result.report["equity"]["agent"], result.report["positions"]
    assert curve[-1] == pytest.approx(result.metrics["test_fill_close"]["net_return"])
    assert len(curve) == len(positions) == 500
    assert set(positions) <= {-1, 0, 1}
    assert max(result.report["drawdown"]["agent"]) == pytest.approx(result.metrics["test_fill_close"]["max_drawdown"])


def test_replay_smaller_than_a_batch_or_an_exploring_bar_is_refused():
    for wrong in ({"replay_size": 100}, {"replay_size": 128, "num_envs": 129}):
        with pytest.raises(ValueError, match="replay_size"):
            DQNConfig(**wrong)
    assert DQNConfig(replay_size=1, backup="full").replay_size == 1, "fitted Q iteration needs no replay"


# --- learning ------------------------------------------------------------------------------------------------------


def exact_q(returns, fee, discount):
    """Q* of a cyclic market [rows, 3, 3] by value iteration."""
    targets, n = targets_of_actions("long_short").numpy(), len(returns)
    q = np.zeros((n, 3, 3))
    for _ in range(2000):
        value = np.roll(q.max(2), -1, axis=0)
        for held in range(3):
            for action in range(3):
                new = targets[held, action]
                q[:, held, action] = (new - FLAT) * returns - fee * abs(new - held) + discount * value[:, new]
    return q


def cyclic_market(backup, spoil=lambda agent: None):
    """After 2000 updates on a cycle of 16 one-hot rows: largest error as a share of the range of Q*, and whether the greedy
    action is right wherever the best is better than the second by 1 % of the range."""
    returns = np.random.default_rng(3).normal(0, 1, 16)
    series = market(np.tile(np.eye(16), (60, 1)), np.tile(returns, 60) * 1e-3)
    config = DQNConfig(
        epochs=1, updates_per_epoch=2000, fee=0.2e-3, discount=0.9, hidden_sizes=(64, 64), learning_rate=2e-3,
        final_learning_rate=2e-5, target_update=20, backup=backup, device="cpu", epsilon_end=1.0,
    )  # fmt: skip
    torch.manual_seed(0)
    table = FeatureScaler.fit(feature_table(series)).apply(feature_table(series))
    scale = float(np.std(np.tile(returns, 60))) * 1e-3
    agent = learner.Learner(config, table, log_returns(series), torch.tensor([[0, 16 * 60]]), scale, "cpu")
    spoil(agent)
    for _ in range(2000):
        agent.update()
    with torch.no_grad():
        found = agent.online(table[:16]).double().numpy()
    wanted = exact_q(returns * 1e-3 / scale, 0.2e-3 / scale, 0.9)
    span = wanted.max() - wanted.min()
    ordered = np.sort(wanted, axis=2)
    clear = ordered[..., 2] - ordered[..., 1] > 0.01 * span
    return np.abs(found - wanted).max() / span, (found.argmax(2) == wanted.argmax(2))[clear].all()


@pytest.mark.parametrize("backup", ["sampled", "full"])
def test_known_q_values_of_a_cyclic_market_are_learnt(backup):
    error, right = cyclic_market(backup)
    assert error <= 0.05
    assert right


def test_q_values_of_a_position_that_is_not_the_next_one_are_far_off():
    def spoil(agent):
        agent.env.next_held = agent.env.next_held.roll(1)

    error, right = cyclic_market("full", spoil)
    assert error > 0.05
    assert not right


def fraction(result):
    return result.metrics["test_fill_close"]["fraction_of_optimum"]


def blindly(values):
    return values.view(-1, 3, 3).mean(1, keepdim=True).expand(-1, 3, 3)


class Blind(PositionQNetwork):
    """A planted fault: the held position is not in the state."""

    def forward(self, features):
        return blindly(super().forward(features))


class BlindPasses(Passes):
    """The same for the passes written by hand."""

    def forward(self, table, rows):
        return self.values.copy_(blindly(super().forward(table, rows)).flatten(1).clone())

    def backward(self, gradient):
        super().backward(blindly(gradient).flatten(1))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_sine_market_is_learnt_and_neither_without_position_nor_with_unscaled_rewards(seed, monkeypatch):
    series, options = sine_market(seed=seed), {"fee": 1e-3, "seed": seed}
    sound = fraction(trained(series, **options))
    assert sound >= 0.97
    with monkeypatch.context() as patch:
        patch.setattr(learner, "PositionQNetwork", Blind)
        patch.setattr(learner, "Passes", BlindPasses)
        assert fraction(trained(series, **options)) < sound
    with monkeypatch.context() as patch:
        patch.setattr(market_module, "reward_scale_of", lambda returns, rows: 1.0)
        assert fraction(trained(series, **options)) < 0.5


def test_sampled_and_full_backup_come_to_the_same_on_the_sine_market(monkeypatch):
    """Fitted Q iteration knows neither replay nor exploration: what it earns, the replayed updates must earn too."""
    series, options = sine_market(), {"fee": 1e-3, "backup": "full"}
    full = fraction(trained(series, **options))
    assert full >= 0.97
    options["backup"] = "sampled"
    assert abs(fraction(trained(series, **options)) - full) < 0.02
    sound = IndexReplay.sample

    def sample(self, count):
        rows, cells = sound(self, count)
        return rows, cells % 3

    monkeypatch.setattr(IndexReplay, "sample", sample)  # the planted fault: transitions of one position alone come back
    assert abs(fraction(trained(series, **options)) - full) > 0.02


def test_noise_has_no_edge_and_is_said_not_to_beat_flat():
    random = np.random.default_rng(2)
    result = trained(market(random.normal(size=(5000, 225)), random.normal(0, 0.01, 5000)))
    assert abs(result.metrics["test_fill_close"]["gross_t"]) < 3
    assert result.metrics["verdict"] == "does not beat flat"
    assert result.metrics["beats_flat"] is False


def test_leaked_next_return_is_found_and_useless_when_filled_a_bar_later():
    random = np.random.default_rng(4)
    returns = random.normal(0, 0.01, 5000)
    features = random.normal(size=(5000, 60))
    features[:, 7] = returns
    series = market(features, returns)
    names = [*series.contract.groups()["historical"], *series.contract.groups()["future"]]
    assert [leak.feature for leak in find_leaks(blocks_of(series), names)] == [names[7]], "the data gate says so first"
    result = trained(series, epochs=4)
    assert fraction(result) >= 0.80
    assert result.metrics["test_fill_next"]["net_return"] <= 0
    assert result.metrics["beats_flat"] is False
