"""Publication: claimed once, whole or invisible, the same on every try."""

import json
import threading
import time

import numpy as np
import pytest
import torch
from synthetic import small_contract

from models.checkpoint import Snapshot, checkpoint_bytes, save_checkpoint
from models.dqn.config import DQNConfig
from models.manifest import Dataset
from tasks.artifacts import (
    TrainedRun,
    champion_version,
    fetch_file,
    load_published,
    publish_run,
    read_manifest,
    run_key,
    verify,
)
from tasks.promotion import challenge, decide
from tasks.registry import history, promote
from tasks.runs import claim_run, newest_resume, save_resume
from tasks.storage import ArtifactIntegrityError, LocalStore, ObjectMissing, StoreError

DATASET = Dataset(
    fingerprint="a" * 64, contract=small_contract(), rows=10, series={"AAA": 10}, first_timestamp="2010-01-01T00:00:00Z",
    last_timestamp="2010-01-10T00:00:00Z", files={},
)  # fmt: skip
CONFIG = DQNConfig()


def trained(folder, model="dqn", seed=0, **change):
    """A run with three files in a folder."""
    config = CONFIG.model_copy(update={"seed": seed})
    metadata = {"config": config.model_dump(mode="json"), "dataset": DATASET.fingerprint}
    metadata["contract"] = DATASET.contract.model_dump(mode="json")
    snapshot = Snapshot({"network.w": torch.full((50,), float(seed))}, metadata)
    files = [save_checkpoint(folder, "dqn", n, final, snapshot) for n, final in ((1, False), (2, True))]
    (folder / "report.html").write_text(f"report {seed}")
    plain = {
        "run_key": run_key(DATASET, config, model), "model": model, "family": "dqn", "folder": str(folder),
        "checkpoints": tuple(files), "config": config, "dataset": DATASET, "dataset_uri": "file:///nowhere/datasets/a/dataset.json",
        "metrics": {"beats_flat": True}, "epochs": 2, "stop_reason": "all_epochs", "best_epoch": 2, "weights": "best",
        "versions": {"torch": "2"},
    }  # fmt: skip
    return TrainedRun(**{**plain, **change})


def publish(store, run):
    with claim_run(store, run.run_key, run.model, poll_seconds=0.05) as claim:
        return claim.manifest or publish_run(run, store, claim)


def test_published_version_verifies_and_its_files_come_back(store, folder):
    manifest = publish(store, trained(folder / "run"))
    assert (manifest.version, manifest.final) == (1, "dqn_final_epoch2.safetensors")
    assert set(manifest.files) == {"dqn_epoch_1.safetensors", "dqn_final_epoch2.safetensors", "report.html"}
    assert verify(store, "dqn", 1) == manifest
    path = fetch_file(store, manifest, manifest.final, folder / "here")
    assert path.read_bytes() == (folder / "run" / manifest.final).read_bytes()


def test_extra_files_are_published_read_back_and_verified_like_the_report(store, folder):
    run = trained(folder / "run", extras=("report.html", "interpretation.parquet"))
    (folder / "run" / "interpretation.parquet").write_bytes(b"PAR1")
    assert publish(store, run).files["interpretation.parquet"].size == 4
    (folder / "spoilt").write_bytes(b"PAR2")
    key = "models/dqn/1/interpretation.parquet"
    assert store.get(key) == b"PAR1"
    store.delete(key)
    store.put_if_absent(key, folder / "spoilt")
    with pytest.raises(ArtifactIntegrityError, match="interpretation"):
        verify(store, "dqn", 1)


def test_the_same_run_is_published_once_and_another_gets_the_next_version(store, folder):
    first = publish(store, trained(folder / "a"))
    assert publish(store, trained(folder / "b")) == first
    assert publish(store, trained(folder / "c", seed=1)).version == 2


def test_interrupted_runs_are_never_published(store, folder):
    with pytest.raises(ValueError, match="never published"):
        publish(store, trained(folder / "a", stop_reason="interrupted"))
    with pytest.raises(ObjectMissing):
        read_manifest(store, "dqn", 1)


class Crash(BaseException):
    """The process dies here."""


class CrashingStore:
    """A store that dies before or after its n-th write."""

    def __init__(self, store, step, after):
        self.store, self.left, self.after = store, step, after

    def __getattr__(self, name):
        return getattr(self.store, name)

    def _write(self, write, *arguments):
        self.left -= 1
        if self.left == 0 and not self.after:
            raise Crash
        done = write(*arguments)
        if self.left == 0:
            raise Crash
        return done

    def put_if_absent(self, key, *data):
        return self._write(self.store.put_if_absent, key, *data)

    def swap(self, key, data, etag):
        return self._write(self.store.swap, key, data, etag)


def test_verifying_catches_a_manifest_that_comes_too_early(store, folder):
    """A planted fault for tests/test_kills.py: readers see a version whose files are not there."""
    other = LocalStore(folder / "other")
    whole = publish(other, trained(folder / "run"))
    store.put_if_absent("models/dqn/1/manifest.json", other.get("models/dqn/1/manifest.json"))
    with pytest.raises(ArtifactIntegrityError, match="not there"):
        verify(store, "dqn", read_manifest(store, "dqn", 1).version)
    assert whole.version == 1


