"""One protocol, two stores: a folder and a real S3 server."""

import os
import threading

import pytest

from tasks.storage import (
    ArtifactIntegrityError,
    ObjectMissing,
    S3Store,
    StoreConflict,
    StoreError,
    _s3_client,
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


def test_download_of_other_bytes_leaves_nothing(store, folder):
    store.put_if_absent("x", b"one")
    with pytest.raises(ArtifactIntegrityError, match="expected"):
        store.download("x", folder / "x", digest(b"two"))
    assert not (folder / "x").exists()


def test_size_limit_is_kept(store):
    store.put_if_absent("x", b"x" * 100)
    with pytest.raises(StoreError, match="more than the allowed 10"):
        store.get("x", limit=10)


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
        def call(**arguments):
            answer = getattr(self.client, name)(**arguments)
            if name == "put_object":
                raise ConnectionError("answer lost")
            return answer

        return call


def test_a_lost_answer_to_an_own_write_is_no_conflict(s3_server, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, **s3_server})
    store = S3Store("models", f"lost-{os.urandom(4).hex()}", client=LostAnswer(_s3_client()))
    assert store.put_if_absent("x", b"mine") is False
    assert store.get("x") == b"mine"
    assert store.swap("alias", b"1", None)
    _, etag = store.read_for_swap("alias")
    assert store.swap("alias", b"2", etag)
    with pytest.raises(StoreConflict):
        store.put_if_absent("x", b"other")


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


@pytest.mark.parametrize("endpoint", ["http://192.0.2.1:9000", "https://user:word@127.0.0.1:9000"])
def test_endpoints_that_would_give_keys_away_are_refused(monkeypatch, endpoint):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    with pytest.raises(StoreError, match=r"plain http|user or a password") as refused:
        open_store("s3://models")
    assert "word" not in str(refused.value).replace("password", "")


@pytest.mark.parametrize("key", ["../x", "a/../b", "/a", "a//b", ".hidden", "a b", ""])
def test_keys_that_could_leave_the_store_are_refused(tmp_path, key):
    with pytest.raises(StoreError, match="no legal key"):
        open_store(str(tmp_path)).put_if_absent(key, b"x")


def test_unknown_kinds_of_store_are_refused():
    with pytest.raises(StoreError, match="use s3:// or file://"):
        open_store("ftp://host/x")
