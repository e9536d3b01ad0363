"""Publishers that are killed, race each other and lose answers. Kills are kill -9 of a real process at a known step."""

import os
import signal
import time
import traceback
from collections import Counter

import pytest
from proxy import Proxy
from test_artifacts import publish, trained

from tasks.artifacts import champion_version, publish_run, read_manifest, verify
from tasks.garbage import collect
from tasks.promotion import challenge
from tasks.registry import history, promote, versions
from tasks.runs import claim_run
from tasks.s3 import S3Store
from tasks.s3_client import s3_client
from tasks.storage import LocalStore, ObjectMissing, open_store


def in_process(work):
    """Start `work` in a process of its own, that shares nothing but the store; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid):
    """How the process ended: its exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def apart(store):
    """The same store for other processes: a client that this one never uses has no connection to share with them."""
    return store if isinstance(store, LocalStore) else S3Store(store.bucket, store.prefix, client=s3_client())


class Killed:
    """A store whose process is killed before or after its n-th write; every write is logged first."""

    def __init__(self, store, log, step, after):
        self.store, self.log, self.step, self.after, self.done = store, log, step, after, 0

    def __getattr__(self, name):
        return getattr(self.store, name)

    def _write(self, write, key, *arguments):
        self.done += 1
        with self.log.open("a") as log:
            log.write(f"{self.done} {key}\n")
        if self.done == self.step and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        out = write(key, *arguments)
        if self.done == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
        return out

    def put_if_absent(self, key, *data):
        return self._write(self.store.put_if_absent, key, *data)

    def swap(self, key, data, etag):
        return self._write(self.store.swap, key, data, etag)


def publish_and_promote(store, run):
    with claim_run(store, run.run_key, run.model, beat_seconds=60, stale_seconds=0.05, poll_seconds=0.01) as claim:
        manifest = claim.manifest or publish_run(run, store, claim)
    challenge(store, manifest, "always")
    return manifest


def read_until(folder, store, model="dqn"):
    """Load the champion, every byte, again and again, until told to stop; raises at the first that is not whole."""
    read = 0
    while not (folder / "stop").exists():
        time.sleep(0.02)
        verify(store, model, read_manifest(store, model, "champion").version)
        read += 1
    (folder / "read").write_text(str(read))


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_a_publisher_killed_at_any_step_leaves_readers_a_whole_version_and_a_second_try_finishes_it(store, apart, folder, rounds):
    both_sides = rounds > 1 or isinstance(store, LocalStore)
    kills = [kill for n in range(rounds) for kill in killed_at_every_step(store, apart, folder / str(n), f"dqn-{n}", both_sides)]
    assert {step for step, _, _ in kills} == set(range(1, 14)), "every step was hit"
    counted = Counter((step, after) for step, after, _ in kills)
    assert set(counted.values()) == {rounds}
    assert len(counted) == (26 if both_sides else 13)
    print("\n".join(f"killed {'after' if after else 'before'} step {step} ({what})" for step, after, what in kills))
    collect(store, grace=0, apply=True)
    named = set().union(*(reachable(store, f"dqn-{n}") for n in range(rounds)))
    assert {*store.list("models/"), *store.list("runs/")} - named == set()


def killed_at_every_step(store, apart, folder, model, both_sides):
    """One publisher after the other, each killed one step later than the last, until one comes through; where they died."""
    promote(store, model, publish(store, trained(folder / "first", model=model)).version, why="first")
    reader = in_process(lambda: read_until(folder, apart, model))
    kills, seed, step, after, whole = [], 0, 0, True, False
    while not whole:
        step, after = (step + after, not after) if both_sides else (step + 1, not after)
        seed += 1
        run, log = trained(folder / str(seed), seed=seed, model=model), folder / f"log-{seed}"
        code = ended(in_process(lambda: publish_and_promote(Killed(apart, log, step, after), run)))  # noqa: B023
        whole = code == 0
        assert whole or code == -signal.SIGKILL
        verify(store, model, read_manifest(store, model, "champion").version)
        if not whole:
            reached = log.read_text().splitlines()
            assert len(reached) == step
            kills.append((step, after, reached[-1].partition(" ")[2].split("/")[-1]))
        manifest = publish_and_promote(store, run)
        assert champion_version(store, model) == manifest.version
        verify(store, model, manifest.version)
    assert len(versions(store, model)) == seed + 1, "one version for every run, killed or not"
    (folder / "stop").touch()
    assert ended(reader) == 0, "the reader found something that was not whole"
    assert int((folder / "read").read_text()) > 0
    return kills