@pytest.mark.parametrize("step", range(1, 14))
def test_a_rerun_that_came_to_other_bits_still_publishes_one_whole_version(folder, step):
    store = LocalStore(folder / "store")
    first, other = trained(folder / "a"), trained(folder / "b", seed=1)
    rerun = other.model_copy(update={"run_key": first.run_key, "config": first.config})
    try:
        with claim_run(CrashingStore(store, step, after=True), first.run_key, "dqn", beat_seconds=60) as claim:
            publish_run(first, claim.store, claim)
    except Crash:
        pass
    manifest = None
    with claim_run(store, first.run_key, "dqn", poll_seconds=0.02, stale_seconds=0.1) as claim:
        manifest = claim.manifest or publish_run(rerun, store, claim)
    verify(store, "dqn", manifest.version)
    whole = [{c.name: c.sha256 for c in run.checkpoints} for run in (first, rerun)]
    assert {n: f.sha256 for n, f in manifest.files.items() if n != "report.html"} in whole, "files of one run, never mixed"


def test_of_two_claimers_one_trains_and_the_other_gets_its_result(store, folder):
    run, order = trained(folder / "run"), []

    def second():
        with claim_run(store, run.run_key, "dqn", poll_seconds=0.05) as claim:
            order.append(("second", claim.manifest))

    with claim_run(store, run.run_key, "dqn", beat_seconds=0.1) as claim:
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.4)
        assert order == []
        manifest = publish_run(run, store, claim)
    thread.join()
    assert order == [("second", manifest)]


def test_a_dead_owner_is_taken_over_and_keeps_its_version(store, folder):
    run = trained(folder / "run")
    dead = claim_run(store, run.run_key, "dqn", beat_seconds=1000)
    first = dead.__enter__()
    with claim_run(store, run.run_key, "dqn", poll_seconds=0.05, stale_seconds=0.3) as claim:
        assert claim.version == first.version == 1
        with pytest.raises(StoreError, match="taken over"):
            publish_run(run, store, first)
        assert publish_run(run, store, claim).version == 1
    dead.__exit__(None, None, None)


def test_failed_training_releases_the_claim_at_once(store, folder):
    run = trained(folder / "run")

    def fail():
        with claim_run(store, run.run_key, "dqn"):
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        fail()
    started = time.monotonic()
    assert publish(store, run).version == 1
    assert time.monotonic() - started < 30


def spoilt(sound, random, how):
    """The bytes with one bit flipped, or cut short."""
    at = int(random.integers(len(sound)))
    return sound[:at] if how == "cut" else sound[:at] + bytes([sound[at] ^ (1 << int(random.integers(8)))]) + sound[at + 1 :]


REFUSED = r"expected|champion alias says|no manifest|speaks of|nobody claimed|named by the manifest, but not there"


def load(store, which, folder):
    """Every file of a version, and the final one's content."""
    manifest = read_manifest(store, "dqn", which)
    for name in manifest.files:
        fetch_file(store, manifest, name, folder)
    return load_published(store, manifest, folder)


