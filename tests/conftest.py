"""Fixtures shared by the tests: homes of their own, one thread, a real S3 server started once."""

import os
import tempfile

# Before any import of Prefect: tests never touch the user's or the project's own runs
os.environ["FORECASTLE_HOME"] = tempfile.mkdtemp(prefix="forecastle-tests-")
os.environ.pop("PREFECT_API_URL", None)
for name in [n for n in os.environ if n.startswith("AWS_") and n != "AWS_CA_BUNDLE"]:
    del os.environ[name]

import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

import tasks  # noqa: F401
from tasks import local_s3
from tasks.s3 import S3Store
from tasks.storage import LocalStore, open_store

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """The served set-up first: it is mostly waited for, while other processes work."""
    items.sort(key=lambda item: item.path.name != "test_serve.py")


def pytest_sessionfinish():
    shutil.rmtree(os.environ["FORECASTLE_HOME"], ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def environment_of_a_module():
    """What a module's fixtures and tests put into the environment (the command line names its own S3 server there) ends
    with it: modules pass in any order and in any process."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def environment_of_a_test(environment_of_a_module):
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """A real SeaweedFS on loopback; its environment. Failing to start is a failure, never a skip."""
    home = tmp_path_factory.mktemp("s3")
    local_s3.start(home)
    yield local_s3.environment(home)
    local_s3.stop(home)
    assert not local_s3.running(home)


@pytest.fixture(scope="module")
def prefect_server(tmp_path_factory):
    """A real Prefect server, started once for a module, in a home of its own."""
    from prefect.testing.utilities import prefect_test_harness

    os.environ["FORECASTLE_HOME"] = str(tmp_path_factory.mktemp("home"))
    os.environ.pop("FORECASTLE_STORE", None)
    with prefect_test_harness(server_startup_timeout=240):
        yield


@pytest.fixture(scope="session")
def served():
    """The served set-up (deployments/serve.py), started once, in a home of its own that PostgreSQL's user can reach."""
    from served import served_in

    with served_in(Path(tempfile.mkdtemp(prefix="forecastle-served-"))) as found:
        yield found


@pytest.fixture(params=["file", "s3"])
def store(request, tmp_path):
    """An empty store of each kind."""
    if request.param == "file":
        return LocalStore(tmp_path / "store")
    environment = request.getfixturevalue("s3_server")
    request.getfixturevalue("monkeypatch").setattr(os, "environ", {**os.environ, **environment})
    found = open_store(f"s3://models/{tmp_path.name.replace('[', '-').replace(']', '')}-{os.urandom(4).hex()}")
    assert isinstance(found, S3Store)
    return found


@pytest.fixture
def at_once(monkeypatch):
    """boto3 tries again without waiting."""
    import botocore.retries.standard

    monkeypatch.setattr(botocore.retries.standard.ExponentialBackoff, "delay_amount", lambda self, context: 0.0)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path
