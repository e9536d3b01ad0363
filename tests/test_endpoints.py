"""What goes wrong between here and a store: each case is told with the setting to change, and nothing is half-published."""

import json
import os
import subprocess
import time
from pathlib import Path

import boto3
import pytest
from proxy import CHECKSUMS, CONDITIONS, Proxy
from test_artifacts import publish, trained

import tasks.s3
from tasks.artifacts import read_manifest, verify
from tasks.garbage import collect
from tasks.promotion import challenge
from tasks.registry import promote, rollback
from tasks.storage import ArtifactIntegrityError, ObjectMissing, StoreError, digest, open_store

POLICIES = Path(__file__).parent.parent / "deployments" / "policies"


@pytest.fixture
def fresh(s3_server, monkeypatch):
    """The environment of the server and a prefix of one's own in it; endpoints are asked again."""
    monkeypatch.setattr(os, "environ", {**os.environ, **s3_server})
    for asked in ("_conditional", "_compared"):
        monkeypatch.setattr(tasks.s3, asked, {})
    return f"s3://models/{os.urandom(4).hex()}"


def through(proxy, uri, monkeypatch):
    with monkeypatch.context() as change:
        change.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        return open_store(uri)


def test_an_endpoint_is_asked_once_and_costs_no_object_per_start(s3_server, fresh, monkeypatch):
    with Proxy(s3_server["AWS_ENDPOINT_URL_S3"]) as proxy:
        store = through(proxy, fresh, monkeypatch)
        store.put_if_absent("x", b"1")
        first = proxy.seen
        store.put_if_absent("y", b"1")
        assert proxy.seen == first + 1
        tasks.s3._conditional.clear()
        store.put_if_absent("z", b"1")
        assert proxy.seen == first + 1 + 3, "the object of the probe is there by now: two writes, both refused"
    assert list(open_store(fresh).list("probe/")) == [tasks.s3.PROBED]


def ignoring(uri, *conditions):
    """The store as if its server had never heard of these conditions."""
    store = open_store(uri)

    def drop(params, **_):
        for name in conditions:
            params.pop(name, None)

    for operation in ("PutObject", "CompleteMultipartUpload"):
        store.client.meta.events.register(f"before-parameter-build.s3.{operation}", drop)
    return store


def test_a_store_that_ignores_conditions_is_refused_unless_one_alone_writes(fresh, monkeypatch, folder):
    store = ignoring(fresh, "IfNoneMatch", "IfMatch")
    with pytest.raises(StoreError, match="FORECASTLE_SINGLE_WRITER=1"):
        publish(store, trained(folder / "run"))
    assert set(open_store(fresh).list("")) == {tasks.s3.PROBED}
    monkeypatch.setenv("FORECASTLE_SINGLE_WRITER", "1")
    for seed in (0, 1):
        manifest = publish(store, trained(folder / str(seed), seed=seed))
        assert challenge(store, manifest, "always").promoted
    assert publish(store, trained(folder / "1", seed=1)).version == 2
    assert rollback(store, "dqn", why="test") == 1
    verify(store, "dqn", 2)
    with pytest.raises(StoreError, match="other bytes"):
        store.put_if_absent("models/dqn/1/manifest.json", b"other")
    assert not store.swap("models/dqn/champion.json", b"x", '"0123"')

    def second_writer(**_):
        open_store(fresh).client.put_object(Bucket=store.bucket, Key=f"{store.prefix}/alias", Body=b"theirs")

    store.client.meta.events.register_last("after-call.s3.PutObject", second_writer)
    with pytest.raises(ArtifactIntegrityError, match="alias"):
        store.swap("alias", b"mine", None)


