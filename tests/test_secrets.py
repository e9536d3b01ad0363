"""Keys are told to nobody: not in logs at DEBUG, parameters, artifacts, manifests, exceptions or Prefect's database."""

import base64
import importlib
import logging
import os
import re
import subprocess
import sys
import traceback
import typing
from pathlib import Path

import pytest
from prefect import Flow
from prefect.blocks.core import Block
from prefect.blocks.system import Secret
from pydantic import BaseModel
from synthetic import write_market
from test_flows import CONTRACT, MARKET

from tasks.storage import StoreError, open_store

ROOT = Path(__file__).parent.parent
RUNS = """
import contextlib, json, logging, os, sys
import tasks.s3_client
from flows.__main__ import main
from prefect import get_run_logger
from prefect.blocks.system import Secret
from prefect.exceptions import MissingContextError

logging.getLogger().setLevel(logging.DEBUG)  # here alone: the server's every statement is not what is looked for

# The planted fault: a log line that prints what it should not
sound = tasks.s3_client._credentials
def talkative():
    with contextlib.suppress(MissingContextError):
        get_run_logger().debug("a client for %s", os.environ["PLANTED"])
    return sound()
tasks.s3_client._credentials = talkative

def command(code, *tokens):
    try:
        main(tokens)
    except SystemExit as ended:
        assert ended.code == code, (tokens, ended.code)

source, store, out = sys.argv[1:]
keys = {name.lower(): os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
config = ["--config.epochs", "1", "--config.updates-per-epoch", "2", "--config.hidden-sizes", "16", "--config.batch-size", "16"]
contract = ["--contract", source + "/_contract.toml"]
command(0, "train", "dqn", "--source", source, "--store", store, *contract, *config, "--json")
predict = ["predict", "dqn", source, out, "--store", store, "--version", "1"]
os.environ["AWS_SECRET_ACCESS_KEY"] = "wrong"
command(1, *predict)
for name in keys:
    del os.environ[name.upper()]
Secret(value=json.dumps(keys)).save("s3-keys")
os.environ["FORECASTLE_CREDENTIALS_BLOCK"] = "s3-keys"
command(0, *predict)
"""


def spellings(secret):
    """The secret as it may stand in a text or a file: plain, and in base64 at any of its three alignments."""
    yield secret.encode()
    for ahead in range(3):
        inner = base64.b64encode(b"x" * ahead + secret.encode())
        yield inner[4:-4]


def places(secret, found):
    """Names of the texts in which the secret stands."""
    return [name for name, data in found.items() if any(spelling in data for spelling in spellings(secret))]


