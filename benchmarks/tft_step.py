"""CPU seconds of a training update (forward, loss, backward, clipping, Adam) beside pytorch-forecasting, darts, neuralforecast.

python -m benchmarks.tft_step [--quick] [--json], in the environment of requirements-bench.lock (see there).

5 static, 210 historical and 10 known-future variables, hidden 128, 4 heads, 60 -> 10 bars, 3 quantiles, dropout 0.1, batch 8,
one thread, random numbers. Peers at full width: pytorch-forecasting and darts with hidden_continuous_size 128 (their default of 8
is another, smaller network). Where a peer feeds the target and the future columns to its encoder as well, they take the place of
historical ones, so that every encoder selects among 210. Ours has three more GRN layers per encoder. All run in one process, one
after the other, round by round; a ratio is the median over rounds of peer seconds / our seconds.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version

import torch
from torch import Tensor

from benchmarks import command_line, show
from benchmarks.tft_memory import config, update_of
from models.memory import steady_heap

B, T, H, D, HEADS = 8, 60, 10, 128, 4
STATIC, HISTORICAL, FUTURE = 5, 210, 10
QUANTILES = [0.1, 0.5, 0.9]
WINDOWS = 8
TARGETS = {
    "vs_pytorch_forecasting": (">=", 1.8), "vs_darts": (">=", 1.8), "vs_neuralforecast": (">=", 9.0),
    "shared_vs_pytorch_forecasting": (">=", 5.0), "shared_vs_darts": (">=", 5.0), "shared_vs_neuralforecast": (">=", 25.0),
}  # fmt: skip

Step = Callable[[], None]


def stepping(network: torch.nn.Module, forward: Callable[[], Tensor]) -> Step:
    """One update of a peer's network: `forward` gives its quantiles [B, H, ..., Q]."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
    levels, target = torch.tensor(QUANTILES), torch.randn(B, H, 1)
    network.train()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        error = target - forward().reshape(B, H, len(QUANTILES))
        torch.maximum(levels * error, (levels - 1) * error).mean().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()

    return step


def pytorch_forecasting() -> tuple[torch.nn.Module, Step]:
    from pytorch_forecasting.metrics import QuantileLoss
    from pytorch_forecasting.models.temporal_fusion_transformer import TemporalFusionTransformer

    static, past, ahead = ([f"{k}{i}" for i in range(n)] for k, n in (("s", STATIC), ("h", HISTORICAL), ("f", FUTURE)))
    network = TemporalFusionTransformer(
        hidden_size=D, hidden_continuous_size=D, lstm_layers=1, dropout=0.1, output_size=3, attention_head_size=HEADS,
        loss=QuantileLoss(QUANTILES), max_encoder_length=T, static_reals=static, time_varying_reals_encoder=past,
        time_varying_reals_decoder=ahead, x_reals=static + past + ahead, learning_rate=1e-3,
    )  # fmt: skip
    width = STATIC + HISTORICAL + FUTURE
    x = {
        "encoder_cont": torch.randn(B, T, width), "decoder_cont": torch.randn(B, H, width),
        "encoder_cat": torch.zeros(B, T, 0, dtype=torch.long), "decoder_cat": torch.zeros(B, H, 0, dtype=torch.long),
        "encoder_lengths": torch.full((B,), T), "decoder_lengths": torch.full((B,), H),
        "encoder_target": torch.randn(B, T), "decoder_target": torch.randn(B, H), "target_scale": torch.ones(B, 2),
    }  # fmt: skip
    network.transform_output = lambda prediction, **_: prediction  # the rescaling of its output is no part of the step
    return network, stepping(network, lambda: network(x)["prediction"])


