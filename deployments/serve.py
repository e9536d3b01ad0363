"""`python -m deployments.serve` (make serve): the served set-up on one machine, without containers. PostgreSQL where its
programs are installed (SQLite otherwise), a local S3 server, the Prefect server, a worker of pool `cpu` and one of pool
`gpu` run as children; what dies is started again. Logs and pids stand in <home>/serve; SIGTERM or Ctrl-C stops it all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cyclopts import App

from models.checkpoint import write_atomically
from tasks import forecastle_home, local_s3
from tasks.local_s3 import _started_at as started_at

app = App(name="deployments.serve", help="Server, database, S3 and workers on this machine.", help_format="plaintext")
LEASES = "prefect.server.concurrency.lease_storage.filesystem"  # Prefect's default forgets every slot at a restart


def say(text: str) -> None:
    """One line for a person."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Service:
    """A program that must run. `command` None is the S3 server, which keeps its own pid and ports (tasks/local_s3.py)."""

    name: str
    command: list[str] | None
    environment: Mapping[str, str]
    user: str | None = None
    process: subprocess.Popen[bytes] | None = None
    quick_ends: int = 0
    started: float = field(default_factory=time.monotonic)

    def start(self, folder: Path) -> None:
        """Start the program with its log in `folder`."""
        self.started = time.monotonic()
        if self.command is None:
            local_s3.start(folder.parent / "s3")
            return
        as_user: dict[str, Any] = {"user": self.user, "group": self.user, "extra_groups": []} if self.user else {}
        with (folder / f"{self.name}.log").open("ab") as log:
            # A session each: Ctrl-C reaches this program alone, which then stops the others in order
            self.process = subprocess.Popen(
                self.command, env=dict(self.environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, cwd="/" if self.user else folder, **as_user,
            )  # fmt: skip

    def alive(self, folder: Path) -> bool:
        """Whether the program runs."""
        if self.command is None:
            return local_s3.running(folder.parent / "s3")
        return self.process is not None and self.process.poll() is None


def _stop(pid: int, started: str | None, number: int = signal.SIGTERM, seconds: float = 20.0) -> None:
    """End a process that we started: by signal, then by SIGKILL; a recycled pid is left alone."""
    for this, wait in ((number, seconds), (signal.SIGKILL, 10.0)):
        if started is None or started_at(pid) != started:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, this)
        end = time.monotonic() + wait
        while started_at(pid) == started and time.monotonic() < end:
            time.sleep(0.1)


def free_port() -> int:
    """A port on loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _postgres(home: Path) -> tuple[Service, str] | None:
    """PostgreSQL as a service and its connection URL, its data under `home`; None where it cannot run, and why is told."""
    folder = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: -float(p.parent.name))), None)
    programs = [shutil.which(name) or (folder and str(folder / name)) for name in ("postgres", "initdb")]
    postgres, initdb = (str(program) for program in programs if program) if all(programs) else ("", "")
    if not initdb:
        say("no PostgreSQL here: Prefect keeps its runs in SQLite")
        return None
    data, user = home / "postgres", "postgres" if os.geteuid() == 0 else None  # it refuses to run as root
    try:
        data.mkdir(parents=True, exist_ok=True)
        if user:
            shutil.chown(data, user, user)
        demote: dict[str, Any] = {"user": user, "group": user, "extra_groups": []} if user else {}
        subprocess.run(["test", "-x", str(data)], check=True, **demote)  # its user must reach the folder
        port, password = json.loads(_kept(home / "postgres.json", lambda: json.dumps([free_port(), secrets.token_urlsafe(24)])))
        if not (data / "PG_VERSION").exists():
            with tempfile.NamedTemporaryFile("w") as file:
                print(password, file=file, flush=True)
                if user:
                    shutil.chown(file.name, user)
                subprocess.run(
                    [initdb, "-D", str(data), "-U", "forecastle", "-A", "scram-sha-256", f"--pwfile={file.name}", "-E", "UTF8"],
                    text=True, check=True, capture_output=True, cwd="/", **demote,
                )  # fmt: skip
    except (OSError, LookupError, subprocess.CalledProcessError) as error:
        say(f"PostgreSQL cannot run from {data} ({getattr(error, 'stderr', None) or error}): SQLite instead")
        return None
    command = [postgres, "-D", str(data), "-h", "127.0.0.1", "-p", str(port), "-k", "", "-c", "max_connections=100"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
    return Service(
        "postgres", command, environment, user
    ), f"postgresql+asyncpg://forecastle:{password}@127.0.0.1:{port}/postgres"


def _kept(path: Path, build: Callable[[], str]) -> str:
    """The file's text, built once and readable by its owner alone."""
    if not path.exists():
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(build())
    return path.read_text()


