"""Which files a source has, what their footers must promise, and that no damaged file gets through."""

import base64
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from synthetic import market_tables, small_contract

import tasks.sources
import tasks.staging
from models.config import IngestConfig
from tasks.datasets import fingerprint
from tasks.expectations import DataContractError
from tasks.sources import SourceFile, check_columns, footers, list_sources, open_sources
from tasks.staging import stage_parquet
from tasks.storage import StoreError, open_store

CONTRACT = small_contract(static=2, historical=6, future=2)
SIZES = {"static": 2, "historical": 6, "future": 2}


def tables():
    return market_tables({"AAA": 40, "BBB": 30}, **SIZES)


def write(path, table, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, use_dictionary=["entity_id"], write_page_checksum=True, **options)
    return path


@pytest.fixture
def clean(folder):
    for name, table in tables().items():
        write(folder / "clean" / f"{name}.parquet", table)
    return folder / "clean"


def print_of(source, folder):
    return fingerprint(stage_parquet(source, CONTRACT, IngestConfig(), folder).parts, CONTRACT)[0]


# --- which files ---------------------------------------------------------------------------------------------------


def encrypted(path, table):
    class Keys(pe.KmsClient):
        def wrap_key(self, key, name):
            return base64.b64encode(key)

        def unwrap_key(self, key, name):
            return base64.b64decode(key)

    crypto = pe.CryptoFactory(lambda _: Keys())
    how = pe.EncryptionConfiguration(footer_key="f", uniform_encryption=True, data_key_length_bits=128)
    properties = crypto.file_encryption_properties(pe.KmsConnectionConfig(), how)
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)


def test_every_file_that_is_no_whole_parquet_is_named_at_once(clean):
    table = tables()["AAA"]
    (clean / "empty.parquet").touch()
    cut = write(clean / "cut.parquet", table)
    cut.write_bytes(cut.read_bytes()[:-300])
    (clean / "page.parquet").write_text("<html>not found</html>" * 50)
    encrypted(clean / "secret.parquet", table)
    with pytest.raises(DataContractError) as refused:
        footers(open_sources(str(clean), clean))
    lines = str(refused.value).splitlines()
    assert len(lines) == 4
    for name, text in {"empty": "0 bytes", "cut": "cut short", "page": "not Parquet", "secret": "encrypted"}.items():
        assert any(f"{name}.parquet" in line and text in line for line in lines), lines


def test_every_name_that_is_not_utf8_is_told(clean):
    for name in (b"\xff.parquet", b"b\xe9b\xe9.parquet"):
        (clean / os.fsdecode(name)).touch()
    with pytest.raises(DataContractError, match=r"xe9b.*\n.*xff"):
        list_sources(str(clean))


def test_links_and_capitals_are_read_once_and_a_loop_of_folders_ends(clean, folder):
    (clean / "loop").symlink_to(clean)
    (clean / "AAA.parquet").rename(clean / "AAA.PARQUET")
    elsewhere = write(folder / "elsewhere" / "CCC.parq", market_tables({"CCC": 9}, **SIZES)["CCC"])
    (clean / "link").symlink_to(elsewhere.parent)
    assert [p.name for p in list_sources(str(clean))] == ["AAA.PARQUET", "BBB.parquet", "CCC.parq"]


def test_a_text_file_lists_files_folders_and_patterns(clean, folder):
    listing = folder / "sources.txt"
    listing.write_text(f"# the two\n{clean / 'AAA.parquet'}\n\n{clean / 'B*.parquet'}\n{clean}\n")
    assert [f.path.name for f in open_sources(str(listing), folder)] == ["AAA.parquet", "BBB.parquet"]
    listing.write_text("# nothing\n")
    with pytest.raises(DataContractError, match=r"sources\.txt: no Parquet file is named"):
        open_sources(str(listing), folder)


@pytest.fixture
def bucket(s3_server, monkeypatch):
    """A prefix of one's own in the real S3 server."""
    monkeypatch.setattr(os, "environ", {**os.environ, **s3_server})
    return f"s3://models/{os.urandom(4).hex()}"


def put(uri, path):
    store = open_store("s3://models")
    key = uri.removeprefix("s3://models/")
    store.client.put_object(Bucket="models", Key=key, Body=path.read_bytes())