def test_a_file_is_hashed_here_only_where_the_server_does_not_compare(fresh, monkeypatch, folder):
    hashed, told = [], digest(b"sound")
    monkeypatch.setattr(tasks.storage, "digest", lambda data: hashed.append(data) or digest(data))
    (folder / "sound").write_bytes(b"sound")
    (folder / "spoilt").write_bytes(b"spoilt")
    store = open_store(fresh)
    assert store.put_if_absent("x", folder / "sound", told)
    assert hashed == []
    with pytest.raises(ArtifactIntegrityError, match="spoilt: sha256"):
        store.put_if_absent("y", folder / "spoilt", told)
    for why, change in (
        ("the server takes any checksum", lambda: ignoring(fresh, "ChecksumSHA256")),
        ("none is sent", lambda: monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")),
        ("it goes up in parts", lambda: monkeypatch.setattr(tasks.s3, "ONE_REQUEST", 0)),
    ):
        tasks.s3._compared.clear()
        hashed.clear()
        store = change() or open_store(fresh)
        with pytest.raises(ArtifactIntegrityError, match="spoilt: sha256"):
            store.put_if_absent("y", folder / "spoilt", told)
        assert hashed == [folder / "spoilt"], why
    assert open_store(fresh).head("y") is None


@pytest.mark.parametrize("condition", ["IfNoneMatch", "IfMatch"])
def test_a_store_that_keeps_only_one_kind_of_condition_is_refused(fresh, condition):
    with pytest.raises(StoreError, match="ignores If-None-Match and If-Match"):
        ignoring(fresh, condition).put_if_absent("x", b"1")


def test_a_store_that_refuses_conditions_is_told_and_serves_one_writer(s3_server, fresh, monkeypatch, folder):
    with Proxy(s3_server["AWS_ENDPOINT_URL_S3"], refuses=CONDITIONS) as proxy:
        with pytest.raises(StoreError, match="FORECASTLE_SINGLE_WRITER=1"):
            publish(through(proxy, fresh, monkeypatch), trained(folder / "run"))
        assert list(open_store(fresh).list("")) == []
        monkeypatch.setenv("FORECASTLE_SINGLE_WRITER", "1")
        store = through(proxy, fresh, monkeypatch)
        assert challenge(store, publish(store, trained(folder / "run")), "always").promoted
        verify(store, "dqn", 1)


def test_a_store_that_refuses_checksum_headers_is_told_and_the_switch_helps(s3_server, fresh, monkeypatch, folder):
    with Proxy(s3_server["AWS_ENDPOINT_URL_S3"], refuses=CHECKSUMS) as proxy:
        with pytest.raises(StoreError, match="AWS_REQUEST_CHECKSUM_CALCULATION=when_required"):
            publish(through(proxy, fresh, monkeypatch), trained(folder / "run"))
        assert list(open_store(fresh).list("")) == []
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
        store = through(proxy, fresh, monkeypatch)
        verify(store, "dqn", publish(store, trained(folder / "run")).version)
        big = folder / "big"
        monkeypatch.setattr(tasks.s3, "ONE_REQUEST", tasks.s3.PART)
        big.write_bytes(os.urandom(tasks.s3.PART + 5))
        assert store.put_if_absent("big", big)
        store.check("big", digest(big))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_tls_with_a_private_ca_needs_its_file_and_then_publishes(s3_server, fresh, monkeypatch, folder, certificate):
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    with Proxy(s3_server["AWS_ENDPOINT_URL_S3"], tls=certificate) as proxy:
        with pytest.raises(StoreError, match="AWS_CA_BUNDLE"):
            publish(through(proxy, fresh, monkeypatch), trained(folder / "run"))
        assert list(open_store(fresh).list("")) == []
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate[0]))
        store = through(proxy, fresh, monkeypatch)
        manifest = publish(store, trained(folder / "run"))
        assert challenge(store, manifest, "always").promoted
        assert read_manifest(store, "dqn", "champion") == manifest


