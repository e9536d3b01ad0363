"""CPU time of a DQN's gradient step with all that belongs to it (environment, exploration, replay, optimizer, target network)
beside stable-baselines3, a loop in the manner of CleanRL, tianshou and torchrl.

python -m benchmarks.dqn_step [--quick] [--json], in the environment of requirements-bench.lock (see there).

Network 225-256-256, batch 128, one gradient step per 4 environment steps, replay of 100 000, Adam, the target network renewed
every 1000 updates, epsilon 0.1, one thread, random numbers. Peers play models/dqn/gym_env.py, whose observation holds the
position as one more number, and learn without double DQN; ours learns with it, one forward more. Ours steps 64 copies of the
market every 16 updates, tianshou 4 copies every update; the others one copy four times, as their defaults have it
(`sb3_4_copies`: four once). `gemm_floor` is the matrix products of one gradient step and nothing else: two forwards, one
backward, in memory allocated before. `plain` is our own update with autograd (models/dqn/plain.py). All run in one process,
one after the other, round by round, and are timed by turns of 16 updates: figures are medians over turns, since on a shared
machine some are disturbed. A renewal of the target network seldom falls into the median turn: ours, which costs as much as
some updates, is timed by itself and added; the peers' copy is not.
"""

from __future__ import annotations

import logging
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from benchmarks import command_line, show
from models.config import Split
from models.dqn.config import DQNConfig
from models.dqn.gym_env import GymMarket
from models.dqn.learner import Learner
from models.dqn.market import FeatureScaler, Market, segments_of
from models.dqn.plain import PlainLearner

ROWS, FEATURES, HIDDEN, BATCH = 10_000, 225, 256, 128
STEPS = 4  # of the environment, per update
TURN, TURNS, RENEWED = 16, 8, 1000  # updates timed at once; such turns in a row; updates between renewals of the target network
REPLAY, RATE, DISCOUNT, EPSILON = 100_000, 1e-4, 0.9, 0.1
TARGETS = {
    "vs_sb3": (">=", 3.0), "vs_cleanrl": (">=", 2.0), "vs_gemm_floor": ("<=", 1.7), "bytes_per_transition": ("<=", 11.0),
}  # fmt: skip
CONFIG = DQNConfig(
    batch_size=BATCH, num_envs=64, updates_per_bar=64 // STEPS, replay_size=REPLAY, hidden_sizes=(HIDDEN, HIDDEN),
    target_update=RENEWED,
    learning_rate=RATE, final_learning_rate=RATE, epsilon_start=EPSILON, epsilon_end=EPSILON, discount=DISCOUNT, epochs=1000,
    device="cpu", split=Split(train=0.9, val=0.0),
)  # fmt: skip

Run = Callable[[int], object]
"""So many gradient steps with their environment steps."""


def market() -> Market:
    torch.manual_seed(0)
    returns = 0.01 * torch.randn(ROWS, dtype=torch.float64)
    blocks = {name: np.array([[0, ROWS]]) for name in ("train", "val", "test")}
    table = torch.randn(ROWS, FEATURES).clamp_(-10, 10)
    return Market(table, returns, FeatureScaler(torch.zeros(FEATURES), torch.ones(FEATURES)), 0.01, blocks)  # type: ignore[arg-type]


def ours(kind: type[Learner]) -> tuple[Run, float]:
    world = market()
    learner = kind(CONFIG, world.table, world.returns, segments_of(world.blocks["train"]), world.scale, "cpu")
    return lambda updates: [learner.update() for _ in range(updates)], learner.replay.bytes_per_transition


def renewal() -> float:
    """CPU seconds of renewing our target network, whose values of all rows are worked out then."""
    world = market()
    learner = Learner(CONFIG, world.table, world.returns, segments_of(world.blocks["train"]), world.scale, "cpu")
    spent = []
    for _ in range(5):
        started = time.process_time()
        learner.renew_target()
        spent.append(time.process_time() - started)
    return statistics.median(spent)