def test_s3_prefixes_patterns_objects_and_lists_give_the_dataset_of_the_same_files_here(bucket, clean, folder):
    wanted = print_of(str(clean), folder / "a")
    table = tables()["AAA"].drop_columns(["entity_id"])
    put(f"{bucket}/all/AAA.parquet", clean / "AAA.parquet")
    put(f"{bucket}/all/deep/BBB.parquet", clean / "BBB.parquet")
    put(f"{bucket}/all/_temporary/AAA.parquet", clean / "AAA.parquet")
    put(f"{bucket}/all/notes.txt", write(folder / "notes", table))
    put(f"{bucket}/all-else/AAA.parquet", clean / "AAA.parquet")  # begins alike, stands elsewhere
    put(f"{bucket}/hive/entity_id=AAA/day 1.parquet", write(folder / "hive.parquet", table))
    assert print_of(f"{bucket}/all", folder / "b") == wanted
    assert print_of(f"{bucket}/all/**.parquet", folder / "c") == wanted
    listing = folder / "list.txt"
    listing.write_text(f"{bucket}/hive/\n{clean / 'BBB.parquet'}\n")
    assert print_of(str(listing), folder / "d") == wanted
    (one,) = open_sources(f"{bucket}/all/AAA.parquet", folder / "e")
    assert one.name == f"{bucket}/all/AAA.parquet"
    assert one.path.read_bytes() == (clean / "AAA.parquet").read_bytes()
    with pytest.raises(DataContractError, match=f"{bucket}/none: no Parquet object"):
        open_sources(f"{bucket}/none", folder / "f")
    with pytest.raises(StoreError, match=r"make the bucket|allow s3:ListBucket"):
        open_sources("s3://no-such-bucket/x", folder / "g")


def test_a_damaged_object_is_named_by_its_address(bucket, clean, folder):
    cut = folder / "cut.parquet"
    cut.write_bytes((clean / "BBB.parquet").read_bytes()[:-9])
    put(f"{bucket}/bad/BBB.parquet", cut)
    with pytest.raises(DataContractError, match=f"{bucket}/bad/BBB.parquet: cut short"):
        print_of(f"{bucket}/bad", folder / "out")


# --- what footers promise ------------------------------------------------------------------------------------------


def recast(table, name, kind):
    return table.set_column(table.schema.names.index(name), name, table[name].cast(kind, safe=False))


CASTS = {
    "entity_id": (pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.large_string())),
    "timestamp": (pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("ns", tz="Asia/Kolkata"), pa.timestamp("us", tz="+02:00")),
    "price": (pa.decimal128(38, 18), pa.decimal256(50, 17)),
    "static_001": (pa.int8(), pa.int16(), pa.uint8(), pa.uint16(), pa.float16()),
    "hist_003": (pa.float64(),),
}


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n, kinds in CASTS.items() for k in kinds], ids=str)
def test_casts_that_lose_nothing_give_the_same_rows(name, kind, clean, folder):
    whole = pa.concat_tables(tables().values())
    if name == "price":  # as exact as the decimal
        whole = whole.set_column(2, "price", pa.array(np.round(whole["price"].to_numpy() * 4) / 4))
        whole = whole.set_column(3, "target", whole["price"])
    write(folder / "a" / "x.parquet", whole)
    write(folder / "b" / "x.parquet", recast(whole, name, kind))
    assert print_of(str(folder / "a"), folder / "c") == print_of(str(folder / "b"), folder / "d")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("entity_id", pa.binary()), ("timestamp", pa.int64()), ("timestamp", pa.date32()), ("price", pa.string()),
     ("hist_003", pa.int32()), ("hist_003", pa.int64()), ("hist_003", pa.bool_()), ("target", pa.int64())],
    ids=str,
)  # fmt: skip
def test_types_that_could_lose_something_are_refused_with_file_and_column(name, kind, folder):
    table = tables()["AAA"]
    other = pa.nulls(40, kind) if name == "timestamp" and kind == pa.date32() else None
    array = other if other is not None else pa.array([1] * 40).cast(kind if kind != pa.binary() else pa.string()).cast(kind)
    write(folder / "s" / "bad.parquet", table.set_column(table.schema.names.index(name), name, array))
    with pytest.raises(DataContractError, match=rf"bad\.parquet: column '{name}' is .*expected"):
        print_of(str(folder / "s"), folder / "out")


