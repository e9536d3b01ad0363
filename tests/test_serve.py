"""The served set-up from a dropped Parquet file to a champion, and what it does when its parts are killed."""

import json
import shutil
import urllib.request
from pathlib import Path

from served import wait_for
from synthetic import write_market

from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId, LogFilter, LogFilterFlowRunId  # isort: skip
from tasks.artifacts import champion_version, read_manifest, verify

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
    from prefect.client.schemas.actions import DeploymentUpdate

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


def test_every_program_runs_postgresql_included_where_it_is_installed(served):
    expected = {"s3", "server", "worker-cpu", "worker-gpu"}
    if shutil.which("postgres") or list(Path("/usr/lib/postgresql").glob("*/bin/postgres")):
        expected.add("postgres")
    assert set(json.loads((served.home / "serve" / "state.json").read_text())["pids"]) == expected
    for path in ("api/health", ""):
        with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/{path}", timeout=10) as answer:
            assert answer.status == 200