def gemm_floor() -> tuple[Run, float]:
    sizes = [FEATURES, HIDDEN, HIDDEN, 9]
    weights = [torch.randn(b, a) / a**0.5 for a, b in pairwise(sizes)]
    values = [torch.randn(BATCH, n) for n in sizes]
    inner, by_weight = [torch.empty_like(x) for x in values], [torch.empty_like(w) for w in weights]

    @torch.no_grad()
    def run(updates: int) -> None:
        for _ in range(updates):
            for _ in range(2):
                for x, w, out in zip(values, weights, values[1:], strict=False):
                    torch.mm(x, w.t(), out=out)
            for i in (2, 1, 0):
                torch.mm(values[i + 1].t(), values[i], out=by_weight[i])
                if i:
                    torch.mm(values[i + 1], weights[i], out=inner[i])

    return run, 0.0


def sb3(copies: int) -> tuple[Run, float]:
    from stable_baselines3 import DQN
    from stable_baselines3.common.vec_env import DummyVecEnv

    world = market()
    agent = DQN(
        "MlpPolicy", DummyVecEnv([lambda: GymMarket(world, CONFIG)] * copies), learning_rate=RATE, buffer_size=REPLAY,
        learning_starts=BATCH, batch_size=BATCH, gamma=DISCOUNT, train_freq=STEPS // copies, gradient_steps=1,
        target_update_interval=RENEWED * STEPS, exploration_initial_eps=EPSILON, exploration_final_eps=EPSILON,
        policy_kwargs={"net_arch": [HIDDEN, HIDDEN]}, device="cpu",
    )  # fmt: skip
    return lambda updates: agent.learn(updates * STEPS, reset_num_timesteps=False), _bytes(agent.replay_buffer)


def _bytes(buffer: object) -> float:
    """Bytes of a transition in a replay buffer of stable-baselines3: all its arrays."""
    return sum(array.nbytes for array in vars(buffer).values() if isinstance(array, np.ndarray)) / REPLAY


def cleanrl() -> tuple[Run, float]:
    """The loop of cleanrl/dqn.py: one environment, a gradient step every 4, its copy of stable-baselines3's replay buffer."""
    from gymnasium.vector import AutoresetMode, SyncVectorEnv
    from stable_baselines3.common.buffers import ReplayBuffer

    world = market()
    envs = SyncVectorEnv([lambda: GymMarket(world, CONFIG)], autoreset_mode=AutoresetMode.SAME_STEP)

    def network() -> nn.Sequential:
        width = FEATURES + 1
        return nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 3))

    online, target = network(), network()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=RATE)
    buffer = ReplayBuffer(
        REPLAY, envs.single_observation_space, envs.single_action_space, "cpu", handle_timeout_termination=False
    )
    obs, _ = envs.reset(seed=0)
    steps = 0

    def run(updates: int) -> None:
        nonlocal obs, steps
        for _ in range(updates * STEPS):
            steps += 1
            if random.random() < EPSILON:
                actions = np.array([envs.single_action_space.sample() for _ in range(envs.num_envs)])
            else:
                actions = torch.argmax(online(torch.Tensor(obs)), dim=1).numpy()
            next_obs, rewards, terminations, truncations, infos = envs.step(actions)
            real_next_obs = next_obs.copy()
            for i, truncated in enumerate(truncations):
                if truncated:
                    real_next_obs[i] = infos["final_obs"][i]
            buffer.add(obs, real_next_obs, actions, rewards, terminations, [infos])
            obs = next_obs
            if steps % STEPS == 0:
                data = buffer.sample(BATCH)
                with torch.no_grad():
                    best, _ = target(data.next_observations).max(dim=1)
                    td_target = data.rewards.flatten() + DISCOUNT * best * (1 - data.dones.flatten())
                loss = nn.functional.mse_loss(td_target, online(data.observations).gather(1, data.actions).squeeze())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if steps % (STEPS * RENEWED) == 0:
                target.load_state_dict(online.state_dict())

    return run, _bytes(buffer)


