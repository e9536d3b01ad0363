"""A source as a whole: the profile equals NumPy, the same rows are the same bytes however they come, and memory and disk are
kept to what is configured."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import DAY, START, market_tables, small_contract

import tasks.staging
from models.config import IngestConfig
from models.features import FeatureContract
from tasks.datasets import write_dataset
from tasks.expectations import profile, validate_features
from tasks.sorting import BLOCK_ROWS, PART_BLOCKS
from tasks.staging import DiskFullError, evict, stage_parquet
from tasks.storage import LocalStore, digest

CONTRACT = small_contract(static=2, historical=6, future=2)
SIZES = {"static": 2, "historical": 6, "future": 2}
SERIES = {"AAA": 40, "BBB": 30, "CCC": 50}
POLARS = Path(__file__).parent / "written_by_polars.parquet"
"""`odd_values()` as polars 2.1.0 writes them: polars.from_arrow(odd_values()).write_parquet(...)."""


def write(folder, *found, **options):
    folder.mkdir(parents=True, exist_ok=True)
    for at, table in enumerate(found):
        pq.write_table(table, folder / f"part-{at}.parquet", **options)
    return folder


def stage(source, folder, **options):
    config = options.pop("config", IngestConfig())
    return stage_parquet(str(source), options.pop("contract", CONTRACT), config, Path(folder), **options)


def bytes_of(staged):
    return [digest(Path(part)).sha256 for part in staged.parts]


# --- the profile ---------------------------------------------------------------------------------------------------


def odd_values():
    """Twelve bars whose numbers hide from statistics: NaN alone among constants, infinities, nulls, the ends of float32."""
    tiny, big = np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max
    nan, inf = float("nan"), float("inf")
    columns = {
        "hist_000": [1.0] * 5 + [nan] + [1.0] * 6,
        "hist_001": [nan] * 12,
        "hist_002": [inf, -inf, inf, nan, None, None, None, 0.5, 2.0, 3.0, nan, -inf],
        "hist_003": [big, -big, tiny, -tiny, 0.0, -0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        "hist_004": [None] * 11 + [7.0],
        "hist_005": [None] * 5 + [inf] * 7,
    }
    table = market_tables({"AAA": 12}, **SIZES)["AAA"]
    for name, values in columns.items():
        table = table.set_column(table.schema.names.index(name), name, pa.array(values, pa.float32()))
    price = table["price"].to_pylist()
    price[3], price[4] = nan, None
    return table.set_column(2, "price", pa.array(price))


@pytest.mark.parametrize("writer", ["pyarrow", "no statistics", "one row a group", "polars"])
def test_profile_equals_numpy_whoever_wrote_the_file(writer, folder):
    table = odd_values()
    source = folder / "s"
    if writer == "polars":
        source.mkdir()
        source.joinpath("a.parquet").write_bytes(POLARS.read_bytes())
        found = pq.read_table(POLARS)
        assert "polars" in str(pq.read_metadata(POLARS).created_by).lower()
        for name in table.schema.names:
            assert str(found[name].to_pylist()) == str(table[name].to_pylist()), name
    else:
        options = {"row_group_size": 1} if writer == "one row a group" else {"write_statistics": writer == "pyarrow"}
        write(source, table, **options)
    pq.write_table(table.slice(0, 0), source / "empty.parquet")
    rows = {row["feature"]: row for row in profile(stage(source, folder / "out")).columns}
    for name in (*CONTRACT.features, "price", "target"):
        nulls = np.array([value is None for value in table[name].to_pylist()])
        values = np.array([0.0 if value is None else value for value in table[name].to_pylist()])[~nulls]
        good = values[np.isfinite(values)]
        row = rows[name]
        assert (row["rows"], row["nulls"], row["nan"]) == (12, nulls.sum(), np.isnan(values).sum()), name
        assert (row["posinf"], row["neginf"], row["overflow"]) == (np.isposinf(values).sum(), np.isneginf(values).sum(), 0)
        assert (row["min"], row["max"]) == ((good.min(), good.max()) if len(good) else (0, 0)), name


# --- the same rows -------------------------------------------------------------------------------------------------


def test_other_files_orders_and_threads_give_the_same_bytes(folder):
    tables = market_tables(SERIES, **SIZES)
    whole = pa.concat_tables(tables.values())
    mixed = whole.take(pa.array(np.random.default_rng(0).permutation(len(whole))))
    ways = {
        "by series": write(folder / "a", *tables.values()),
        "one file": write(folder / "b", whole),
        "backwards": write(folder / "c", *list(tables.values())[::-1]),
        "any order": write(folder / "d", mixed.slice(0, 7), mixed.slice(7, 0), mixed.slice(7), row_group_size=3),
        "by bar": write(folder / "e", *(whole.slice(i, 1) for i in range(len(whole)))),
    }
    found = {name: bytes_of(stage(source, folder / "out" / name)) for name, source in ways.items()}
    one = IngestConfig(threads=1)
    found["one thread"] = bytes_of(stage(ways["any order"], folder / "out" / "one thread", config=one))
    assert len({str(each) for each in found.values()}) == 1, found
    changed = write(folder / "f", whole.slice(1))
    assert bytes_of(stage(changed, folder / "out" / "f")) != found["one file"]


def test_rows_of_more_than_a_part_are_cut_at_the_same_places(folder):
    rows = BLOCK_ROWS * PART_BLOCKS + 10
    contract = FeatureContract(targets=("price",), static=(), historical=("h",), future=())
    minutes = pa.array(START + DAY // 1440 * np.arange(rows)).cast(pa.timestamp("us"))
    table = pa.table({
        "entity_id": pa.array(["A"] * rows), "timestamp": minutes,
        "price": np.arange(1.0, rows + 1), "h": np.arange(rows, dtype=np.float32),
    })  # fmt: skip
    whole = stage(write(folder / "a", table), folder / "x", contract=contract)
    halves = write(folder / "b", table.slice(70_001), table.slice(0, 70_001))
    parts = stage(halves, folder / "y", contract=contract)
    assert bytes_of(whole) == bytes_of(parts)
    assert [pq.read_metadata(p).num_rows for p in parts.parts] == [rows - 10, 10]
    assert pq.read_metadata(parts.parts[0]).row_group(0).num_rows == BLOCK_ROWS


def test_local_time_of_the_machine_does_not_count(folder):
    """In a process of its own, whose time zone is another, on rows with and without a zone."""
    table = market_tables(SERIES, **SIZES)["AAA"]
    naive = table.set_column(1, "timestamp", table["timestamp"].cast(pa.timestamp("us")))
    write(folder / "naive", naive)
    write(folder / "zoned", table)
    code = (
        "import os, sys; sys.path.insert(0, 'tests')\nfrom test_staging import bytes_of, stage\n"
        "print(*(bytes_of(stage(f'{sys.argv[1]}/{n}', f'{sys.argv[1]}/out-{n}')) for n in ('naive', 'zoned')), os.environ['TZ'])"
    )
    zone = "Asia/Tokyo" if time.timezone == 0 else "UTC"
    found = subprocess.run(
        [sys.executable, "-c", code, folder], env={**os.environ, "TZ": zone}, capture_output=True, text=True, check=True,
        cwd=Path(__file__).parent.parent,
    ).stdout  # fmt: skip
    here = str(bytes_of(stage(folder / "zoned", folder / "here")))
    assert found.split() == [here, here, zone]


# --- files that are known ------------------------------------------------------------------------------------------


def test_known_files_are_not_read_again_and_the_dataset_is_the_same_to_the_byte(folder, monkeypatch):
    read = []
    real = tasks.staging.stage_file

    def stage_file(file, *rest):
        read.append(file.path.name)
        return real(file, *rest)

    monkeypatch.setattr(tasks.staging, "stage_file", stage_file)
    tables = list(market_tables(SERIES, **SIZES).values())
    source = write(folder / "s", *tables[:2])
    cache = folder / "cache"
    assert stage(source, folder / "a", cache=cache).known_files == 0
    write(source, *tables)  # the same two, and one more
    read.clear()
    more = stage(source, folder / "b", cache=cache)
    assert (read, more.known_files) == (["part-2.parquet"], 2)
    full = stage(source, folder / "c")
    assert more.model_copy(update={"parts": (), "known_files": 0}) == full.model_copy(update={"parts": ()})
    stores = [LocalStore(folder / name) for name in ("incremental", "full")]
    for staged, store in zip((more, full), stores, strict=True):
        write_dataset(staged, validate_features(staged), store)
    sums = [{p.relative_to(s.folder): digest(p).sha256 for p in s.folder.rglob("*") if p.is_file()} for s in stores]
    assert {k: v for k, v in sums[0].items() if "docs" not in k.parts} == {
        k: v for k, v in sums[1].items() if "docs" not in k.parts
    }
    # Under another name, beside another policy, or damaged, they are not the same
    (source / "part-0.parquet").rename(source / "other.parquet")
    read.clear()
    assert stage(source, folder / "d", cache=cache).known_files == 3
    aside = IngestConfig(on_bad_rows="quarantine")
    assert stage(source, folder / "e", cache=cache, config=aside).known_files == 0
    for kept in cache.rglob("rows.parquet"):
        kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    read.clear()
    assert bytes_of(stage(source, folder / "f", cache=cache)) == bytes_of(full)
    assert len(read) == 3


def test_the_cache_forgets_what_was_used_least_lately_and_leftovers_of_killed_processes(folder):
    source = write(folder / "s", *market_tables(SERIES, **SIZES).values())
    cache = folder / "cache"
    stage(source, folder / "a", cache=cache)
    (cache / ".killed").mkdir()
    places = sorted(p for p in cache.iterdir() if p.name != ".killed")
    for age, place in zip((9_000, 8_000, 0), places, strict=True):
        os.utime(place, (time.time() - age,) * 2)
    os.utime(cache / ".killed", (0, 0))
    sizes = {p: sum(f.stat().st_size for f in p.iterdir()) for p in places}
    evict(cache, sizes[places[1]] + sizes[places[2]])
    assert sorted(cache.iterdir()) == places[1:]
    evict(cache, 0)  # never one that another process may be reading
    assert sorted(cache.iterdir()) == places[2:]


def test_the_record_of_an_ingest_tells_files_rows_hashes_and_rules(folder):
    tables = market_tables(SERIES, **SIZES)
    source = write(folder / "s", *tables.values())
    staged = stage(source, folder / "a")
    write_dataset(staged, validate_features(staged), LocalStore(folder / "store"))
    (path,) = (folder / "store" / "ingests").glob("*.json")
    record = json.loads(path.read_text())
    for at, rows in enumerate(SERIES.values()):
        file = source / f"part-{at}.parquet"
        assert record["sources"][str(file)] == {**digest(file).model_dump(), "rows": rows}
    assert record["read_rows"] == record["rows"] == 120
    assert {line["rule"] for line in record["rules"]} >= {"no NaN", "no gaps", "one row per key"}


# --- within memory and disk ----------------------------------------------------------------------------------------


def wide(folder, rows, series=4):
    """A source of 120 columns in random order."""
    found = market_tables(dict.fromkeys("ABCD"[:series], rows // series), static=2, historical=110, future=2)
    whole = pa.concat_tables(found.values())
    return write(folder, whole.take(pa.array(np.random.default_rng(0).permutation(len(whole)))))


def test_progress_is_told_and_a_memory_limit_that_is_too_small_is_named(folder):
    contract = small_contract(static=2, historical=110, future=2)
    source = wide(folder / "s", 30_000)
    seen = []
    stage(source, folder / "out", contract=contract, on_progress=lambda share, text: seen.append((share, text)))
    assert [share for share, _ in seen] == sorted(share for share, _ in seen)
    assert seen[0][1] == "1 of 1 files read"
    assert seen[-1] == (1.0, "30000 of 30000 rows in order")
    with pytest.raises(DiskFullError, match=r"1MiB is too little.*--config\.memory-limit"):
        stage(source, folder / "tight", contract=contract, config=IngestConfig(memory_limit="1MiB", threads=1))


def told_apart(code, source, out):
    """What `code` prints in a process of its own, where this module's names and the contract of `wide` stand."""
    before = (
        "import sys; sys.path.insert(0, 'tests')\nfrom test_staging import *\n"
        "contract = small_contract(static=2, historical=110, future=2)\n"
    )
    command = [sys.executable, "-c", before + code, source, out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("block", "fits"), [(BLOCK_ROWS, True), (480_000, False)])