def test_a_folder_key_supplies_what_the_file_lacks_and_never_overrides_it(folder):
    table = tables()["AAA"]
    write(folder / "s" / "entity_id=XXX" / "static_001=7" / "a.parquet", table)
    write(folder / "t" / "entity_id=XXX" / "static_001=7" / "a.parquet", table.drop_columns(["entity_id", "static_001"]))
    rows = {}
    for name in ("s", "t"):
        staged = stage_parquet(str(folder / name), CONTRACT, IngestConfig(), folder / f"out-{name}")
        rows[name] = pq.read_table(staged.parts[0])
    assert set(rows["s"]["entity_id"].to_pylist()) == {"AAA"}
    assert rows["s"]["static_001"].to_pylist() == table["static_001"].to_pylist()
    assert set(rows["t"]["entity_id"].to_pylist()) == {"XXX"}
    assert set(rows["t"]["static_001"].to_pylist()) == {7.0}


# --- bytes ---------------------------------------------------------------------------------------------------------


def test_a_file_that_changes_or_vanishes_while_it_is_read_is_refused(clean, folder, monkeypatch):
    real = tasks.staging.stage_file

    def meanwhile(change):
        def stage(file, *rest):
            found = real(file, *rest)
            if file.path.name == "BBB.parquet":
                change(file.path)
            return found

        monkeypatch.setattr(tasks.staging, "stage_file", stage)

    meanwhile(lambda path: write(path, tables()["BBB"].slice(0, 29)))
    with pytest.raises(DataContractError, match=r"BBB\.parquet: changed while it was read"):
        print_of(str(clean), folder / "a")
    meanwhile(lambda path: path.unlink())
    with pytest.raises(DataContractError, match=r"BBB\.parquet: vanished"):
        print_of(str(clean), folder / "b")


def flipped(data, at, bit):
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    return bytes(changed)


def footer_start(data):
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def flip_that(data, byte, changes):
    """The first flip of a bit of such a byte of the footer that changes what `changes` reads."""
    before = changes(data)
    for at in range(footer_start(data), len(data) - 8):
        for bit in range(5) if data[at] == byte else ():
            try:
                if changes(flipped(data, at, bit)) != before:
                    return flipped(data, at, bit)
            except (pa.ArrowException, OSError):
                continue
    raise AssertionError("no such bit")


def rows_of_first_group(data):
    return pq.read_metadata(pa.BufferReader(data)).row_group(0).num_rows


def type_of_target(data):
    opened = pq.ParquetFile(pa.BufferReader(data))
    return opened.schema.column(3).physical_type, opened.read().num_rows


@pytest.mark.parametrize(("byte", "changes"), [(30, rows_of_first_group), (10, type_of_target)])
def test_one_bit_of_a_footer_that_drops_rows_or_reads_other_numbers_is_refused(byte, changes, folder, monkeypatch):
    path = write(folder / "s" / "a.parquet", tables()["AAA"], row_group_size=15)
    path.write_bytes(flip_that(path.read_bytes(), byte, changes))  # 30 is 15 rows, 10 a double
    with pytest.raises(DataContractError, match=r"a\.parquet: (the footer contradicts itself|cut short)"):
        print_of(str(folder / "s"), folder / "a")
    monkeypatch.setattr(tasks.sources, "_contradiction", lambda *_: None)
    if changes is rows_of_first_group:  # the count of rows read is a second guard
        with pytest.raises(DataContractError, match="9 of 40 rows can be read"):
            print_of(str(folder / "s"), folder / "b")
    else:
        print_of(str(folder / "s"), folder / "b")  # otherwise nobody would know


@pytest.mark.parametrize(
    ("name", "group", "rows"), [("hist_005", 0, 40), ("hist_005", 1, 15), ("entity_id", 0, 40), ("price", 2, 15)]
)
def test_a_page_that_readers_pass_over_because_its_type_is_unknown_is_refused(name, group, rows, folder):
    table = tables()["AAA"]
    path = write(folder / "s" / "a.parquet", table, row_group_size=rows)
    at = pq.read_metadata(path).row_group(group).column(table.schema.names.index(name)).data_page_offset + 1
    data = path.read_bytes()
    assert data[at] == 0, "a data page, as thrift writes it"
    path.write_bytes(flipped(data, at, 3))
    with pytest.raises(DataContractError, match=r"a\.parquet: damaged"):
        print_of(str(folder / "s"), folder / "a")


