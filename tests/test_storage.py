"""One protocol, two stores: a folder and a real S3 server."""

import io
import os
import stat
import sys
import threading

import pytest
from botocore.exceptions import ClientError

import tasks.s3
from tasks.s3 import S3Store
from tasks.s3_client import s3_client
from tasks.storage import (
    ArtifactIntegrityError,
    LocalStore,
    ObjectMissing,
    StoreConflict,
    StoreError,
    digest,
    open_store,
)


def in_threads(count, work):
    results, threads = [None] * count, []
    for i in range(count):
        threads.append(threading.Thread(target=lambda i=i: results.__setitem__(i, work(i))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_objects_come_back_whole_and_are_never_replaced(store, folder):
    assert store.put_if_absent("models/a/x", b"one")
    assert not store.put_if_absent("models/a/x", b"one")
    with pytest.raises(StoreConflict, match="other bytes"):
        store.put_if_absent("models/a/x", b"two")
    assert store.get("models/a/x") == b"one"
    info = store.head("models/a/x")
    assert (info.size, info.sha256) == (3, digest(b"one").sha256)
    file = folder / "file"
    file.write_bytes(os.urandom(300_000))
    assert store.put_if_absent("big", file)
    store.download("big", folder / "copy", digest(file))
    assert (folder / "copy").read_bytes() == file.read_bytes()
    assert list(store.list("models/")) == ["models/a/x"]
    store.delete("models/a/x")
    assert store.head("models/a/x") is None
    with pytest.raises(ObjectMissing):
        store.get("models/a/x")


def test_a_file_that_is_not_what_was_expected_is_not_stored(store, folder):
    file = folder / "file"
    file.write_bytes(b"spoilt")
    for expected in (digest(b"sound!"), digest(b"sound")):
        with pytest.raises(ArtifactIntegrityError, match=f"file: sha256 .* and 6 bytes, expected {expected.sha256}"):
            store.put_if_absent("x", file, expected)
    assert store.head("x") is None
    assert store.put_if_absent("x", file, digest(b"spoilt"))
    assert not store.put_if_absent("x", file, digest(b"spoilt"))


def test_download_of_other_bytes_leaves_nothing(store, folder):
    store.put_if_absent("x", b"one")
    with pytest.raises(ArtifactIntegrityError, match="expected"):
        store.download("x", folder / "x", digest(b"two"))
    assert not (folder / "x").exists()


def test_size_limit_is_kept(store):
    store.put_if_absent("x", b"x" * 100)
    with pytest.raises(StoreError, match="more than the allowed 10"):
        store.get("x", limit=10)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_large_file_goes_in_parts_few_at_once_under_a_bar_and_leaves_no_upload_when_it_fails(s3_server, monkeypatch, folder):
    monkeypatch.setattr(os, "environ", {**os.environ, **s3_server})
    monkeypatch.setattr(tasks.s3, "PART", 5 * 2**20)  # the least that S3 allows
    monkeypatch.setattr(tasks.s3, "ONE_REQUEST", 5 * 2**20)
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    store, lock, going, most = open_store(f"s3://models/parts-{os.urandom(4).hex()}"), threading.Lock(), [0], []
    file = folder / "large"
    file.write_bytes(os.urandom(3 * 5 * 2**20 + 7))
    send = store.client.upload_part

    def watched(**arguments):
        with lock:
            going[0] += 1
            most.append(going[0])
        try:
            return send(**arguments)
        finally:
            with lock:
                going[0] -= 1

    monkeypatch.setattr(store.client, "upload_part", watched)
    assert store.put_if_absent("large", file)
    assert (len(most), max(most)) == (4, tasks.s3.AT_ONCE)
    store.download("large", folder / "copy", digest(file))
    assert (folder / "copy").read_bytes() == file.read_bytes()
    assert "up large" in screen.getvalue()
    assert "down copy" in screen.getvalue()
    assert not store.put_if_absent("large", file)

    def fails(**arguments):
        raise OSError("cable pulled")

    monkeypatch.setattr(store.client, "upload_part", fails)
    with pytest.raises(StoreError, match="AWS_ENDPOINT_URL_S3"):
        store.put_if_absent("other", file)
    assert store.head("other") is None
    assert list(store.unfinished(0, abort=False)) == []


@pytest.mark.parametrize("rounds", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_of_eight_writers_one_creates_the_object(store, rounds):
    for n in range(rounds):

        def create(i, n=n):
            try:
                return store.put_if_absent(f"race/{n}", b"%d" % i)
            except StoreConflict:
                return False

        results = in_threads(8, create)
        assert results.count(True) == 1
        assert store.get(f"race/{n}") == b"%d" % results.index(True)


def test_the_race_catches_a_store_that_looks_and_then_writes(tmp_path):
    """The planted fault of the test above: nothing holds the name between the look and the write."""
    together = threading.Barrier(8)

    class LooksFirst(LocalStore):
        def put_if_absent(self, key, data):
            absent = self.head(key) is None
            together.wait()
            return absent

    store = LooksFirst(tmp_path)
    assert in_threads(8, lambda i: store.put_if_absent("x", b"%d" % i)).count(True) == 8


@pytest.mark.parametrize("each", [4, pytest.param(25, marks=pytest.mark.slow)])
def test_swaps_lose_no_increment(store, each):
    assert store.swap("counter", b"0", None)

    def add(_):
        for _ in range(each):
            while True:
                data, etag = store.read_for_swap("counter")
                if store.swap("counter", b"%d" % (int(data) + 1), etag):
                    break

    in_threads(8, add)
    assert store.get("counter") == b"%d" % (8 * each)
    assert not store.swap("counter", b"x", None)
    assert not store.swap("counter", b"x", '"0123456789abcdef0123456789abcdef"')


class LostAnswer:
    """A client whose writes arrive and whose answers do not."""

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name):
        if name == "meta":
            return self.client.meta

        def call(**arguments):
            answer = getattr(self.client, name)(**arguments)
            if name == "put_object" and "probe" not in arguments["Key"]:
                raise ConnectionError("answer lost")
            return answer

        return call


def test_a_lost_answer_to_an_own_write_is_no_conflict(s3_server, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, **s3_server})
    store = S3Store("models", f"lost-{os.urandom(4).hex()}", client=LostAnswer(s3_client()))
    assert store.put_if_absent("x", b"mine") is False
    assert store.get("x") == b"mine"
    assert store.swap("alias", b"1", None)
    _, etag = store.read_for_swap("alias")
    assert store.swap("alias", b"2", etag)
    with pytest.raises(StoreConflict):
        store.put_if_absent("x", b"other")


def test_writing_threads_leave_the_umask_and_their_files_modes_alone(tmp_path):
    store, interval, umask = LocalStore(tmp_path), sys.getswitchinterval(), os.umask(0o027)
    sys.setswitchinterval(1e-6)  # 150 writes of 8 threads: reading the umask by setting it left some files at 0666
    try:
        in_threads(8, lambda i: [store.put_if_absent(f"u/{i}-{n}", b"x") for n in range(150)])
    finally:
        sys.setswitchinterval(interval)
        after = os.umask(umask)
    assert after == 0o027
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "u").iterdir()} == {0o640}