def test_rows_in_random_order_are_sorted_within_duckdbs_memory_and_300_mb(block, fits, folder):
    """In a process of its own, from the moment when all is read and what that left free is given back; the planted fault takes
    all rows at once, 216 MiB."""
    source = wide(folder / "s", 480_000)
    code = (
        "import pyarrow as pa, tasks.sorting\nfrom benchmarks.ingest import Peak\nfrom benchmarks.windows import own_memory\n"
        "from models.memory import close_holes\n"
        f"tasks.sorting.BLOCK_ROWS = {block}\n"
        "config = IngestConfig(memory_limit='128MiB', threads=1)\n"
        "before, peak = [], Peak()\n"
        "def written(share, text):\n    if 'files read' in text:\n"
        "        pa.default_memory_pool().release_unused(); close_holes(); before.append(own_memory()); peak.start()\n"
        "print(stage(sys.argv[1], sys.argv[2], contract=contract, config=config, on_progress=written).rows)\n"
        "peak.ended.set(); peak.join()\nprint(peak.mib - before[0])\n"
    )
    rows, grown = map(float, told_apart(code, source, folder / "out").split())
    assert rows == 480_000
    assert (grown < 128 + 300e6 / 2**20) == fits, f"{grown:.0f} MiB"


def test_a_disk_that_fills_while_files_are_read_or_sorted_is_told_as_such_and_nothing_is_stored(folder):
    """A process of its own that may write no longer file, as a full disk lets none grow."""
    source = wide(folder / "s", 30_000)
    code = (
        "import pathlib, resource\n"
        "config = IngestConfig(memory_limit='40MiB', threads=1)\n"
        "for limit in (100_000, 14_000_000):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, 14_000_000))\n"
        "    try:\n        stage(sys.argv[1], sys.argv[2], contract=contract, config=config)\n"
        "    except DiskFullError as error:\n"
        "        print(error, (pathlib.Path(sys.argv[2]) / 'ordered-rows').exists())"
    )
    reading, sorting = told_apart(code, source, folder / "out").splitlines()
    for line, sorted_already in ((reading, "False"), (sorting, "True")):
        assert "the disk is full" in line
        assert line.endswith(f"--config.spill-folder {sorted_already}")
