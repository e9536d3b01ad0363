"""`python -m deployments.apply`: puts prefect.yaml and automations.yaml in force on the Prefect server that
PREFECT_API_URL names. Pools, the limit `gpu`, deployments, automations and the webhook block are made, changed or removed
until the server is as the files say; run again, it finds nothing to do. Whatever a person made without our tag stays."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import yaml
from cyclopts import App
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from prefect.utilities.templating import apply_values
from pydantic import SecretStr

from tasks import forecastle_home
from tasks.artifacts import code_version
from tasks.training import GPU_LIMIT

FOLDER = Path(__file__).parent
OWNED = "forecastle"
"""Tag of the deployments and automations that are ours to change and remove."""
BLOCK = "forecastle-alerts"
POOLS = {"cpu": "Ingest, prediction, backfill: many at a time.", "gpu": "Training: a worker per GPU, one run at a time."}

app = App(name="deployments.apply", help="Put prefect.yaml and automations.yaml in force.", help_format="plaintext")


class Change(NamedTuple):
    """One thing that differs from the files, and the call that mends it."""

    action: str
    kind: str
    name: str
    detail: str
    make: Callable[[], Any]

    def __str__(self) -> str:
        return f"{self.action:7} {self.kind:18} {self.name}" + (f"  ({self.detail})" if self.detail else "")


def declared(file: str) -> list[dict[str, Any]]:
    """The entries of prefect.yaml or automations.yaml, with `{{ $NAME }}` taken from the environment."""
    os.environ.setdefault("FORECASTLE_SOURCE", str(forecastle_home() / "landing"))
    content = yaml.safe_load((FOLDER / file).read_text())
    entries: list[dict[str, Any]] = content[file.removesuffix(".yaml").replace("prefect", "deployments")]
    return entries if file == "automations.yaml" else apply_values(entries, {})


@app.default
def apply(*, dry_run: bool = False, gpus: int = 1) -> list[str]:
    """Make the server what the files say; the lines of what was (or with --dry-run: would be) changed.

    Args:
        dry_run: Only tell.
        gpus: Slots of the global limit `gpu`: GPUs that the workers of pool `gpu` have together.
    """
    lines = []
    with get_client(sync_client=True) as client:
        for change in changes(client, gpus):
            lines.append(str(change))
            print(change, file=sys.stderr)
            if not dry_run:
                change.make()
    print("nothing to change" if not lines else f"{len(lines)} change(s){', none made' * dry_run}", file=sys.stderr)
    return lines


def changes(client: SyncPrefectClient, gpus: int) -> Iterator[Change]:
    """What differs between files and server, in an order in which it can be mended."""
    yield from _pool_changes(client)
    yield from _limit_changes(client, gpus)
    yield from _deployment_changes(client)
    yield from _block_changes()
    yield from _automation_changes(client)


def _pool_changes(client: SyncPrefectClient) -> Iterator[Change]:
    for name, text in POOLS.items():
        try:
            client.read_work_pool(name)
        except ObjectNotFound:
            pool = WorkPoolCreate(name=name, type="process", description=text)
            yield Change("create", "work pool", name, "", partial(client.create_work_pool, pool))


def _limit_changes(client: SyncPrefectClient, gpus: int) -> Iterator[Change]:
    def make() -> None:
        client.upsert_global_concurrency_limit_by_name(GPU_LIMIT, gpus)

    try:
        found = client.read_global_concurrency_limit_by_name(GPU_LIMIT).limit
    except ObjectNotFound:
        yield Change("create", "concurrency limit", GPU_LIMIT, f"{gpus} slot(s)", make)
        return
    if found != gpus:
        yield Change("update", "concurrency limit", GPU_LIMIT, f"{found} -> {gpus} slot(s)", make)


def _deployment_changes(client: SyncPrefectClient) -> Iterator[Change]:
    owned = DeploymentFilter(tags=DeploymentFilterTags(all_=[OWNED]))
    flows = {flow.id: flow.name for flow in client.read_flows(limit=200)}
    there = {f"{flows[d.flow_id]}/{d.name}": d for d in client.read_deployments(deployment_filter=owned, limit=200)}
    for entry in declared("prefect.yaml"):
        flow: Any = load_flow_from_entrypoint(entry["entrypoint"])
        name = f"{flow.name}/{entry['name']}"
        wanted = _wanted_deployment(entry, flow)
        found = there.pop(name, None)
        differs = sorted(k for k, v in wanted.items() if found is None or _current(found, k) != v)
        if differs:
            yield Change(
                "create" if found is None else "update", "deployment", name, "" if found is None else ", ".join(differs),
                partial(_create_deployment, client, flow.name, wanted),
            )  # fmt: skip
    for name, found in there.items():
        yield Change("delete", "deployment", name, "", partial(client.delete_deployment, found.id))


def _wanted_deployment(entry: dict[str, Any], flow: Any) -> dict[str, Any]:
    return {
        "name": entry["name"],
        "version": code_version(),
        "entrypoint": entry["entrypoint"],
        "description": entry["description"],
        "parameters": entry.get("parameters", {}),
        "tags": [OWNED],
        "schedules": [(s["slug"], s["cron"], s["timezone"], True) for s in entry.get("schedules", ())],
        "work_pool_name": entry["work_pool"]["name"],
        "job_variables": entry["work_pool"].get("job_variables", {}),
        "parameter_openapi_schema": _in_order(parameter_schema(flow).model_dump(mode="json", exclude_unset=True)),
        "paused": False,
        "enforce_parameter_schema": True,
        "pull_steps": [],
        "path": None,
    }


def _in_order(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with a position for the fields of nested models too: PostgreSQL keeps no order, and the form would have none."""
    for model in schema.get("definitions", {}).values():
        for position, field in enumerate(model.get("properties", {}).values()):
            field["position"] = position
    return schema


