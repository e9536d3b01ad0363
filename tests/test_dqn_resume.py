"""The same bytes in another process: a fresh run of the same seed, a run continued elsewhere, a run killed and run again."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_training_rules import CONFIGS, SERIES, Run

import models.dqn.training
from models.checkpoint import checkpoint_bytes, read_checkpoint_bytes

CHANGE = {"epochs": 4, "checkpoint_every": 2}
CODE = """
import sys
import torch
from test_training_rules import Run
torch.set_num_threads(1)
torch.rand(int(sys.argv[1]))
resume = open(sys.argv[2], "rb").read() if len(sys.argv) > 2 else None
print(Run("dqn", resume=resume, epochs=4, checkpoint_every=2).sha256)
"""


def elsewhere(*arguments):
    """A process with other hashes and other random numbers drawn before; its final file's sha256 is what it prints."""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": arguments[0]}
    return subprocess.Popen([sys.executable, "-c", CODE, *arguments], stdout=subprocess.PIPE, text=True, env=environment)


def test_a_fresh_process_and_one_that_continues_come_to_the_bytes_of_this_one(folder):
    whole = Run("dqn", **CHANGE)
    (folder / "resume").write_bytes(whole.resume[2])
    processes = [elsewhere("1"), elsewhere("2", str(folder / "resume"))]
    digests = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert digests == [whole.sha256] * 2


@pytest.mark.parametrize("epoch", [3, 4])
def test_a_killed_run_redoes_at_most_one_interval_and_says_where_it_resumes(epoch, caplog):
    whole, config, states = Run("dqn", **CHANGE), CONFIGS["dqn"].model_copy(update=CHANGE), {}

    def keep(number, is_final, weights, resume):
        if resume is not None:
            states[number] = checkpoint_bytes(resume)

    def die(row):
        if row.epoch == epoch:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.dqn.training.train(config, SERIES, on_epoch=die, on_checkpoint=keep)
    newest = states[max(states)]
    with caplog.at_level(logging.INFO, logger="models.dqn"):
        assert Run("dqn", **CHANGE, resume=newest).sha256 == whole.sha256
    at = read_checkpoint_bytes(newest, None).metadata["update"]
    assert f"dqn resumes at update {at} of {4 * config.updates_per_epoch}" in caplog.text
    assert 0 < epoch * config.updates_per_epoch - at <= config.checkpoint_every * config.updates_per_epoch