def tianshou() -> tuple[Run, float]:
    from tianshou.algorithm import DQN
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.utils.net.common import Net
    from tianshou.utils.torch_utils import policy_within_training_step

    world = market()
    envs = DummyVectorEnv([lambda: GymMarket(world, CONFIG)] * STEPS)
    space = envs.action_space[0]
    policy = DiscreteQLearningPolicy(
        model=Net(state_shape=FEATURES + 1, action_shape=3, hidden_sizes=[HIDDEN, HIDDEN]),
        action_space=space,
        eps_training=EPSILON,
    )
    algorithm = DQN(
        policy=policy, optim=AdamOptimizerFactory(lr=RATE), gamma=DISCOUNT, target_update_freq=RENEWED, is_double=False
    )
    buffer = VectorReplayBuffer(REPLAY, STEPS)
    collector = Collector(algorithm, envs, buffer)
    collector.reset()

    def run(updates: int) -> None:
        with policy_within_training_step(policy):
            for _ in range(updates):
                collector.collect(n_step=STEPS)
                algorithm.update(buffer=buffer, sample_size=BATCH)

    run(1)

    def size(batch: object) -> int:
        parts = batch.values() if hasattr(batch, "values") else [batch]  # nested batches of arrays
        return sum(p.nbytes if isinstance(p, np.ndarray) else size(p) for p in parts)

    return run, size(buffer._meta) / REPLAY


def torchrl() -> tuple[Run, float]:
    from tensordict.nn import TensorDictSequential
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.envs import GymWrapper
    from torchrl.modules import MLP, EGreedyModule, QValueActor
    from torchrl.objectives import DQNLoss, HardUpdate

    env = GymWrapper(GymMarket(market(), CONFIG), categorical_action_encoding=True)
    network = MLP(in_features=FEATURES + 1, out_features=3, num_cells=[HIDDEN, HIDDEN], activation_class=nn.ReLU)
    actor = QValueActor(network, spec=env.action_spec, action_space="categorical", in_keys=["observation"])
    explore = EGreedyModule(env.action_spec, eps_init=EPSILON, eps_end=EPSILON, annealing_num_steps=1)
    collector = Collector(env, TensorDictSequential(actor, explore), frames_per_batch=STEPS, total_frames=-1)
    buffer = ReplayBuffer(storage=LazyTensorStorage(REPLAY), batch_size=BATCH)
    loss_of = DQNLoss(actor, loss_function="smooth_l1", delay_value=True, double_dqn=False, action_space="categorical")
    loss_of.make_value_estimator(gamma=DISCOUNT)
    renew = HardUpdate(loss_of, value_network_update_interval=RENEWED)
    optimizer = torch.optim.Adam(loss_of.parameters(), lr=RATE)
    frames = iter(collector)

    def run(updates: int) -> None:
        for _ in range(updates):
            buffer.extend(next(frames))
            loss = loss_of(buffer.sample())["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            renew.step()

    run(1)
    return run, buffer.storage._storage.bytes() / REPLAY


def measure(rounds: int) -> dict[str, float]:
    """The benchmark's figures; the times are told on stderr."""
    made = {
        "ours": ours(Learner), "gemm_floor": gemm_floor(), "plain": ours(PlainLearner), "sb3": sb3(1), "sb3_4_copies": sb3(4),
        "cleanrl": cleanrl(), "tianshou": tianshou(), "torchrl": torchrl(),
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds + 1):
        for name, (run, _) in made.items():
            for _ in range(TURNS):
                started = time.process_time()
                run(TURN)
                if number:  # the first round warms up and fills the replay
                    seconds[name].append((time.process_time() - started) / TURN)
    typical = {name: statistics.median(spent) for name, spent in seconds.items()}
    typical["ours"] += renewal() / RENEWED
    print(f"{'':16}{'CPU ms per update':>18}{'10 %':>8}{'90 %':>8}{'us per environment step':>26}{'bytes':>8}", file=sys.stderr)
    for name, (_, size) in made.items():
        low, *_, high = (1e3 * s for s in statistics.quantiles(seconds[name], n=10))
        print(
            f"{name:16}{1e3 * typical[name]:18.2f}{low:8.2f}{high:8.2f}{1e6 * typical[name] / STEPS:26.0f}{size:8.0f}",
            file=sys.stderr,
        )
    figures = {f"vs_{name}": spent / typical["ours"] for name, spent in typical.items() if name not in ("ours", "gemm_floor")}
    return {**figures, "vs_gemm_floor": typical["ours"] / typical["gemm_floor"], "bytes_per_transition": made["ours"][1]}


def main() -> None:
    options = command_line(__doc__, "three rounds instead of ten").parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    packages = ("torch", "stable-baselines3", "tianshou", "torchrl", "tensordict", "gymnasium", "numpy")
    show("dqn_step", measure(3 if options.quick else 10), TARGETS, packages, options.json)


if __name__ == "__main__":
    main()
