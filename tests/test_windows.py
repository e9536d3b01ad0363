"""Windows: exact counts, no crossing of series, blocks with a purge gap."""

import dataclasses
from datetime import UTC, datetime

import numpy as np
import pytest
from synthetic import DAY, START, series_arrays

import models.windows
from models.config import Split
from models.windows import WindowDataset, block_rows, last_windows

UNEQUAL = {"AAPL": 200, "IBM": 61, "MSFT": 12, "FB": 75}


def whole(series):
    return np.stack([series.offsets[:-1], series.offsets[1:]], axis=1)


def test_window_count_is_exact_and_short_series_are_named():
    windows = WindowDataset(series_arrays(UNEQUAL), whole(series_arrays(UNEQUAL)), 30, 10)
    assert windows.counts.tolist() == [161, 22, 0, 36]
    assert len(windows) == 219
    assert windows.short_series == {"MSFT": 12}


def test_no_window_crosses_a_series_and_every_window_is_passed_once():
    series = series_arrays(UNEQUAL)
    windows = WindowDataset(series, whole(series), 30, 10)
    seen = []
    for start in windows.sequential_starts(16):
        batch = windows.batch(start[None], 16)
        origins = batch.origins[batch.valid]
        seen += origins.tolist()
        s = batch.series[0]
        assert (origins - 29 >= series.offsets[s]).all()
        assert (origins + 10 < series.offsets[s + 1]).all()
    assert len(seen) == len(set(seen)) == 219


def test_batch_of_one_series_alone_and_of_its_last_window():
    series = series_arrays(UNEQUAL)
    only = whole(series)
    only[[0, 2, 3], 1] = only[[0, 2, 3], 0]
    windows = WindowDataset(series, only, 30, 10)
    assert len(windows) == 22
    starts = windows.random_starts(8, 4, np.random.default_rng(0))
    assert (starts[:, 0] == 1).all()
    assert windows.batch(starts, 4).windows == 32
    last = windows.batch(np.array([[1, int(windows.first_origin[1] + 21)]]), 4)
    assert last.windows == 1


def test_batch_holds_the_rows_it_says():
    series = series_arrays({"AAA": 40})
    windows = WindowDataset(series, whole(series), 10, 3)
    batch = windows.batch(np.array([[0, 15]]), 4)
    assert np.array_equal(batch.historical[0], series.historical[6:19])
    assert np.array_equal(batch.future[0], series.future[16:22])
    assert windows.target_rows(batch)[0, 2].tolist() == [18, 19, 20]


def test_rows_after_the_last_window_repeat_its_last_row_and_are_masked():
    series = series_arrays({"AAA": 40, "BBB": 20})
    windows = WindowDataset(series, whole(series), 10, 3)
    batch = windows.batch(np.array([[0, 34], [1, 49]]), 4)
    assert batch.valid.tolist() == [[True, True, True, False], [True] * 4]
    assert np.array_equal(batch.historical[0, :12], series.historical[25:37])
    assert np.array_equal(batch.historical[0, 12], series.historical[36])
    assert np.array_equal(batch.historical[1], series.historical[40:53])


@pytest.mark.parametrize("future", [4, 0])
@pytest.mark.parametrize("windows", [1, 5, 90, 500])
def test_batches_equal_an_index_per_row(windows, future, monkeypatch):
    series = series_arrays(UNEQUAL, future=future)
    dataset = WindowDataset(series, whole(series), 30, 10)
    starts = dataset.random_starts(40, windows, np.random.default_rng(0))
    first, last = starts[:, 1:], (dataset.first_origin + dataset.counts - 1)[starts[:, 0], None]

    def equal():
        batch = dataset.batch(starts, windows)
        past = series.historical[np.minimum(first - 29 + np.arange(29 + windows), last)]
        ahead = series.future[np.minimum(first + 1 + np.arange(9 + windows), last + 10)]
        return np.array_equal(batch.historical, past) and np.array_equal(batch.future, ahead)

    assert equal()
    real = models.windows._stretches
    monkeypatch.setattr(models.windows, "_stretches", lambda t, f, rows, cut, last: real(t, f, rows, cut, last + 1))
    assert equal() == (windows < 90), "the planted fault: one row more, where rows are cut"


def test_purge_gap_lies_in_the_validation_block():
    series = series_arrays({"AAA": 1000})
    blocks = block_rows(series, Split(), 30)
    assert [blocks[b].tolist() for b in ("train", "val", "test")] == [[[0, 700]], [[730, 820]], [[850, 1000]]]
    train = WindowDataset(series, blocks["train"], 60, 10)
    val = WindowDataset(series, blocks["val"], 60, 10)
    last_train = int(train.first_origin[0] + train.counts[0] - 1) + 10
    assert int(val.first_origin[0]) + 1 - last_train > 30


def test_blocks_by_date_and_gap_larger_than_the_block():
    series = series_arrays({"AAA": 100, "BBB": 20})
    day = datetime.fromtimestamp((START + 50 * DAY) / 1e6, UTC)
    later = datetime.fromtimestamp((START + 60 * DAY) / 1e6, UTC)
    blocks = block_rows(series, Split(cut_dates=(day, later)), 2)
    assert blocks["train"].tolist() == [[0, 50], [100, 120]]
    assert blocks["val"].tolist()[0] == [52, 58]
    empty = block_rows(series, Split(), 500)["val"]
    assert (empty[:, 0] == empty[:, 1]).all()


@pytest.mark.parametrize("ahead", [0, 10])
def test_last_window_uses_rows_ahead_when_they_are_there(ahead):
    series = series_arrays({"AAA": 50})
    series = dataclasses.replace(series, history_rows=np.array([50 - ahead]))
    windows = last_windows(series, 20, 10)
    batch = windows.batch(windows.sequential_starts(1), 1)
    assert batch.origins.tolist() == [[39]], "the last origin with ten rows after it"
    assert windows.target_rows(batch)[0, 0].tolist() == list(range(40, 50))
