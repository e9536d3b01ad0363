"""Deployments and automations against their flows, and `python -m deployments.apply` against a real server."""

import asyncio
import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
import yaml
from prefect.cli.deploy._models import PrefectYamlModel
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flows import load_flow_from_entrypoint
from prefect.server.events.ordering import EventArrivedEarly
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.server.schemas.schedules import CronSchedule
from prefect.utilities.callables import parameter_schema

import deployments.apply
from deployments.apply import FOLDER, OWNED, POOLS, apply, declared
from deployments.event_order import CausalOrdering

DEPLOYMENTS = declared("prefect.yaml")
AUTOMATIONS = declared("automations.yaml")
FLOWS = {entry["name"]: load_flow_from_entrypoint(entry["entrypoint"]) for entry in DEPLOYMENTS}
TEMPLATED = re.compile(r"\{\{.*\}\}")


def wrong_parameters(flow, parameters, complete):
    """What a run with these parameters would stumble over before it starts."""
    schema = parameter_schema(flow)
    wrong = [f"{name}: no parameter of {flow.name}" for name in parameters if name not in schema.properties]
    plain = {k: v for k, v in parameters.items() if not TEMPLATED.search(str(v)) and k in schema.properties}
    needed = set(schema.required) - set(parameters) if complete else set()
    if not wrong and not needed:
        empty = {k: [] if schema.properties[k].get("type") == "array" else "" for k in schema.required}
        try:
            flow.validate_parameters({**empty, **plain})
        except Exception as error:
            wrong.append(str(error))
    return wrong + [f"{name} is missing" for name in needed]


@pytest.mark.parametrize("entry", DEPLOYMENTS, ids=lambda e: e["name"])
def test_every_deployment_fits_its_flow(entry):
    flow = FLOWS[entry["name"]]
    assert flow.name == entry["name"], "`flow/deployment` reads like one name"
    assert not wrong_parameters(flow, entry.get("parameters", {}), complete=bool(entry.get("schedules")))
    assert entry["work_pool"]["name"] in POOLS
    assert len(entry["description"]) > 40
    slugs = [s["slug"] for s in entry.get("schedules", ())]
    assert len(slugs) == len(set(slugs))


@pytest.mark.parametrize("name", FLOWS)
def test_every_field_of_every_form_says_what_it_is_and_has_a_place(name):
    schema = deployments.apply._in_order(parameter_schema(FLOWS[name]).model_dump(mode="json", exclude_unset=True))
    for fields in (schema["properties"], *(model["properties"] for model in schema.get("definitions", {}).values())):
        described = {k: v.get("description", "") for k, v in fields.items() if "const" not in v}  # a const is no choice
        assert all(len(text) > 8 for text in described.values()), described
        assert [v["position"] for v in fields.values()] == list(range(len(fields)))


@pytest.mark.parametrize("entry", AUTOMATIONS, ids=lambda e: e["name"])
def test_every_trigger_fits_the_flow_it_starts(entry):
    for action in entry["actions"]:
        if action["type"] == "run-deployment":
            flow, _, name = action["deployment"].partition("/")
            assert FLOWS[name].name == flow
            assert not wrong_parameters(FLOWS[name], action["parameters"], complete=True)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"dataset": "{{ event.payload.dataset }}", "stroe": "s3://x"}, "stroe: no parameter"),
        ({"store": "s3://x"}, "dataset is missing"),
        ({"dataset": "x", "config": {"epochs": 0}}, "greater than or equal to 1"),
        ({"dataset": "x", "config": {"quantiles": [0.9, 0.1]}}, "quantiles must rise"),
    ],
)
def test_planted_parameter_faults_are_caught(parameters, expected):
    assert expected in " ".join(wrong_parameters(FLOWS["retrain-tft"], parameters, complete=True))


def test_files_are_what_prefect_reads():
    model = PrefectYamlModel.model_validate(yaml.safe_load((FOLDER / "prefect.yaml").read_text()))
    assert [d.name for d in model.deployments] == [e["name"] for e in DEPLOYMENTS]
    fields = set(AutomationCore.model_fields) | {"deployment", "block"}
    for entry in AUTOMATIONS:
        assert set(entry) <= fields
        assert len(entry["description"]) > 20, "the UI shows no event names: the description must say it"
    assert len({e["name"] for e in AUTOMATIONS}) == len(AUTOMATIONS)


async def runs_in(cron, zone, year):
    schedule = CronSchedule(cron=cron, timezone=zone)
    dates = await schedule.get_dates(n=400, start=datetime(year, 1, 1, tzinfo=UTC), end=datetime(year, 12, 31, tzinfo=UTC))
    return [d.astimezone(ZoneInfo(zone)) for d in dates]