def reachable(store, model):
    """Keys under models/ and runs/ that a manifest, the alias or the history names."""
    named = {f"models/{model}/{name}" for name in ("champion.json", "sequence.json")}
    named |= {f"models/{model}/history/{change.sequence}.json" for change in history(store, model)}
    for number in versions(store, model):
        manifest = verify(store, model, number)
        named |= {f"models/{model}/{number}/{name}" for name in (*manifest.files, "manifest.json")}
        named |= {f"runs/{manifest.run_key}/{name}" for name in ("claim.json", "manifest.json")}
    return named


def unnamed(store, model):
    """Keys under models/ and runs/ that nothing of the store's one model names."""
    return {*store.list("models/"), *store.list("runs/")} - reachable(store, model)


def test_the_reader_of_the_kill_test_sees_an_alias_that_is_swapped_too_early(folder):
    """The planted fault: the alias names a version whose files have not come yet."""
    store = open_store(str(folder / "store"))
    promote(store, "dqn", publish(store, trained(folder / "first")).version, why="first")
    pid = in_process(lambda: read_until(folder, store))
    (folder / "store/models/dqn/1/report.html").rename(folder / "report")
    try:
        assert ended(pid) == 1
    finally:
        (folder / "stop").touch()


@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_a_publisher_killed_at_any_instant_is_finished_by_a_second_try(store, apart, folder, rounds):
    promote(store, "dqn", publish(store, trained(folder / "first")).version, why="first")
    started = time.perf_counter()
    publish_and_promote(store, trained(folder / "second", seed=1))
    whole = time.perf_counter() - started
    for seed in range(2, 2 + rounds):
        run = trained(folder / str(seed), seed=seed)
        child = in_process(lambda: publish_and_promote(apart, run))  # noqa: B023
        time.sleep(whole * (seed - 1) / rounds)
        os.kill(child, signal.SIGKILL)
        ended(child)
        verify(store, "dqn", read_manifest(store, "dqn", "champion").version)
        publish_and_promote(store, run)
    assert versions(store, "dqn")[-1] >= rounds + 2
    assert len(versions(store, "dqn")) == rounds + 2
    collect(store, grace=0, apply=True)
    assert unnamed(store, "dqn") == set()


@pytest.mark.parametrize("rounds", [1, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_eight_processes_publish_and_promote_at_once(store, apart, folder, rounds):
    for number in range(rounds):
        model = f"dqn-{number}"
        runs = [trained(folder / f"{number}-{seed}", seed=seed, model=model) for seed in range(8)]

        def race(run, place):
            manifest = publish(apart, run)
            decision = challenge(apart, manifest, "always")
            place.write_text(f"{manifest.version} {decision.promoted}")

        places = [folder / f"{number}-{seed}" / "done" for seed in range(8)]
        children = [in_process(lambda r=run, p=place: race(r, p)) for run, place in zip(runs, places, strict=True)]
        assert [ended(child) for child in children] == [0] * 8
        told = [place.read_text().split() for place in places]
        assert sorted(int(version) for version, _ in told) == list(range(1, 9)), "no two took one number"
        assert versions(store, model) == list(range(1, 9)), "no manifest is lost"
        changes = history(store, model)
        assert [c.to_version for c in changes] == sorted(int(v) for v, promoted in told if promoted == "True"), (
            "every promotion that was told to its promoter is in the history, once, and no other"
        )
        assert [c.from_version for c in changes] == [None, *(c.to_version for c in changes[:-1])]
        assert champion_version(store, model) == 8
        for version in range(1, 9):
            verify(store, model, version)


@pytest.mark.parametrize("runs", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("losing", "lost"),
    [
        ("every write once", lambda number: number % 2 == 1), ("every write for good", lambda number: True),
        ("some writes", lambda number: number % 5 in (2, 3)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_lost_answers_are_no_conflict_and_make_no_second_version(s3_server, monkeypatch, folder, at_once, losing, lost, runs):
    dropped = []

    def lose(method, path, number):
        if lost(number) and "probe/" not in path:
            dropped.append(path)
            return True
        return False

    monkeypatch.setattr(os, "environ", {**os.environ, **s3_server})
    uri = f"s3://models/lost-{os.urandom(4).hex()}"
    with Proxy(s3_server["AWS_ENDPOINT_URL_S3"], lose=lose) as proxy:
        direct = open_store(uri)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        through = open_store(uri)
        with pytest.raises(ObjectMissing):
            read_manifest(through, "dqn", "champion")
        for seed in range(1, runs + 1):
            manifest = publish(through, trained(folder / str(seed), seed=seed))
            assert manifest.version == seed
            assert challenge(through, manifest, "always").promoted
            assert publish(through, trained(folder / str(seed), seed=seed)) == manifest
    assert len(dropped) >= 5 * runs
    assert versions(direct, "dqn") == list(range(1, runs + 1))
    assert [c.to_version for c in history(direct, "dqn")] == versions(direct, "dqn")
    collect(direct, grace=0, apply=True)
    assert unnamed(direct, "dqn") == set()
