"""The served set-up from a dropped Parquet file to a champion, and what it does when its parts are killed."""

import contextlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pytest
from prefect.blocks.webhook import Webhook
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId, LogFilter, LogFilterFlowRunId
from prefect.events import emit_event
from prefect.states import Cancelling, Completed, Failed, Paused
from served import wait_for
from synthetic import write_market

from deployments.apply import apply
from tasks.artifacts import champion_version, read_manifest, verify
from tasks.local_s3 import _started_at as started_at
from tasks.storage import ObjectMissing, StoreError

TINY = {
    "retrain-tft": {
        "context": 8, "horizon": 3, "hidden_size": 8, "num_heads": 2, "grn_layers": 1, "epochs": 2, "updates_per_epoch": 3,
        "batch_size": 4, "windows_per_start": 2, "checkpoint_every": 1, "device": "cpu",
    },
    "retrain-dqn": {
        "hidden_sizes": [16], "epochs": 2, "updates_per_epoch": 5, "batch_size": 16, "num_envs": 4, "checkpoint_every": 1,
        "device": "cpu",
    },
}  # fmt: skip


def set_defaults(client, **configs):
    """Smaller trainings: a deployment's own parameters stand where a trigger names none."""
    for name, config in configs.items():
        found = client.read_deployment_by_name(f"{name}/{name}")
        client.update_deployment(found.id, DeploymentUpdate(parameters={"config": config}))


def runs_of(client, name):
    """Runs of a deployment, oldest first."""
    found = client.read_deployment_by_name(f"{name}/{name}")
    runs = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[found.id])), limit=100
    )
    return sorted((r for r in runs if not r.auto_scheduled), key=lambda r: r.created)


def logs_of(client, run):
    """What the run logged, which reaches the server a little later than its end."""
    found = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])))
    return "\n".join(log.message for log in found)


def ended(client, name, count, seconds=240.0):
    """The runs of a deployment as soon as `count` of them have ended."""

    def found():
        runs = runs_of(client, name)
        return len(runs) >= count and all(r.state.is_final() for r in runs) and runs

    return wait_for(found, seconds, lambda: [(r.name, r.state) for r in runs_of(client, name)])


def test_a_dropped_file_is_ingested_trained_published_promoted_and_never_twice(served):
    write_market(served.home / "landing", series={"AAA": 160, "BBB": 140}, seed=7)
    with served.client() as client:
        set_defaults(client, **TINY)
        for round_, already in ((1, False), (2, True)):
            served.ended(served.run("ingest/ingest"))
            for name in TINY:
                runs = ended(client, name, round_)
                assert len(runs) == round_, "one event, one run"
                assert [r.state.name for r in runs] == ["Completed"] * round_, served.logs()
                said = "already trained as version 1" if already else "epochs"
                wait_for(
                    lambda run=runs[-1], said=said: said in logs_of(client, run), 30, lambda run=runs[-1]: logs_of(client, run)
                )
        assert client.read_global_concurrency_limit_by_name("gpu").active_slots == 0
    store = served.store()
    for model in ("tft", "dqn"):
        verify(store, model, 1)
        assert json.loads(store.get(f"models/{model}/sequence.json"))["last"] == 1
    assert champion_version(store, "tft") == 1
    assert read_manifest(store, "tft", "champion").stop_reason == "all_epochs"


LONG = {
    "retrain-dqn": {**TINY["retrain-dqn"], "epochs": 60, "updates_per_epoch": 60, "checkpoint_every": 2},
    "retrain-tft": {**TINY["retrain-tft"], "epochs": 40, "updates_per_epoch": 20, "checkpoint_every": 2},
}
for config in LONG.values():
    config["early_stopping"] = {"patience": 0}


def processes_of(run_id):
    """Pids of the flow run's process: the worker tells it its run in the environment."""
    mark = f"PREFECT__FLOW_RUN_ID={run_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if started_at(pid)]


@pytest.fixture(scope="module")
def dataset(served):
    """URI of a small dataset in the served store."""
    write_market(served.home / "drill", series={"AAA": 160, "BBB": 140}, seed=8)
    with served.client() as client:
        set_defaults(client, **TINY)
        before = len(list(served.store().list("datasets/")))
        served.ended(served.run("ingest/ingest", source=str(served.home / "drill")))
        assert before or list(served.store().list("datasets/"))
        for name in TINY:  # its trigger's runs are over before a test begins
            ended(client, name, 1)
    keys = [k for k in served.store().list("datasets/") if k.endswith("dataset.json")]
    return f"s3://models/{keys[-1]}"