def _current(found: Any, field: str) -> Any:
    if field == "schedules":
        return [(s.slug, getattr(s.schedule, "cron", ""), s.schedule.timezone, s.active) for s in found.schedules]
    return getattr(found, field) or ([] if field == "pull_steps" else getattr(found, field))


def _create_deployment(client: SyncPrefectClient, flow: str, wanted: dict[str, Any]) -> None:
    schedules = [
        DeploymentScheduleCreate(slug=slug, schedule=CronSchedule(cron=cron, timezone=zone), active=active)
        for slug, cron, zone, active in wanted["schedules"]
    ]
    client.create_deployment(client.create_flow_from_name(flow), **{**wanted, "schedules": schedules})


def _block_changes() -> Iterator[Change]:
    url = os.environ.get("FORECASTLE_WEBHOOK_URL")
    if not url:
        return
    found = _webhook()
    if found is None or found.url.get_secret_value() != url:
        block = Webhook(method="POST", url=SecretStr(url))
        # The address is a secret: it is never told
        yield Change("update" if found else "create", "block", BLOCK, "", partial(block.save, BLOCK, overwrite=True))


def _webhook() -> Webhook | None:
    try:
        return Webhook.load(BLOCK)  # type: ignore[return-value]
    except ValueError:
        return None


def _automation_changes(client: SyncPrefectClient) -> Iterator[Change]:
    mine = [a for a in client.read_automations() if OWNED in a.tags]
    webhook = bool(os.environ.get("FORECASTLE_WEBHOOK_URL")) or _webhook() is not None
    for entry in declared("automations.yaml"):
        if not webhook and any("block" in action for action in entry["actions"]):
            continue  # nobody to tell
        same = [a for a in mine if a.name == entry["name"]]
        mine = [a for a in mine if a.name != entry["name"]]
        wanted = _automation(client, entry)
        if not same:
            yield Change("create", "automation", entry["name"], "", partial(_save_automation, client, entry))
        elif wanted is None or (differs := _differences(wanted, same[0])):
            detail = "" if wanted is None else ", ".join(differs)
            yield Change(
                "update", "automation", entry["name"], detail,
                partial(_save_automation, client, entry, same[0].id),
            )  # fmt: skip
        mine += same[1:]
    for extra in mine:
        yield Change("delete", "automation", extra.name, "", partial(client.delete_automation, extra.id))


def _save_automation(client: SyncPrefectClient, entry: dict[str, Any], there: UUID | None = None) -> None:
    wanted = _resolved(client, entry)  # only now: its deployment may be as new as the automation
    if there is None:
        client.create_automation(wanted)
    else:
        client.update_automation(there, wanted)


def _differences(wanted: AutomationCore, found: AutomationCore) -> list[str]:
    a, b = (_without_ids(x.model_dump(mode="json", include=set(AutomationCore.model_fields))) for x in (wanted, found))
    return sorted(k for k in a if a[k] != b[k])


def _without_ids(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: _without_ids(v, k) for k, v in value.items() if k != "id"}
    if key in {"expect", "after", "for_each"}:  # sets: their order means nothing
        return sorted(value)
    return [_without_ids(v) for v in value] if isinstance(value, list) else value


def _automation(client: SyncPrefectClient, entry: dict[str, Any]) -> AutomationCore | None:
    """The entry as an automation; None while a deployment or block that it names is not there yet."""
    try:
        return _resolved(client, entry)
    except (ObjectNotFound, ValueError):
        return None


def _resolved(client: SyncPrefectClient, entry: dict[str, Any]) -> AutomationCore:
    actions = []
    for action in entry["actions"]:
        action = dict(action)
        if "deployment" in action:
            action["deployment_id"] = client.read_deployment_by_name(action.pop("deployment")).id
        if "block" in action:
            action["block_document_id"] = Webhook.load(action.pop("block"))._block_document_id  # type: ignore[union-attr]
        actions.append(action)
    return AutomationCore(**{**entry, "actions": actions, "tags": [OWNED]})


if __name__ == "__main__":
    app(result_action="return_none")