def test_what_the_disk_refuses_is_a_store_error(tmp_path):
    store = LocalStore(tmp_path)
    store.put_if_absent("file", b"x")
    for refused in (lambda: store.put_if_absent("file/x", b"x"), lambda: store.swap("file/x", b"x", None)):
        with pytest.raises(StoreError, match="permissions and free space"):
            refused()
    assert store.head("file/x") is None
    with pytest.raises(ObjectMissing):
        store.get("file/x")
    store.delete("file/x")
    with pytest.raises(StoreError, match="no legal key"):
        list(store.list("../"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        store.put_if_absent("y", tmp_path / "nowhere")


class MayNotList:
    """Amazon S3 to who may not list: 403 for every missing key, without a body on HEAD."""

    def __init__(self, code):
        self.code = code

    def head_object(self, **_):
        raise ClientError({"Error": {"Code": "403"}}, "HeadObject")

    def get_object(self, **_):
        raise ClientError({"Error": {"Code": self.code}}, "GetObject")


def test_a_missing_object_is_missing_also_to_who_may_not_list():
    store = S3Store("b", client=MayNotList("AccessDenied"))
    assert store.head("x") is None
    assert store.read_for_swap("x") is None
    with pytest.raises(ObjectMissing, match="or no permission"):
        store.get("x", limit=9)
    with pytest.raises(StoreError, match="AWS_SECRET_ACCESS_KEY"):
        S3Store("b", client=MayNotList("SignatureDoesNotMatch")).head("x")


def test_missing_credentials_are_named(monkeypatch, tmp_path):
    nowhere = {name: str(tmp_path / "no") for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "HOME")}
    environ = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")} | nowhere
    settings = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}
    monkeypatch.setattr(os, "environ", environ | settings)
    with pytest.raises(StoreError, match="set AWS_ACCESS_KEY_ID"):
        open_store("s3://models").get("x")


@pytest.mark.parametrize(
    ("change", "uri", "hint"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "s3://models", "AWS_SECRET_ACCESS_KEY"),
        ({"AWS_ACCESS_KEY_ID": "unknown"}, "s3://models", "AWS_ACCESS_KEY_ID"),
        ({}, "s3://no-such-bucket", "no-such-bucket"),
        ({"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}, "s3://models", "AWS_ENDPOINT_URL_S3"),
    ],
)
def test_a_wrong_setting_is_named(s3_server, monkeypatch, change, uri, hint):
    monkeypatch.setattr(os, "environ", {**os.environ, **s3_server, **change})
    with pytest.raises(StoreError, match=hint):
        open_store(uri).put_if_absent("x/y", b"z")


@pytest.mark.parametrize("place", ["environment", "configuration file"])
@pytest.mark.parametrize(
    "endpoint",
    ["http://192.0.2.1:9000", "http://127.0.0.1.example.com", "https://user:word@127.0.0.1:9000", "user:word@host:9000"],
)
def test_endpoints_that_would_give_keys_away_are_refused(monkeypatch, tmp_path, endpoint, place):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    if place == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    else:
        (tmp_path / "config").write_text(f"[default]\nendpoint_url = {endpoint}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(StoreError, match=r"plain http|user or a password|no http") as refused:
        open_store("s3://models")
    assert "word" not in str(refused.value).replace("password", "")


@pytest.mark.parametrize("key", ["../x", "a/../b", "/a", "a//b", ".hidden", "a b", ""])
def test_keys_that_could_leave_the_store_are_refused(tmp_path, key):
    with pytest.raises(StoreError, match="no legal key"):
        open_store(str(tmp_path)).put_if_absent(key, b"x")


def test_unknown_kinds_of_store_are_refused():
    with pytest.raises(StoreError, match="use s3:// or file://"):
        open_store("ftp://host/x")