def mutants(data, random, flips):
    """Damage of every kind to one good file with page checksums: name and bytes."""
    start = footer_start(data)
    for at in (0, 3, 11, start // 2, start, len(data) - 300, len(data) - 8, len(data) - 1):
        yield f"cut at {at}", data[:at]
    for at in random.integers(4, start, flips):
        yield f"page bit at {at}", flipped(data, at, random.integers(8))
    for at in random.integers(start, len(data), flips):
        yield f"footer bit at {at}", flipped(data, at, random.integers(8))
    yield "zeros in a page", data[: start // 2] + bytes(64) + data[start // 2 + 64 :]
    yield "bytes left out", data[: start // 2] + data[start // 2 + 64 :]
    yield "tail of another write", data[:start] + data[start + 100 :]


def remade(table):
    """The same file written again with other columns: name and table."""
    names = table.schema.names
    yield "renamed", table.rename_columns(["hist_99" if n == "hist_003" else n for n in names])
    yield "renamed in case", table.rename_columns(["HIST_003" if n == "hist_003" else n for n in names])
    yield "two columns swapped by name", table.rename_columns([{"price": "target", "target": "prices"}.get(n, n) for n in names])
    yield "retyped", table.set_column(names.index("hist_003"), "hist_003", table["hist_003"].cast(pa.float64()))
    yield "retyped as text", table.set_column(names.index("price"), "price", table["price"].cast(pa.string()))
    yield "column left out", table.drop_columns(["fut_001"])
    yield "emptied of columns", table.select([])
    yield "nulls for numbers", table.set_column(names.index("hist_003"), "hist_003", pa.nulls(len(table)))
    yield "reordered", table.select(names[::-1])


def check_mutants(random, flips, clean, folder):
    """Every mutant beside a good file is refused by name, or is the same rows to the bit; how many were refused."""
    wanted = print_of(str(clean), folder / "good")
    path = clean / "BBB.parquet"
    data = path.read_bytes()
    found = list(mutants(data, random, flips))
    for name, table in remade(tables()["BBB"]):
        write(path, table)
        found.append((name, path.read_bytes()))
    refused = 0
    for number, (name, mutant) in enumerate(found):
        path.write_bytes(mutant)
        try:
            got = print_of(str(clean), folder / str(number))
        except DataContractError as error:
            got = str(error)
        if got == wanted:
            assert name.startswith(("footer bit", "page bit")) or name == "reordered", name
        else:
            assert "BBB.parquet: " in got, (name, got)
            refused += 1
    return refused, len(found)


def test_no_damage_to_a_file_changes_the_rows_and_every_refusal_names_it(clean, folder):
    refused, of = check_mutants(np.random.default_rng(5), 6, clean, folder)
    assert of >= 30
    assert refused >= 22


@pytest.mark.slow
def test_no_flipped_bit_changes_the_rows(clean, folder):
    refused, of = check_mutants(np.random.default_rng(6), 500, clean, folder)
    assert of > 1000
    assert refused > 600


def test_an_emptied_file_is_the_rest_of_the_source(clean, folder):
    (clean / "BBB.parquet").rename(folder / "away")
    wanted = print_of(str(clean), folder / "a")
    write(clean / "BBB.parquet", tables()["BBB"].slice(0, 0))
    assert print_of(str(clean), folder / "b") == wanted


def test_an_extra_column_is_ignored_whatever_it_holds(clean, folder):
    wanted = print_of(str(clean), folder / "a")
    for name, table in tables().items():
        extra = table.append_column("__index_level_0__", pa.array(range(len(table))))
        extra = extra.append_column("notes", pa.array([[{"x": 1}]] * len(table)))
        write(clean / f"{name}.parquet", extra)
    assert print_of(str(clean), folder / "b") == wanted
    found = footers([SourceFile(str(p), p) for p in sorted(clean.iterdir())])
    assert check_columns(found, CONTRACT)[1] == ("__index_level_0__", "notes")
