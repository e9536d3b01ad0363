"""Backfill: which items a range makes, and a backfill that is started again."""

from datetime import date

import pytest
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.states import AwaitingRetry
from served import wait_for
from synthetic import write_market
from test_serve import runs_of

from flows.backfill import DateRange, sources_of

LEAP = ("02-28", "02-29", "03-01")
WINTER = ["/2025-11", "/2025-12", "/2026-01"]


@pytest.mark.parametrize(
    ("sources", "dates", "expected"),
    [
        (["/a", "/b", "/a"], None, ["/a", "/b"]),
        (["/a/{date}"], DateRange(first=date(2024, 2, 28), last=date(2024, 3, 1)), [f"/a/2024-{d}" for d in LEAP]),
        (["/{month}"], DateRange(first=date(2025, 11, 30), last=date(2026, 1, 1), every="month"), WINTER),
        (["/{month}"], DateRange(first=date(2026, 1, 5), last=date(2026, 1, 5)), ["/2026-01"]),
    ],
)  # fmt: skip
def test_every_day_or_month_of_a_range_is_one_item(sources, dates, expected):
    assert sources_of(sources, dates) == expected


@pytest.mark.parametrize(
    ("sources", "dates"),
    [
        (["/a"], DateRange(first=date(2026, 1, 1), last=date(2026, 1, 2))),
        (["/a/{date}"], None),
        (["/a/{date}", "/b"], DateRange(first=date(2026, 1, 1), last=date(2026, 1, 2))),
        (["/a/{date}"], DateRange(first=date(2026, 1, 2), last=date(2026, 1, 1))),
    ],
)
def test_dates_and_placeholders_that_do_not_fit_are_refused(sources, dates):
    with pytest.raises(ValueError, match="dates"):
        sources_of(sources, dates)


@pytest.mark.slow
def test_a_backfill_started_again_does_only_what_is_not_done_and_starts_no_training(served):
    folder = served.home / "history"
    write_market(folder / "2026-01", series={"AAA": 160}, seed=21)
    with served.client() as client:
        before = {name: len(runs_of(client, name)) for name in ("ingest", "retrain-tft", "retrain-dqn")}
        dates = {"first": "2026-01-01", "last": "2026-02-28", "every": "month"}
        run_id = served.run("backfill/backfill", sources=[f"{folder}/{{month}}"], dates=dates)
        failed = served.ended(run_id)
        assert failed.state.is_failed()
        assert "1 of 2 items are not done" in failed.state.message
        assert "2026-02" in failed.state.message

        write_market(folder / "2026-02", series={"AAA": 160}, seed=22)
        client.set_flow_run_state(run_id, AwaitingRetry(), force=True)

        def done():
            found = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])))[0]
            return found.state.is_completed()

        wait_for(done, 180, served.logs)
        after = {name: len(runs_of(client, name)) for name in before}
        assert after == {**before, "ingest": before["ingest"] + 3}, "January once, February twice, nothing trained"
        grids = [a for a in client.read_artifacts(limit=200) if a.key == "backfill"]
        assert max(grids, key=lambda a: a.updated).data.count('"done"') == 2
