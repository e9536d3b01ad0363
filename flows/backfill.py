"""Backfill: many sources, or one source for every day or month of a range, ingested over all workers."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any, Literal

from prefect import flow, get_run_logger
from prefect.artifacts import acreate_table_artifact
from prefect.deployments import arun_deployment
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict, Field

from models.config import IngestConfig
from tasks.run_record import stop_crash_loop


class DateRange(BaseModel):
    """Days or months, first and last included; each fills `{date}` (2026-11-30) or `{month}` (2026-11) of the sources."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    first: date = Field(description="First day.")
    last: date = Field(description="Last day.")
    every: Literal["day", "month"] = Field("day", description="One item a day or a month.")


class BackfillReport(BaseModel):
    """What became of every item: `done`, or how its run ended."""

    model_config = ConfigDict(frozen=True)
    items: dict[str, str]


def sources_of(sources: Sequence[str], dates: DateRange | None) -> list[str]:
    """Every source with every date filled in, each once. Raises ValueError when dates and placeholders do not go together."""
    dated = [s for s in sources if "{date}" in s or "{month}" in s]
    if bool(dated) != (dates is not None) or (dated and len(dated) != len(sources)):
        raise ValueError("give dates, and {date} or {month} in every source, or neither")
    if dates is None:
        return list(dict.fromkeys(sources))
    days = [dates.first + timedelta(days=n) for n in range((dates.last - dates.first).days + 1)]
    if not days:
        raise ValueError(f"dates end on {dates.last}, before they begin on {dates.first}")
    if dates.every == "month":
        days = [d for d in days if d.day == 1 or d == dates.first]
    filled = (s.format(date=d.isoformat(), month=f"{d:%Y-%m}") for s in sources for d in days)
    return list(dict.fromkeys(filled))


@flow(name="backfill", flow_run_name="backfill[{sources}]")
async def backfill(
    sources: list[str],
    dates: DateRange | None = None,
    store: str | None = None,
    contract: str | None = None,
    config: IngestConfig = IngestConfig(),
) -> BackfillReport:
    """Ingest every item by a run of the deployment `ingest`, spread over the workers of its pool.

    An item is started once per backfill run, however often that run is started again: what is done is left alone, what
    failed is tried again. The same rows are the same dataset, so another backfill of the same items stores nothing twice.

    Args:
        sources: Folders, files or globs of Parquet; `{date}` (2026-11-30) and `{month}` (2026-11) are filled in from dates.
        dates: Days or months to fill in.
        store: file:// or s3:// prefix; none takes FORECASTLE_STORE of the workers.
        contract: TOML file with the feature contract; none finds 5 static, 210 historical and 10 future columns by prefix.
        config: How to ingest.
    """
    stop_crash_loop()
    items = sources_of(sources, dates)
    states = dict.fromkeys(items, "waiting")
    shared: dict[str, Any] = {"store": store, "contract": contract, "config": config.model_dump(mode="json")}

    async def ingest_item(item: str) -> None:
        states[item] = "running"
        for attempt in range(1, flow_run.run_count + 1):  # a run made by an earlier start of this one is found again
            key = hashlib.sha256(f"{flow_run.id} {attempt} {item}".encode()).hexdigest()
            run = await arun_deployment("ingest/ingest", parameters={"source": item, **shared}, idempotency_key=key)
            states[item] = "done" if run.state and run.state.is_completed() else f"{run.state_name}: {run.name}"
            if states[item] == "done":
                break
        get_run_logger().info("%s: %s", item, states[item])
        await _show(states)

    await _show(states)
    await asyncio.gather(*(ingest_item(item) for item in items))
    left = [f"{item} ({state})" for item, state in states.items() if state != "done"]
    if left:
        raise RuntimeError(f"{len(left)} of {len(items)} items are not done; retry this run to try them again: {', '.join(left)}")
    return BackfillReport(items=states)


async def _show(states: dict[str, str]) -> None:
    """The grid of what is done, as a table artifact that is written anew after every item."""
    done = sum(state == "done" for state in states.values())
    table = [{"item": item, "state": state} for item, state in states.items()]
    await acreate_table_artifact(table, key="backfill", description=f"{done} of {len(states)} items done")
