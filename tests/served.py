"""The served set-up as tests use it: `python -m deployments.serve` in a home of its own, and what it serves."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_RETRY_EXTRA_CODES, temporary_settings

from deployments.serve import environment, free_port
from tasks.storage import open_store

ROOT = Path(__file__).parent.parent


@dataclass
class Served:
    """A running supervisor: its home, port and process."""

    home: Path
    port: int
    process: subprocess.Popen

    @property
    def environment(self):
        """What a command needs to speak to this server and its store."""
        return environment(self.home, self.port)

    @contextlib.contextmanager
    def client(self):
        """Prefect's client for this server. What flows in this process have to tell it is told before it is left: Prefect's
        queue of events keeps its server, and a later one would miss the events of its own runs."""
        settings = {PREFECT_API_URL: f"http://127.0.0.1:{self.port}/api", PREFECT_CLIENT_RETRY_EXTRA_CODES: "500"}
        with pytest.MonkeyPatch.context() as patch, temporary_settings(settings), get_client(sync_client=True) as client:
            patch.setenv("FORECASTLE_SOURCE", str(self.home / "landing"))
            try:
                yield client
            finally:
                EventsWorker.drain_all()

    def pid(self, name):
        """Pid of a service now: it changes when the service is started again."""
        return json.loads((self.home / "serve" / "state.json").read_text())["pids"][name][0]

    def store(self):
        """The served S3 store."""
        values = self.environment
        os.environ.update({k: v for k, v in values.items() if k.startswith("AWS_")})
        return open_store(values["FORECASTLE_STORE"])

    def run(self, deployment, **parameters):
        """Start a run of a deployment; its id."""
        with self.client() as client:
            found = client.read_deployment_by_name(deployment)
            return client.create_flow_run_from_deployment(found.id, parameters=parameters).id

    def ended(self, flow_run: UUID, seconds=240.0):
        """The run, when it has ended. Raises TimeoutError with the run's last log lines."""
        with self.client() as client:
            return wait_for(
                lambda: (run := client.read_flow_run(flow_run)).state.is_final() and run, seconds, lambda: self.logs()
            )

    def logs(self):
        """Last lines of every program's log."""
        return "\n".join(f"{p.name}:\n{p.read_text(errors='replace')[-3000:]}" for p in (self.home / "serve").glob("*.log"))


def wait_for(found, seconds, explain=lambda: ""):
    """What `found` returns as soon as it is true. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.5)
    raise TimeoutError(f"not within {seconds:g} s\n{explain()}")


@contextlib.contextmanager
def served_in(home, **extra):
    """A supervisor on `home` until the block ends; `extra` is added to its environment."""
    home.chmod(0o755)
    port = free_port()
    values = {**os.environ, "FORECASTLE_HOME": str(home), "OMP_NUM_THREADS": "1", **extra}
    for name in ("PREFECT_API_URL", "FORECASTLE_STORE", "FORECASTLE_SOURCE", "PREFECT_HOME"):
        if name not in extra:
            values.pop(name, None)
    with (home / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "deployments.serve", "--port", str(port)], cwd=ROOT, env=values, stdout=log, stderr=log
        )
    try:
        text = home / "supervisor.log"
        wait_for(lambda: "serving: http" in text.read_text() or process.poll() is not None, 300, text.read_text)
        assert process.poll() is None, text.read_text()
        yield Served(home, port, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        shutil.rmtree(home, ignore_errors=True)
