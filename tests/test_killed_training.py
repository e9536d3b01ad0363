"""Trainings killed (kill -9) at a random update or while saving, and resumed from the store: the same final file to the bit."""

import hashlib
import json
import os
import signal

import numpy as np
import pytest
from test_kills import ended, in_process
from test_training_rules import CONFIGS, SERIES, TRAINERS

from models.checkpoint import checkpoint_bytes
from tasks.runs import newest_resume, save_resume
from tasks.storage import LocalStore

EPOCHS, EVERY = 6, 2
both = pytest.mark.parametrize("family", ["tft", "dqn"])


def train(family, store, out, kill_at=None, kill_saving=None):
    """One training to its end, or to its death: at update `kill_at`, or before or after the save of its n-th state. `out` gets
    the final file's sha256, the updates made and those resumed."""
    made, saved = [0], [0]
    resume, _ = newest_resume(store, "run")
    begun = resume.metadata["update"] if resume else 0

    def stop_requested():
        if made[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        made[0] += 1
        return False

    def on_checkpoint(epoch, is_final, weights, state):
        if state is not None:
            saved[0] += 1
            if kill_saving == (saved[0], "before"):
                os.kill(os.getpid(), signal.SIGKILL)
            save_resume(store, "run", f"{state.metadata['update']:012d}", checkpoint_bytes(state))
            if kill_saving == (saved[0], "after"):
                os.kill(os.getpid(), signal.SIGKILL)
        if is_final:
            sha256 = hashlib.sha256(checkpoint_bytes(weights)).hexdigest()
            out.write_text(json.dumps({"sha256": sha256, "made": made[0], "begun": begun}))

    # The last weights, not the best: those may be older than what the state had to bring over
    change = {"epochs": EPOCHS, "checkpoint_every": EVERY, "final_weights": "last"}
    config = CONFIGS[family].model_copy(update=change)
    TRAINERS[family](
        config, SERIES, on_epoch=lambda row: None, on_checkpoint=on_checkpoint, stop_requested=stop_requested, resume=resume
    )


def finished(family, store, out):
    assert ended(in_process(lambda: train(family, store, out))) == 0
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a training that nobody disturbs comes to, by family."""
    folder = tmp_path_factory.mktemp("whole")
    return {family: finished(family, LocalStore(folder / family), folder / f"{family}.json") for family in TRAINERS}


@both
@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_killed_and_resumed_equals_never_killed(family, kills, whole, folder):
    whole = whole[family]
    interval, total = EVERY * CONFIGS[family].updates_per_epoch, whole["made"]
    assert total == EPOCHS * CONFIGS[family].updates_per_epoch
    random = np.random.default_rng(kills)
    for number in range(kills):
        store, out = LocalStore(folder / f"store-{number}"), folder / f"{number}.json"
        if number % 3 == 2:
            death = {"kill_saving": (int(random.integers(1, 4)), str(random.choice(["before", "after"])))}
        else:
            # Never in the first interval: a start from zero would look the same there
            death = {"kill_at": int(random.integers(interval, total))}
        assert ended(in_process(lambda: train(family, store, out, **death))) == -signal.SIGKILL  # noqa: B023
        assert not out.exists()
        done = finished(family, store, out)
        assert done["sha256"] == whole["sha256"], death
        assert done["begun"] % interval == 0
        assert done["begun"] + done["made"] == total
        if "kill_at" in death:
            redone = death["kill_at"] - done["begun"]
            assert 0 <= redone < interval, "no more than one interval is made again"
            assert done["begun"] > 0, "and never all of it"


@pytest.mark.parametrize("family", ["dqn", pytest.param("tft", marks=pytest.mark.slow)])
def test_killed_again_and_again_it_still_comes_to_the_same_end(family, whole, folder):
    interval = EVERY * CONFIGS[family].updates_per_epoch
    store, out, deaths = LocalStore(folder / "store"), folder / "out.json", 0
    while not out.exists() and deaths < 9:
        # One update past the interval: each life leaves one state more
        deaths += ended(in_process(lambda: train(family, store, out, kill_at=interval + 1))) == -signal.SIGKILL
    assert deaths == EPOCHS // EVERY - 1
    assert json.loads(out.read_text())["sha256"] == whole[family]["sha256"]


@both
def test_damaged_newer_states_are_passed_over_by_name_kept_and_change_nothing(family, whole, folder):
    """The state of epoch 2 whole, that of 4 cut by 7 bytes, that of 6 empty."""
    store, out = LocalStore(folder / "store"), folder / "out.json"
    interval = EVERY * CONFIGS[family].updates_per_epoch
    assert ended(in_process(lambda: train(family, store, out, kill_at=interval + 2))) == -signal.SIGKILL
    (sound,) = store.list("runs/run/resume/")
    damaged = {store.get(sound)[:-7]: 2 * interval, b"": 3 * interval}
    names = {f"runs/run/resume/{update:012d}-{'a' * 64}.safetensors": data for data, update in damaged.items()}
    for name, data in names.items():
        store.put_if_absent(name, data)
    state, skipped = newest_resume(store, "run")
    assert state.metadata["epoch"] == EVERY
    assert [line.partition(": ")[0] for line in skipped] == [name.rpartition("/")[2] for name in sorted(names, reverse=True)]
    assert all("sha256" in line for line in skipped)
    assert "(0 bytes)" in skipped[0]
    assert finished(family, store, out)["sha256"] == whole[family]["sha256"]
    assert {name: store.get(name) for name in names} == names, "nothing is overwritten"


def test_a_resumed_run_with_one_wrong_number_does_not_pass(whole, folder):
    """The planted fault: a bit of the random state."""
    store, out = LocalStore(folder / "store"), folder / "out.json"
    interval = EVERY * CONFIGS["dqn"].updates_per_epoch
    assert ended(in_process(lambda: train("dqn", store, out, kill_at=interval + 2))) == -signal.SIGKILL
    state, _ = newest_resume(store, "run")
    state.tensors["rng.torch"] = state.tensors["rng.torch"].clone()
    state.tensors["rng.torch"][16] ^= 1
    save_resume(store, "run", "999999999999", checkpoint_bytes(state))
    assert finished("dqn", store, out)["sha256"] != whole["dqn"]["sha256"]