@contextlib.contextmanager
def second_worker(served):
    """One more worker of the pool `gpu`, so that the limit alone keeps two trainings apart."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "gpu", "--type", "process", "--name", "second"]
    with (served.home / "serve" / "second.log").open("wb") as log:
        process = subprocess.Popen(command, env=served.environment, stdout=log, stderr=log, cwd=served.home)
    try:
        yield
    finally:  # as the supervisor stops one: Prefect's worker does not always end when asked to
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def cancel(served, client, run_id):
    """Cancel a run in training: its process is gone within 15 s and it ends as Cancelled."""
    assert processes_of(run_id)
    client.set_flow_run_state(run_id, Cancelling())
    wait_for(lambda: not processes_of(run_id), 15, served.logs)
    assert served.ended(run_id, 60).state.name == "Cancelled"


def test_one_training_per_gpu_over_both_models_and_two_workers(served, dataset):
    with served.client() as client, second_worker(served):
        endless = {**LONG["retrain-dqn"], "epochs": 4000}
        first = served.run("retrain-dqn/retrain-dqn", dataset=dataset, name="cancelled", config=endless)
        run = client.read_flow_run(first)
        wait_for(lambda: "epoch=3/" in logs_of(client, run), 120, served.logs)
        tft = served.run("retrain-tft/retrain-tft", dataset=dataset, name="waits", config=TINY["retrain-tft"])
        waiting = client.read_flow_run(tft)
        wait_for(lambda: "waiting for a GPU: 1 of 1 slots are taken" in logs_of(client, waiting), 120, served.logs)
        assert "GPU slot after" not in logs_of(client, waiting)
        assert client.read_global_concurrency_limit_by_name("gpu").active_slots == 1

        cancel(served, client, first)
        assert not [k for k in served.store().list("models/cancelled/") if k.endswith("manifest.json")]
        assert served.ended(tft, 120).state.name == "Completed", logs_of(client, waiting)
        assert client.read_global_concurrency_limit_by_name("gpu").active_slots == 0


@pytest.mark.parametrize("family", ["dqn", pytest.param("tft", marks=pytest.mark.slow)])
def test_a_training_cancelled_in_an_epoch_keeps_its_final_file_and_state_and_resumes_bit_equal(served, dataset, family):
    """Cancelled once and run again against never cancelled."""
    name, store, finals = f"retrain-{family}", served.store(), {}
    kept = lambda place: {k for k in store.list("runs/") if f"/{place}/" in k}  # noqa: E731
    with served.client() as client:
        for model in ("again", "whole"):
            values = {"dataset": dataset, "name": f"{model}-{family}", "config": LONG[name]}
            before = {place: kept(place) for place in ("interrupted", "resume")}
            run_id = served.run(f"{name}/{name}", **values)
            if model == "again":
                run = client.read_flow_run(run_id)
                wait_for(lambda run=run: "epoch=2/" in logs_of(client, run), 120, served.logs)
                cancel(served, client, run_id)
                new = {place: kept(place) - before[place] for place in before}
                assert len(new["interrupted"]) == 1
                assert f"/{family}_final_epoch" in new["interrupted"].pop()
                assert new["resume"]
                run_id = served.run(f"{name}/{name}", **values)
            assert served.ended(run_id).state.name == "Completed", served.logs()
            if model == "again":
                run = client.read_flow_run(run_id)
                wait_for(lambda run=run: f"resuming again-{family} after" in logs_of(client, run), 20)
            manifest = verify(store, f"{model}-{family}", 1)
            finals[model] = manifest.files[manifest.final]
    assert finals["again"] == finals["whole"]


@pytest.mark.slow
def test_a_healthy_training_is_touched_by_no_automation(served, dataset):
    """Longer than any of them waits, in one process that computes all the time."""
    with served.client() as client:
        endless = {**LONG["retrain-dqn"], "epochs": 100_000}
        run_id = served.run("retrain-dqn/retrain-dqn", dataset=dataset, name="healthy", config=endless)
        wait_for(lambda: "epoch=3/" in logs_of(client, client.read_flow_run(run_id)), 120, served.logs)
        time.sleep(200)
        run = client.read_flow_run(run_id)
        assert (run.state.name, run.run_count) == ("Running", 1)
        cancel(served, client, run_id)


@contextlib.contextmanager
def receiver():
    """A local web server that keeps what is posted to it; its address and what came."""
    came = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            came.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook?token=secret", came
        server.shutdown()


def test_failed_crashed_and_not_promoted_tell_the_webhook_and_nothing_else_does(served, monkeypatch):
    with served.client() as client, receiver() as (url, came):
        with monkeypatch.context() as patch:
            patch.setenv("FORECASTLE_WEBHOOK_URL", url)
            made = apply()
        told = [line.split()[2] for line in made if "tell-" in line or "block" in line]
        assert told == ["forecastle-alerts", "tell-failed-or-crashed", "tell-not-promoted"]
        assert "secret" not in " ".join(made), "the address is a secret"
        deployment = client.read_deployment_by_name("predict/predict")
        try:
            for state in (Failed(message="no champion"), Completed()):
                run = client.create_flow_run_from_deployment(deployment.id, name=state.name.lower(), state=Paused())
                client.set_flow_run_state(run.id, state, force=True)
            resource = {"prefect.resource.id": "model.tft"}
            for promoted in ("true", "false"):
                payload = {"model": "tft", "version": 7, "why": f"promoted: {promoted}"}
                emit_event("model.published", resource={**resource, "forecastle.promoted": promoted}, payload=payload)
            wait_for(lambda: len(came) >= 2, 60, lambda: f"{came} {served.logs()}")
            time.sleep(3)
            texts = sorted(message["text"] for message in came)
            assert len(texts) == 2, texts
            assert texts[0].startswith("failed: Failed. no champion http")
            assert texts[1] == "tft version 7 is published but not champion: promoted: false"
        finally:
            client.delete_block_document(Webhook.load("forecastle-alerts")._block_document_id)
            assert [line.split()[:3:2] for line in apply() if "tell-" in line] == [
                ["delete", "tell-failed-or-crashed"], ["delete", "tell-not-promoted"],
            ]  # fmt: skip


KILLED = ("flow", "worker-gpu", "server", "postgres", "s3", "flow and worker-gpu")


@contextlib.contextmanager
def reader_of_the_champion(store, model):
    """Loads and verifies the champion again and again until the block ends; how often it was whole or out of reach (the
    server is down), and whatever else became of it."""
    seen, ending = Counter(), threading.Event()

    def read():
        while not ending.wait(1):
            try:
                verify(store, model, read_manifest(store, model, "champion").version)
                seen["whole"] += 1
            except Exception as error:
                away = isinstance(error, StoreError) and not isinstance(error, ObjectMissing)
                seen["out of reach" if away else repr(error)] += 1

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield seen
    finally:
        ending.set()
        thread.join()


def trains_since(client, run):
    """When the attempt that came last had its GPU."""
    starts = [state.timestamp for state in client.read_flow_run_states(run.id) if state.is_running()]
    logs = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])), limit=200)
    return max([*starts, *(log.timestamp for log in logs if "GPU slot after" in log.message)])


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("target", "seed"),
    [("flow", 0), *(pytest.param(KILLED[n % len(KILLED)], n, marks=pytest.mark.slow) for n in range(1, 21))],
)
def test_everything_recovers_from_kill_9_within_3_minutes(served, dataset, target, seed):
    """Killed at a random moment of a run: within 3 minutes it trains again, if it ever stopped, and then completes; no slot
    is lost, one version more is published, and a reader met a whole champion every time that the store answered."""
    random, store = Random(seed), served.store()
    config = {**TINY["retrain-tft"], "epochs": 12, "checkpoint_every": 3, "seed": seed, "promotion": "always"}
    config["early_stopping"] = {"patience": 0}
    before = json.loads(store.get("models/tft/sequence.json"))["last"]
    with served.client() as client, reader_of_the_champion(store, "tft") as seen:
        run_id = served.run("retrain-tft/retrain-tft", dataset=dataset, config=config)
        if target.startswith("flow"):
            wait_for(lambda: processes_of(run_id), 60, served.logs)
        time.sleep(random.uniform(0, 15 if target.startswith("flow") else 25))
        at = client.read_flow_run(run_id).state.name
        for name in target.split(" and "):
            pids = processes_of(run_id) if name == "flow" else [served.pid(name)]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        killed = datetime.now(UTC)
        explain = lambda: f"{client.read_flow_run(run_id).state}\n{served.logs()}"  # noqa: E731

        def completed():
            with contextlib.suppress(Exception):  # the server may still be starting
                return client.read_flow_run(run_id).state.is_completed()

        wait_for(completed, 400, explain)
        seconds = max(0.0, (trains_since(client, client.read_flow_run(run_id)) - killed).total_seconds())
        assert seconds < 180, explain()
        wait_for(lambda: client.read_global_concurrency_limit_by_name("gpu").active_slots == 0, 100)
    print(f"{target} killed while {at}: training {seconds:.0f} s later (0: never stopped); the champion was {dict(seen)}")
    assert seen.pop("whole") > 0
    assert set(seen) <= {"out of reach"}
    assert read_manifest(store, "tft", "champion").version == before + 1
    verify(store, "tft", before + 1)
    published = [key for key in store.list("models/tft/") if key.endswith("/manifest.json")]
    assert json.loads(store.get("models/tft/sequence.json"))["last"] == len(published) == before + 1


def test_every_program_runs_postgresql_included_where_it_is_installed(served):
    expected = {"s3", "server", "worker-cpu", "worker-gpu"}
    if shutil.which("postgres") or list(Path("/usr/lib/postgresql").glob("*/bin/postgres")):
        expected.add("postgres")
    assert set(json.loads((served.home / "serve" / "state.json").read_text())["pids"]) == expected
    for path in ("api/health", ""):
        with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/{path}", timeout=10) as answer:
            assert answer.status == 200