def user(s3_server, name, document):
    """Keys of a user of the server with that policy alone."""
    address = {"endpoint_url": s3_server["AWS_ENDPOINT_URL_S3"], "region_name": "us-east-1"}
    keys = {k.lower(): s3_server[k] for k in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    iam = boto3.session.Session().client("iam", **address, **keys)
    iam.create_user(UserName=name)
    made = iam.create_access_key(UserName=name)["AccessKey"]
    iam.put_user_policy(UserName=name, PolicyName="only", PolicyDocument=json.dumps(document))
    return {"AWS_ACCESS_KEY_ID": made["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": made["SecretAccessKey"]}


def policy(name, uri):
    """The policy as it is shipped, for this store. SeaweedFS's users know no finer action for listing uploads than List*."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    text = (POLICIES / f"{name}.json").read_text().replace("BUCKET", bucket).replace("PREFIX", prefix)
    return json.loads(text.replace("s3:ListBucketMultipartUploads", "s3:List*"))


def as_user(keys, uri, monkeypatch):
    """The store with that user's keys, once the server knows them."""
    with monkeypatch.context() as change:
        for name, value in keys.items():
            change.setenv(name, value)
        store = open_store(uri)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            store.get("nothing")
        except ObjectMissing:
            return store
        except StoreError:
            time.sleep(0.1)
    raise AssertionError("the server never took the new keys")


def test_the_shipped_policies_are_enough_and_no_more(s3_server, fresh, monkeypatch, folder):
    names = ("publisher", "reader", "gc")
    publisher, reader, collector = (
        as_user(user(s3_server, f"{name}-{os.urandom(3).hex()}", policy(name, fresh)), fresh, monkeypatch) for name in names
    )
    for seed in (0, 1):
        assert challenge(publisher, publish(publisher, trained(folder / str(seed), seed=seed)), "always").promoted
    assert rollback(publisher, "dqn", why="test") == 1
    with pytest.raises(StoreError, match="s3:DeleteObject"):
        publisher.delete("models/dqn/champion.json")

    assert verify(reader, "dqn", read_manifest(reader, "dqn", "champion").version)
    for refused, need in (
        (lambda: reader.put_if_absent("x", b"x"), "s3:PutObject"), (lambda: list(reader.list("models/")), "s3:ListBucket"),
        (lambda: reader.delete("models/dqn/champion.json"), "s3:DeleteObject"),
        (lambda: promote(reader, "dqn", 2, why="no"), "s3:PutObject"),
    ):  # fmt: skip
        with pytest.raises(StoreError, match=need):
            refused()

    publisher.put_if_absent("models/dqn/9/left-over", b"x")
    collect(collector, grace=0, apply=True)
    assert collector.head("models/dqn/9/left-over") is None
    with pytest.raises(StoreError, match="s3:PutObject"):
        promote(collector, "dqn", 2, why="no")
    assert read_manifest(reader, "dqn", "champion").version == 1
    with pytest.raises(ObjectMissing, match="no permission"):
        as_user_elsewhere(publisher).get("models/dqn/champion.json")


def as_user_elsewhere(store):
    return tasks.s3.S3Store(store.bucket, "another-team", client=store.client)


@pytest.mark.parametrize(
    ("allowed", "need"),
    [(["s3:GetObject", "s3:ListBucket"], "s3:PutObject"), (["s3:GetObject", "s3:PutObject"], "s3:ListBucket")],
)
def test_a_missing_permission_is_named_and_nothing_is_half_published(s3_server, fresh, monkeypatch, folder, allowed, need):
    bucket = fresh.removeprefix("s3://").partition("/")[0]
    resources = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
    document = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": allowed, "Resource": resources}]}
    store = as_user(user(s3_server, f"some-{os.urandom(3).hex()}", document), fresh, monkeypatch)
    with pytest.raises(StoreError, match=need):
        list(store.list("runs/")) if need == "s3:ListBucket" else publish(store, trained(folder / "run"))
    assert set(open_store(fresh).list("models/")) == set()


@pytest.mark.parametrize("name", ["publisher", "reader", "gc"])
def test_policies_name_only_what_the_code_may_need(name):
    found = json.loads((POLICIES / f"{name}.json").read_text())
    actions = {action for statement in found["Statement"] for action in statement["Action"]}
    assert all(
        s["Effect"] == "Allow" and s["Resource"] in ("arn:aws:s3:::BUCKET", "arn:aws:s3:::BUCKET/PREFIX/*")
        for s in found["Statement"]
    )
    assert not any("*" in action for action in actions)
    assert ("s3:DeleteObject" in actions) == (name == "gc")
    assert ("s3:PutObject" in actions) == (name == "publisher")


@pytest.mark.parametrize(
    ("change", "uri", "hint"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, None, "AWS_SECRET_ACCESS_KEY"),
        ({"AWS_ACCESS_KEY_ID": "unknown"}, None, "AWS_ACCESS_KEY_ID"),
        ({}, "s3://no-such-bucket", "no-such-bucket"),
        ({"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}, None, "AWS_ENDPOINT_URL_S3"),
    ],
)
def test_a_wrong_setting_stops_a_publication_before_its_first_object(s3_server, fresh, monkeypatch, folder, change, uri, hint):
    with monkeypatch.context() as environment:
        for name, value in change.items():
            environment.setenv(name, value)
        with pytest.raises(StoreError, match=hint):
            publish(open_store(uri or fresh), trained(folder / "run"))
    assert list(open_store(fresh).list("")) == []