def darts() -> tuple[torch.nn.Module, Step]:
    import numpy as np
    from darts.models import TFTModel
    from darts.models.forecasting import tft_model
    from darts.utils.likelihood_models import QuantileRegression

    model = TFTModel(
        input_chunk_length=T, output_chunk_length=H, hidden_size=D, hidden_continuous_size=D, lstm_layers=1,
        num_attention_heads=HEADS, dropout=0.1, likelihood=QuantileRegression(QUANTILES), use_static_covariates=True,
    )  # fmt: skip
    past = HISTORICAL - FUTURE - 1
    make = lambda *shape: np.random.default_rng(0).normal(size=shape).astype(np.float32)  # noqa: E731
    sample = {
        "past_target": make(T, 1), "past_covariates": make(T, past), "historic_future_covariates": make(T, FUTURE),
        "future_covariates": make(H, FUTURE), "static_covariates": make(1, STATIC), "future_target": make(H, 1),
    }  # fmt: skip
    fields = tft_model.TorchTrainingSample.__annotations__
    network = model._create_model(tft_model.TorchTrainingSample(**{k: sample.get(k) for k in fields}))
    network = network.float()
    batch = {k: torch.randn(B, *v.shape) for k, v in sample.items() if k != "future_target"}
    names = tft_model.PLModuleInput.__annotations__
    x = tft_model.PLModuleInput(**{k: batch.get(k) for k in names})

    return network, stepping(network, lambda: network(x).prediction)


def neuralforecast() -> tuple[torch.nn.Module, Step]:
    from neuralforecast.losses.pytorch import MQLoss
    from neuralforecast.models import TFT

    past = HISTORICAL - FUTURE - 1
    network = TFT(
        h=H, input_size=T, hidden_size=D, n_head=HEADS, dropout=0.1, loss=MQLoss(quantiles=QUANTILES), max_steps=1,
        stat_exog_list=[f"s{i}" for i in range(STATIC)], hist_exog_list=[f"h{i}" for i in range(past)],
        futr_exog_list=[f"f{i}" for i in range(FUTURE)],
    )  # fmt: skip
    x = {
        "insample_y": torch.randn(B, T, 1), "hist_exog": torch.randn(B, T, past),
        "futr_exog": torch.randn(B, T + H, FUTURE), "stat_exog": torch.randn(B, STATIC),
    }  # fmt: skip
    return network, stepping(network, lambda: network(x))


def ours(windows: int) -> tuple[torch.nn.Module, Step]:
    network, update = update_of(config(batch_size=B, windows_per_start=windows), "cpu")
    return network, lambda: (update(), None)[1]


def measure(rounds: int) -> dict[str, float]:
    """The benchmark's figures; the seconds are told on stderr."""
    made = {
        "ours": ours(1), "ours, 8 windows a start": ours(WINDOWS), "pytorch_forecasting": pytorch_forecasting(),
        "darts": darts(), "neuralforecast": neuralforecast(),
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in made}
    with steady_heap():
        for number in range(rounds + 1):
            for name, (_, step) in made.items():
                started = time.process_time()
                step()
                if number:  # the first round warms up
                    seconds[name].append(time.process_time() - started)
    figures: dict[str, float] = {}
    for name, (network, _) in made.items():
        spent, windows = seconds[name], B * (WINDOWS if "8" in name else 1)
        millions = sum(p.numel() for p in network.parameters()) / 1e6
        print(
            f"{name:26}{millions:8.2f} M parameters {statistics.median(spent):8.2f} CPU s ({min(spent):.2f} to {max(spent):.2f}) "
            f"{windows / statistics.median(spent):8.1f} windows/s", file=sys.stderr,
        )  # fmt: skip
        if not name.startswith("ours"):
            for prefix, mine, scale in (("vs_", "ours", 1), ("shared_vs_", "ours, 8 windows a start", WINDOWS)):
                ratios = [a * scale / b for a, b in zip(spent, seconds[mine], strict=True)]
                figures[prefix + name] = statistics.median(ratios)
    return figures


def main() -> None:
    options = command_line(__doc__, "two rounds instead of seven").parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    packages = ("torch", "pytorch-forecasting", "darts", "neuralforecast")
    print(", ".join(f"{p} {version(p)}" for p in packages), file=sys.stderr)
    show("tft_step", measure(2 if options.quick else 7), TARGETS, packages, options.json)


if __name__ == "__main__":
    main()