@pytest.mark.parametrize(
    ("flips", "cuts"), [(15, 10), pytest.param(300, 200, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]
)
def test_every_damaged_published_file_is_refused_at_load_and_by_verify(store, folder, flips, cuts):
    manifest = publish(store, trained(folder / "run"))
    promote(store, "dqn", 1, why="test")
    random = np.random.default_rng(0)
    names = sorted([*manifest.files, "manifest.json"])
    for number, how in enumerate(["flip"] * flips + ["cut"] * cuts):
        name = names[number % len(names)]
        key = f"models/dqn/1/{name}"
        sound = store.get(key)
        store.delete(key)
        store.put_if_absent(key, spoilt(sound, random, how))
        with pytest.raises(ArtifactIntegrityError, match=REFUSED):
            verify(store, "dqn", 1)
        for which in ("champion", 1):
            with pytest.raises((ArtifactIntegrityError, ObjectMissing)):
                load(store, which, folder / f"here-{number}")
            assert not (folder / f"here-{number}" / name).exists()
        store.delete(key)
        store.put_if_absent(key, sound)
    assert load(store, "champion", folder / "here").tensors.keys() == load(store, 1, folder / "here").tensors.keys() != set()
    verify(store, "dqn", 1)
    store.delete(key)
    with pytest.raises((ArtifactIntegrityError, ObjectMissing)):
        verify(store, "dqn", 1)


def test_manifest_that_is_not_the_aliased_one_is_refused(folder):
    store = LocalStore(folder / "store")
    publish(store, trained(folder / "run"))
    promote(store, "dqn", 1, why="test")
    path = folder / "store" / "models" / "dqn" / "1" / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"epochs":2', b'"epochs":3'))
    with pytest.raises(ArtifactIntegrityError, match="champion alias says"):
        read_manifest(store, "dqn", "champion")


def test_promotion_keeps_a_history_and_is_recorded_once(store, folder):
    for seed in (0, 1):
        publish(store, trained(folder / str(seed), seed=seed))
    assert promote(store, "dqn", 1, why="first")
    assert not promote(store, "dqn", 1, why="again")
    assert promote(store, "dqn", 2, why="newer")
    assert read_manifest(store, "dqn", "champion").version == 2
    changes = history(store, "dqn")
    assert [(h.from_version, h.to_version, h.why) for h in changes] == [(None, 1, "first"), (1, 2, "newer")]


def test_promoters_at_once_leave_a_history_that_leads_to_the_champion(store, folder):
    for seed in range(4):
        publish(store, trained(folder / str(seed), seed=seed))
    threads = [threading.Thread(target=promote, args=(store, "dqn", n), kwargs={"why": "race"}) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alias = json.loads(store.get("models/dqn/champion.json"))
    assert json.loads(store.get(f"models/dqn/history/{alias['sequence']}.json"))["to"] == alias["version"]
    verify(store, "dqn", alias["version"])


@pytest.mark.parametrize(("rule", "first", "second"), [("always", 2, 1), ("always", 1, 2)])
def test_of_two_versions_that_both_qualified_the_second_is_judged_again(store, folder, rule, first, second):
    manifests = {n: publish(store, trained(folder / str(n), seed=n)) for n in (1, 2)}
    assert all(decide(manifest, store, rule).promoted for manifest in manifests.values())
    assert challenge(store, manifests[first], rule).champion is None
    assert challenge(store, manifests[second], rule).promoted is (second > first)
    assert champion_version(store, "dqn") == 2
    assert [change.to_version for change in history(store, "dqn")] == sorted({first, 2})


@pytest.mark.parametrize(
    ("change", "rule", "promoted", "why"),
    [
        ({}, "better", True, "first"),
        ({}, "never", False, "never"),
        ({"stop_reason": "non_finite_loss"}, "always", False, "not finite"),
        ({"metrics": {"beats_flat": False}}, "always", False, "flat"),
        ({"metrics": {"beats_flat": True, "quantisation": {"delta": 0.019}}}, "better", True, "first"),
        ({"metrics": {"beats_flat": True, "quantisation": {"delta": 0.021}}}, "always", False, "int8 weights lose 2.1%"),
        ({"metrics": {"beats_flat": True, "quantisation": {"delta": None}}}, "always", False, "no validation block"),
    ],
)
def test_promotion_rules(folder, change, rule, promoted, why):
    store = LocalStore(folder / "store")
    decision = decide(publish(store, trained(folder / "run", **change)), store, rule)
    assert decision.promoted is promoted
    assert why in decision.why


def test_a_later_version_is_not_promoted_without_data_to_compare_on(folder):
    store = LocalStore(folder / "store")
    promote(store, "dqn", publish(store, trained(folder / "a")).version, why="first")
    later = publish(store, trained(folder / "b", seed=1))
    assert decide(later, store, "better").promoted is False
    assert decide(later, store, "always").promoted is True


def test_newest_valid_resume_state_is_found_and_damaged_ones_are_named(store, folder):
    """Case: checkpoint 1 whole, 2 cut, 3 empty."""
    states = {n: checkpoint_bytes(Snapshot({"x": torch.full((40,), float(n))}, {"epoch": n})) for n in (1, 2, 3)}
    save_resume(store, "k", "000001", states[1])
    names = {n: f"runs/k/resume/{n:06d}-{'0' * 64}.safetensors" for n in (2, 3)}
    store.put_if_absent(names[2], states[2][:-7])
    store.put_if_absent(names[3], b"")
    found, skipped = newest_resume(store, "k")
    assert found.metadata == {"epoch": 1}
    assert [line.split("-")[0] for line in skipped] == ["000003", "000002"]
    assert store.get(names[2]) == states[2][:-7], "nothing is overwritten"
    assert newest_resume(store, "other") == (None, [])


def test_run_key_follows_everything_that_decides_the_weights():
    keys = {
        run_key(DATASET, CONFIG, "dqn"),
        run_key(DATASET, CONFIG, "other"),
        run_key(DATASET, CONFIG.model_copy(update={"seed": 1}), "dqn"),
        run_key(DATASET.model_copy(update={"fingerprint": "b" * 64}), CONFIG, "dqn"),
        run_key(DATASET, CONFIG, "dqn", again="1"),
    }
    assert len(keys) == 5
    assert run_key(DATASET, CONFIG, "dqn") in keys


@pytest.mark.parametrize(("second", "at_once"), [("run-1", True), ("run-2", False), ("", False)])
def test_a_run_that_is_started_again_takes_over_its_own_claim_at_once_and_nobody_elses(store, second, at_once):
    key = "ab" * 32
    first = claim_run(store, key, "dqn", beat_seconds=60, flow_run="run-1")
    first.__enter__()  # its process is killed: nothing releases the claim
    started = time.monotonic()
    with claim_run(store, key, "dqn", poll_seconds=0.05, stale_seconds=1, flow_run=second) as claim:
        assert claim.version == 1
        assert (time.monotonic() - started < 0.9) is at_once