@pytest.fixture(scope="module")
def told(s3_server, tmp_path_factory):
    """The secret key, the planted one, and everything that runs told anybody at DEBUG: what they printed, every file of their
    home, every object of their store. A training and its publication by the AWS chain, a prediction that fails, and one with
    the keys in a block of Prefect's."""
    folder = tmp_path_factory.mktemp("told")
    write_market(folder / "source", series={"AAA": 220, "BBB": 180}, seed=3, **MARKET)
    (folder / "source" / "_contract.toml").write_text(CONTRACT)
    uri = f"s3://models/told-{os.urandom(4).hex()}"
    environment = {
        **os.environ, **s3_server, "FORECASTLE_HOME": str(folder / "home"), "PREFECT_HOME": str(folder / "home" / "prefect"),
        "PREFECT_LOGGING_LEVEL": "DEBUG",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "models,botocore,boto3,urllib3", "PLANTED": "planted-" + os.urandom(12).hex(),
    }  # fmt: skip
    command = [sys.executable, "-c", RUNS, str(folder / "source"), uri, str(folder / "out.parquet")]
    done = subprocess.run(command, env=environment, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    found = {"stdout": done.stdout, "stderr": done.stderr}
    found |= {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    found["database"] = b"".join(data for name, data in found.items() if name.startswith("home/prefect/prefect.db"))
    with pytest.MonkeyPatch.context() as change:
        change.setattr(os, "environ", {**os.environ, **s3_server})
        store = open_store(uri)
        found |= {key: store.get(key) for key in store.list("")}
    return s3_server["AWS_SECRET_ACCESS_KEY"], environment["PLANTED"], found


def test_a_secret_key_shows_up_nowhere(told):
    secret, _, found = told
    assert {"models/dqn/1/manifest.json", "models/dqn/1/report.html", "home/prefect/prefect.db"} <= set(found)
    assert b"SignatureDoesNotMatch" in found["database"], "the failed run is in it, with its message"
    assert b"s3-keys" in found["database"], "and the block, whose value is kept encrypted"
    assert b"urllib3.connectionpool" in found["database"], "libraries speak at DEBUG"
    assert places(secret, found) == []


def test_no_signed_request_is_logged(told):
    signed = re.compile(rb"AWS4-HMAC-SHA256|X-Amz-Signature|X-Amz-Credential", re.IGNORECASE)
    assert [name for name, data in told[2].items() if signed.search(data)] == []


def test_a_log_line_that_prints_a_secret_is_found_in_output_and_database(told):
    _, planted, found = told
    assert {"stderr", "database"} <= set(places(planted, found))


@pytest.mark.parametrize("ahead", ["", "a", "ab", "user:"])
def test_a_secret_in_base64_is_found_too(ahead):
    secret = base64.b64encode(os.urandom(20)).decode()
    assert places(secret, {"header": b"Basic " + base64.b64encode(f"{ahead}{secret}".encode())}) == ["header"]


@pytest.fixture
def token(monkeypatch, caplog):
    """A session token in the AWS chain, and everything logged at DEBUG."""
    secrets = {"AWS_SECRET_ACCESS_KEY": os.urandom(20).hex(), "AWS_SESSION_TOKEN": os.urandom(20).hex()}
    monkeypatch.setattr(os, "environ", {**os.environ, **secrets, "AWS_ACCESS_KEY_ID": "some", "AWS_DEFAULT_REGION": "us-east-1"})
    caplog.set_level(logging.DEBUG)
    before = logging.getLogger("botocore").level
    logging.getLogger("botocore").setLevel(logging.DEBUG)
    yield list(secrets.values())
    logging.getLogger("botocore").setLevel(before)


def refused(uri, change=lambda store: None):
    """What is raised where a store cannot be written, as it is printed: with all that led to it."""
    store = open_store(uri)
    change(store)
    with pytest.raises(StoreError) as raised:
        store.put_if_absent("x", b"x")
    return "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("endpoint", [None, "http://127.0.0.1:9", "https://127.0.0.1:9"])
def test_secrets_are_in_no_exception_and_no_log_whoever_refuses(s3_server, token, monkeypatch, caplog, at_once, endpoint):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint or s3_server["AWS_ENDPOINT_URL_S3"])
    text = refused("s3://models/x")
    assert "StoreError" in text
    assert caplog.text
    assert places(token[0], {"exception": text.encode(), "log": caplog.text.encode()}) == []
    assert places(token[1], {"exception": text.encode(), "log": caplog.text.encode()}) == []


def test_what_botocore_logs_at_debug_would_be_found(token, monkeypatch, caplog, at_once):
    """The planted fault: botocore may speak again."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    refused("s3://models/x", lambda store: logging.getLogger("botocore").setLevel(logging.DEBUG))
    assert places(token[1], {"log": caplog.text.encode()}) == ["log"]


@pytest.mark.parametrize(
    ("held", "said"), [("no json", "cannot be read"), ('{"aws_access_key_id": "x"}', "must hold"), ('{"a": 1}', "must hold")]
)
def test_a_block_that_holds_no_keys_is_named_and_what_it_holds_is_not(monkeypatch, held, said):
    monkeypatch.setenv("FORECASTLE_CREDENTIALS_BLOCK", "mine")
    monkeypatch.setattr(Secret, "load", lambda name, _sync: Secret(value=held))
    with pytest.raises(StoreError, match=f"'mine'.*{said}") as raised:
        open_store("s3://models")
    assert held not in "".join(traceback.format_exception(raised.value))


NAMES_OF_SECRETS = re.compile(r"secret|passw|token|credential|access_?key|api_?key|endpoint|block_|_block", re.IGNORECASE)


def named(annotation):
    """Names of fields, and types, that values of this annotation are made of."""
    for part in typing.get_args(annotation):
        yield from named(part)
    if isinstance(annotation, type):
        yield annotation.__name__
        if issubclass(annotation, Block):
            yield "credential block"
        if issubclass(annotation, BaseModel):
            for name, field in annotation.model_fields.items():
                yield from (name, *named(field.annotation))


def asks_for_secrets(function):
    """Parameters, and fields of configurations, of a flow that could hold a secret."""
    hints = typing.get_type_hints(function, include_extras=False)
    hints.pop("return", None)
    return [name for hint in hints for name in (hint, *named(hints[hint])) if NAMES_OF_SECRETS.search(name)]


def test_no_flow_takes_a_secret_and_no_address_is_ever_signed():
    flows = [
        found
        for path in sorted((ROOT / "flows").glob("[a-z]*.py"))
        for found in vars(importlib.import_module(f"flows.{path.stem}")).values()
        if isinstance(found, Flow)
    ]
    assert {flow.name for flow in flows} >= {"ingest", "retrain-tft", "retrain-dqn", "pipeline", "predict", "publish", "backfill"}
    assert {flow.name: found for flow in flows if (found := asks_for_secrets(flow.fn))} == {}
    for folder in ("flows", "tasks", "models", "deployments"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "presigned" not in path.read_text(), path


class Storage(BaseModel):
    session_token: str = ""


class Settings(BaseModel):
    storage: Storage | None = None


def test_planted_parameters_for_secrets_are_caught():
    def key(aws_secret_access_key: str): ...
    def block(store: Secret): ...
    def nested(config: Settings): ...

    assert all(map(asks_for_secrets, (key, block, nested)))