def environment(home: Path, port: int) -> dict[str, str]:
    """What server, workers and runs of this set-up share; also for a shell: forecastle and prefect then speak to it."""
    return {
        **os.environ,
        **local_s3.environment(home / "s3"),
        "FORECASTLE_HOME": str(home),
        "FORECASTLE_SOURCE": os.environ.get("FORECASTLE_SOURCE", str(home / "landing")),
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_UI_API_URL": f"http://127.0.0.1:{port}/api",
        # A restart of server, database or S3 takes seconds: calls are tried again for longer than that
        "AWS_MAX_ATTEMPTS": "10",
        "PREFECT_CLIENT_MAX_RETRIES": "6",
        "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASES,
        "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": "deployments.event_order",
        "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P30D",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": "P365D",
    }


def services(home: Path, port: int) -> list[Service]:
    """All programs, in the order in which they start."""
    local_s3.start(home / "s3")
    shared = environment(home, port)
    database = _postgres(home)
    server = shared if database is None else {**shared, "PREFECT_SERVER_DATABASE_CONNECTION_URL": database[1]}
    prefect = [sys.executable, "-m", "prefect"]
    workers = [
        Service(f"worker-{pool}", [*prefect, "worker", "start", "--pool", pool, "--type", "process", "--name", pool,
                                   "--limit", limit], shared)
        for pool, limit in (("cpu", "2"), ("gpu", "1"))
    ]  # fmt: skip
    return [
        Service("s3", None, shared),
        *([database[0]] if database else []),
        Service("server", [*prefect, "server", "start", "--host", "127.0.0.1", "--port", str(port)], server),
        *workers,
    ]


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _record(folder: Path, port: int, running: list[Service]) -> None:
    pids = {s.name: (s.process.pid, started_at(s.process.pid)) for s in running if s.process}
    s3 = folder.parent / "s3" / "pid.json"
    if s3.exists():
        pids["s3"] = tuple(json.loads(s3.read_text()).values())
    write_atomically(folder / "state.json", json.dumps({"port": port, "pids": pids}).encode())


def _stop_left_behind(folder: Path) -> None:
    """End what an earlier supervisor started and could not stop, because it was killed itself."""
    with contextlib.suppress(OSError, ValueError):
        left = json.loads((folder / "state.json").read_text())["pids"]
        for name, (pid, started) in reversed(left.items()):
            if started_at(pid) == started and name != "s3":
                say(f"stopping {name} (pid {pid}), left behind by an earlier run")
                _stop(pid, started)


@app.default
def serve(*, port: int = 4200, gpus: int = 1) -> None:
    """Run it all until SIGTERM or Ctrl-C.

    Args:
        port: Port of the Prefect server and UI on 127.0.0.1.
        gpus: Slots of the global limit `gpu`.
    """
    home = forecastle_home()
    folder = home / "serve"
    folder.mkdir(parents=True, exist_ok=True)
    (home / "landing").mkdir(exist_ok=True)
    (home / "prefect").mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another supervisor serves {home}")
        _stop_left_behind(folder)
        stopping: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: stopping.append(number))
        every = services(home, port)
        running: list[Service] = []
        try:
            for service in every:
                service.start(folder)
                running.append(service)
                _record(folder, port, running)
                if service.name == "server":
                    _wait_and_apply(service, folder, port, gpus, stopping)
                if stopping:
                    return
            say(f"serving: http://127.0.0.1:{port}  (put Parquet into {every[0].environment['FORECASTLE_SOURCE']})")
            while not stopping:
                _start_the_dead(running, folder, port)
                time.sleep(0.5)
        finally:
            _stop_all(running, folder)
            say("stopped")


def _stop_all(running: list[Service], folder: Path) -> None:
    """Workers first and at once, so that their runs can still be recorded; then the server, its database and S3."""
    for group in ("worker", "server", "postgres"):
        mine = [s.process for s in running if s.name.startswith(group) and s.process and s.alive(folder)]
        for process in mine:
            # PostgreSQL: SIGINT ends its sessions, SIGTERM waits for them
            process.send_signal(signal.SIGINT if group == "postgres" else signal.SIGTERM)
        for process in mine:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    local_s3.stop(folder.parent / "s3")


def _wait_and_apply(server: Service, folder: Path, port: int, gpus: int, stopping: list[int]) -> None:
    end = time.monotonic() + 240
    while not _healthy(port):
        if stopping:
            return
        if not server.alive(folder):  # the database may not answer yet
            server.start(folder)
        if time.monotonic() > end:
            raise RuntimeError(f"the Prefect server does not answer; see {folder / 'server.log'}")
        time.sleep(0.5)
    subprocess.run([sys.executable, "-m", "deployments.apply", "--gpus", str(gpus)], env=dict(server.environment), check=True)


def _start_the_dead(running: list[Service], folder: Path, port: int) -> None:
    for service in running:
        lived = time.monotonic() - service.started
        if service.alive(folder):
            if lived > 30:
                service.quick_ends = 0
            continue
        if lived < min(1.0 * 2**service.quick_ends, 10.0):  # dies again and again: try slower
            continue
        service.quick_ends = min(service.quick_ends + 1, 5)
        say(f"{service.name} ended; starting it again")
        with contextlib.suppress(local_s3.LocalS3Error):
            service.start(folder)
        _record(folder, port, running)


if __name__ == "__main__":
    app()
