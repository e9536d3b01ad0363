"""What the agent must not find, and a hundred epochs on real prices, from Parquet to the final file."""

import logging

import numpy as np
import pytest
from test_artifacts import publish
from test_artifacts import trained as run_of
from test_dqn import OFF, market, trained

import models.dqn.training as training
from models.checkpoint import load_checkpoint, save_checkpoint
from models.config import IngestConfig
from models.dqn.config import DQNConfig
from models.features import FeatureContract
from tasks.demo_features import write_demo_features
from tasks.promotion import decide
from tasks.series import series_from_staged
from tasks.staging import stage_parquet
from tasks.storage import LocalStore


def one_bar_edge():
    """The return of the next bar stands in a feature; nothing tells of the bar after it."""
    random = np.random.default_rng(4)
    returns = random.normal(0, 0.01, 5000)
    features = random.normal(size=(5000, 30))
    features[:, 7] = returns
    return market(features, returns)


@pytest.mark.parametrize(("fill", "profit"), [("next", False), ("close", True)])
def test_an_edge_of_one_bar_pays_only_who_is_filled_at_once(fill, profit):
    """Trained for the later fill, the agent finds nothing; the same market filled at once pays, so there was an edge."""
    found = trained(one_bar_edge(), epochs=2, fill=fill).metrics[f"test_fill_{fill}"]
    assert (found["net_return_per_bar_low"] > 0) is profit, "by more than luck"
    assert (found["fraction_of_optimum"] > 0.5) is profit
    assert (abs(found["gross_t"]) > 3) is profit


@pytest.mark.parametrize(("edge", "promoted"), [(False, False), (True, True)])
def test_what_was_learnt_from_noise_is_not_promoted(edge, promoted, folder):
    """The planted fault: an edge that lasts (a sign that holds for 50 bars) does become champion."""
    random = np.random.default_rng(2)
    features, drift = random.normal(size=(4000, 40)), np.repeat(random.choice([-1, 1], 80), 50)
    if edge:
        features[:, 0] = drift
    result = trained(market(features, random.normal(0, 0.01, 4000) + edge * 0.004 * drift), epochs=2)
    store = LocalStore(folder / "store")
    manifest = publish(store, run_of(folder / "run", metrics=result.metrics))
    assert result.metrics["verdict"] == ("beats flat" if promoted else "does not beat flat")
    assert decide(manifest, store, "better").promoted is promoted


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_demo_features(folder / "features")
    staged = stage_parquet(str(folder / "features"), FeatureContract(lookback_bars=120), IngestConfig(), folder / "staged")
    return series_from_staged(staged)


@pytest.mark.parametrize("updates", [2, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_a_hundred_epochs_on_real_prices_end_in_dqn_final_epoch100(updates, demo, folder):
    config = DQNConfig(epochs=100, updates_per_epoch=updates, checkpoint_every=30, early_stopping=OFF, device="cpu")
    names, epochs = [], []

    def on_checkpoint(epoch, is_final, weights, resume):
        names.append(save_checkpoint(folder, "dqn", epoch, is_final, weights).name)

    result = training.train(config, demo, on_epoch=epochs.append, on_checkpoint=on_checkpoint)
    assert names == [*(f"dqn_epoch_{n}.safetensors" for n in (30, 60, 90)), "dqn_final_epoch100.safetensors"]
    metadata = load_checkpoint(folder / names[-1], None).metadata
    assert (metadata["epoch"], metadata["stop_reason"], result.epochs) == (100, "all_epochs", 100)
    assert all(row.seconds > 0 and np.isfinite(row.train_loss) for row in epochs)
    assert result.report["speed"].ratio > 1, "faster than the plain loop"
    logging.info("%.3f s an epoch (median)", np.median([row.seconds for row in epochs]))
    assert result.metrics["verdict"] in {"beats flat", "does not beat flat"}
