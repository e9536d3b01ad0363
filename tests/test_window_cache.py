"""The window cache: filled by several processes at once, verified before every use, evicted when it grows too large."""

import multiprocessing
import os
import shutil
import time
import tracemalloc

import numpy as np
import pytest
from test_data import SMALL, market_tables, stage, write

from models.windows import WindowDataset
from tasks.datasets import write_dataset
from tasks.expectations import DataReport, Profile
from tasks.series import load_series
from tasks.storage import LocalStore


def landed(folder, seed=0, series=None):
    tables = market_tables(series or {"AAA": 300, "BBB": 200}, **SMALL, seed=seed)
    staged = stage(write(folder / f"source-{seed}", *tables.values()), folder / f"work-{seed}")
    return write_dataset(staged, DataReport([], None, Profile([], [], [], {}, [])), LocalStore(folder / "store"))


def fill_at_once(number, rounds, dataset, uri, folder, barrier, answers):
    for round_ in range(rounds):
        cache = folder / f"cache-{round_}"
        if number == 0 and round_ % 2:  # a damaged one lies there already
            load_series(dataset, uri, cache)
            with open(cache / dataset.fingerprint / "historical.npy", "r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"\xff\xff\xff\xff")
        barrier.wait()
        series = load_series(dataset, uri, cache)
        answers.put((round_, float(series.historical.astype(np.float64).sum()), type(series.historical).__name__))
        barrier.wait()


@pytest.mark.parametrize("rounds", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_two_processes_fill_it_at_once_and_over_a_damaged_one(rounds, tmp_path):
    dataset, uri = landed(tmp_path)
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(2, timeout=120), context.Queue()
    workers = [context.Process(target=fill_at_once, args=(n, rounds, dataset, uri, tmp_path, barrier, answers)) for n in range(2)]
    for worker in workers:
        worker.start()
    found = [answers.get(timeout=150) for _ in range(2 * rounds)]
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    wanted = float(load_series(dataset, uri, tmp_path / "alone").historical.astype(np.float64).sum())
    assert {(total, kind) for _, total, kind in found} == {(wanted, "memmap")}, "the same bytes, mapped by both"
    for round_ in range(rounds):
        assert [p.name for p in (tmp_path / f"cache-{round_}").iterdir()] == [dataset.fingerprint], "nothing is left over"


def test_what_was_used_longest_ago_goes_first_and_who_reads_it_reads_on(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    sets = [landed(tmp_path, seed) for seed in range(4)]
    first = load_series(*sets[0], cache)
    size = sum(file.stat().st_size for file in (cache / sets[0][0].fingerprint).iterdir())
    monkeypatch.setenv("FORECASTLE_CACHE_GIB", str(2.5 * size / 2**30))
    held = [fill(dataset, uri, cache) for dataset, uri in sets[1:3]]
    assert held == [{sets[0][0].fingerprint, sets[1][0].fingerprint}, {sets[1][0].fingerprint, sets[2][0].fingerprint}]
    assert np.isfinite(first.historical).all(), "its bytes stay while somebody reads them"
    fill(*sets[1], cache)  # used again: the other one is older now
    assert fill(*sets[3], cache) == {sets[1][0].fingerprint, sets[3][0].fingerprint}
    (cache / ".filling-dead").mkdir()
    os.utime(cache / ".filling-dead", (time.time() - 90_000,) * 2)
    shutil.rmtree(cache / sets[3][0].fingerprint)
    fill(*sets[3], cache)
    assert not (cache / ".filling-dead").exists()


def fill(dataset, uri, cache):
    time.sleep(0.02)  # times of use differ
    load_series(dataset, uri, cache)
    return {path.name for path in cache.iterdir() if not path.name.startswith(".")}


def test_batches_from_the_cache_hold_no_copy_of_the_data(tmp_path):
    series = load_series(*landed(tmp_path, series={"AAA": 40_000}), tmp_path / "cache")
    windows = WindowDataset(series, np.stack([series.offsets[:-1], series.offsets[1:]], axis=1), 30, 10)

    def peak(dataset):
        tracemalloc.start()
        for _ in range(20):
            dataset.batch(dataset.random_starts(16, 4, np.random.default_rng(0)), 4)
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return held

    assert peak(windows) < series.historical.nbytes / 10

    class Copying(WindowDataset):  # the planted fault
        def batch(self, starts, count):
            object.__setattr__(self.series, "historical", np.array(self.series.historical))
            return super().batch(starts, count)

    assert peak(Copying(series, np.array([[0, 40_000]]), 30, 10)) > series.historical.nbytes / 2