@pytest.mark.parametrize(
    "schedule", [s for e in DEPLOYMENTS for s in e.get("schedules", ())], ids=lambda s: f"{s['slug']} {s['cron']}"
)
def test_every_schedule_runs_once_per_slot_across_both_clock_changes(schedule):
    runs = asyncio.run(runs_in(schedule["cron"], schedule["timezone"], 2026))
    minute, hour, _, _, days = schedule["cron"].split()
    weekdays = {(n - 1) % 7 for part in days.split(",") for n in range(int(part[0]), int(part[-1]) + 1)}
    every = (datetime(2026, 1, 1) + timedelta(days=n) for n in range(364))
    expected = [d.replace(hour=int(hour), minute=int(minute)) for d in every if d.weekday() in weekdays]
    assert [f"{r:%F %T}" for r in runs][: len(expected)] == [f"{d:%F %T}" for d in expected]
    assert len({r.utcoffset() for r in runs}) == 2, "summer and winter time"


def counted(client):
    """Names of our automations and deployments, and how often each is there."""
    automations = Counter(a.name for a in client.read_automations() if OWNED in a.tags)
    return automations, Counter(d.name for d in client.read_deployments(limit=200) if OWNED in d.tags)


EXPECTED = (
    Counter(e["name"] for e in AUTOMATIONS if not any("block" in a for a in e["actions"])),
    Counter(e["name"] for e in DEPLOYMENTS),
)


def test_apply_twice_changes_nothing(served):
    with served.client() as client:
        assert counted(client) == EXPECTED
        assert apply() == []
        assert counted(client) == EXPECTED
        assert client.read_global_concurrency_limit_by_name("gpu").limit == 1
        assert {p.name for p in client.read_work_pools()} >= set(POOLS)


def test_apply_converges_after_a_rename(served, monkeypatch):
    def renamed(file):
        return [{**e, "name": {"ingest": "nightly", "crash-silent-runs": "crash-dead"}.get(e["name"], e["name"])}
                for e in declared(file)]  # fmt: skip

    with served.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(deployments.apply, "declared", renamed)
            planned = apply(dry_run=True)
            assert counted(client) == EXPECTED, "a plan changes nothing"
            assert apply() == planned
            assert [line.split()[:4:3] for line in planned if "deployment" in line] == [["create"], ["delete"]] or len(
                planned
            ) == 4
            automations, there = counted(client)
            assert (there["nightly"], there["ingest"], automations["crash-dead"], automations["crash-silent-runs"]) == (
                1,
                0,
                1,
                0,
            )
        assert len(apply()) == 4
        assert counted(client) == EXPECTED
        assert apply() == []


def test_apply_mends_changes_made_by_hand_and_leaves_what_is_not_ours(served):
    with served.client() as client:
        ingest = client.read_deployment_by_name("ingest/ingest")
        client.update_deployment(ingest.id, DeploymentUpdate(parameters={"source": "/elsewhere"}, paused=True))
        silent = client.read_automations_by_name("crash-silent-runs")[0]
        core = silent.model_dump(include=set(AutomationCore.model_fields) - {"owner_resource"})
        client.update_automation(silent.id, AutomationCore(**{**core, "enabled": False}))
        client.create_automation(AutomationCore(**core))  # a copy under the same name
        theirs = client.create_automation(AutomationCore(**{**core, "name": "somebody's", "tags": []}))
        client.upsert_global_concurrency_limit_by_name("gpu", 3)
        try:
            assert {line.split()[0] for line in apply()} == {"delete", "update"}
            assert apply() == []
            assert counted(client) == EXPECTED
            assert client.read_deployment_by_name("ingest/ingest").parameters["source"] != "/elsewhere"
            assert [a.enabled for a in client.read_automations_by_name("crash-silent-runs")] == [True]
            assert client.read_automation(theirs).name == "somebody's"
        finally:
            client.delete_automation(theirs)


def test_bad_values_are_refused_when_the_run_is_made(served):
    bad = {"epochs": 0, "dropout": 1.0, "device": "gpu", "quantiles": [], "memory_budget": "much", "hiden_size": 8}
    with served.client() as client:
        retrain = client.read_deployment_by_name("retrain-tft/retrain-tft")
        for name, value in bad.items():
            with pytest.raises(PrefectHTTPStatusError, match="409"):
                client.create_flow_run_from_deployment(retrain.id, parameters={"dataset": "x", "config": {name: value}})
        with pytest.raises(PrefectHTTPStatusError, match="409"):
            client.create_flow_run_from_deployment(retrain.id, parameters={})


def followed(age, name):
    """An event that came `age` seconds ago and follows one that never came."""
    received = datetime.now(UTC) - timedelta(seconds=age)
    resource = {"prefect.resource.id": "prefect.flow-run.x"}
    return ReceivedEvent(
        id=uuid4(), event=name, resource=resource, occurred=received, received=received, follows=uuid4(), payload={}
    )


def test_an_event_whose_predecessor_was_lost_with_the_server_waits_for_seconds_only():
    async def let_through(event):
        async with CausalOrdering("test").preceding_event_confirmed(None, event):
            return True

    assert asyncio.run(let_through(followed(21, "late")))
    early = followed(5, "early")
    with pytest.raises(EventArrivedEarly):
        asyncio.run(let_through(early))
    assert asyncio.run(CausalOrdering("test").get_lost_followers()) == []
    CausalOrdering("test")._waitlist[early.id] -= timedelta(seconds=16)
    assert asyncio.run(CausalOrdering("test").get_lost_followers()) == [early]
