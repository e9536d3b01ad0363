"""Prefect's order of events, with less patience: the server loads it by PREFECT_SERVER_EVENTS_CAUSAL_ORDERING.

Automations take the events of a run in their order: one that follows another waits until that one came through, 15 minutes at
most. A server that was killed has forgotten what came through and lost what was on its way: without this, a run that crashes
within minutes of it would be run again by `run-crashed-again` a quarter of an hour late."""

from __future__ import annotations

from datetime import timedelta

from prefect.server.events.ordering import memory

memory.PRECEDING_EVENT_LOOKBACK = timedelta(seconds=20)  # type: ignore[attr-defined]
CausalOrdering = memory.CausalOrdering
