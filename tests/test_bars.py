"""Times of the rows: gaps against each series' own bars, with nights, weekends, sessions, holidays and clock changes."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from tasks.bars import gaps_of, interval_seconds

NEW_YORK = ZoneInfo("America/New_York")
GAP_BARS = 10


def micros(times):
    return np.array([int(t.timestamp() * 1_000_000) for t in times], np.int64)


def every(minutes, days, start=datetime(2017, 1, 2, tzinfo=UTC)):
    return [start + timedelta(minutes=minutes * i) for i in range(days * 1440 // minutes)]


def business_days():
    """Four years of days without weekends, without the holidays of the turn of the year."""
    return [t for t in every(1440, 1461) if t.weekday() < 5 and (t.month, t.day) not in {(12, 25), (12, 26), (1, 1), (7, 4)}]


def currency():
    """A year of hours from Sunday 17:00 to Friday 17:00 of New York: rests at the weekend, moves with the clock."""

    def trades(t):
        local = t.astimezone(NEW_YORK)
        hour = local.weekday() * 24 + local.hour
        return hour < 4 * 24 + 17 or hour >= 6 * 24 + 17

    return [t for t in every(60, 365) if trades(t)]


def share_sessions():
    """A year and a half of five-minute bars, 9:30 to 16:00 of New York: rests at night, moves with the clock."""

    def trades(t):
        local = t.astimezone(NEW_YORK)
        return local.weekday() < 5 and 570 <= local.hour * 60 + local.minute < 960

    return [t for t in every(5, 560) if trades(t)]


def around_the_clock():
    return every(60, 60)


def months():
    return [datetime(2000 + i // 12, i % 12 + 1, 1, tzinfo=UTC) for i in range(120)]


def one_week_of_sessions():
    return share_sessions()[: 78 * 4]


CALENDARS = (business_days, currency, share_sessions, around_the_clock, months, one_week_of_sessions)


@pytest.mark.parametrize("calendar", CALENDARS, ids=lambda c: c.__name__)
def test_rest_holidays_and_clock_changes_are_no_gaps(calendar):
    assert gaps_of(micros(calendar()), GAP_BARS)[1] == []


@pytest.mark.parametrize("calendar", CALENDARS[:4], ids=lambda c: c.__name__)
@pytest.mark.parametrize("lost", [GAP_BARS, GAP_BARS + 1, 200])
def test_bars_lost_from_a_calendar_are_a_gap_of_that_many_past_the_limit(calendar, lost):
    times = calendar()
    at = len(times) // 2 // 78 * 78 + 30  # of sessions, the middle of a day
    _, gaps = gaps_of(micros([*times[:at], *times[at + lost :]]), GAP_BARS)
    if lost <= GAP_BARS:
        assert gaps == []
    else:
        ((before, after, missing),) = gaps
        assert (before, after) == tuple(micros([times[at - 1], times[at + lost]]))
        assert missing == pytest.approx(lost, rel=0.2, abs=1)  # the hour that moves with the clock is not expected


def test_a_hole_longer_than_the_data_is_a_gap():
    times = around_the_clock()
    later = [t + timedelta(days=400) for t in times]
    _, ((before, after, missing),) = gaps_of(micros([*times, *later]), GAP_BARS)
    assert (before, after) == tuple(micros([times[-1], later[0]]))
    assert missing == 24 * (400 - 60)


def test_a_patchy_series_still_shows_its_gap():
    random = np.random.default_rng(0)
    times = [t for t in every(60, 90) if random.random() < 0.8]
    at = len(times) // 2
    _, gaps = gaps_of(micros([*times[:at], *times[at + 100 :]]), GAP_BARS)
    assert len(gaps) == 1


def test_the_usual_interval_is_told_and_intervals_are_read():
    assert [gaps_of(micros(c()), GAP_BARS)[0] for c in CALENDARS[:4]] == [86_400, 3_600, 300, 3_600]
    assert gaps_of(micros(months()[:2]), GAP_BARS) == (None, [])
    assert [interval_seconds(t) for t in ("1d", "60min", "1 h", "0.5s", "1w")] == [86_400, 3_600, 3_600, 0.5, 604_800]
    with pytest.raises(ValueError, match="fortnight"):
        interval_seconds("1 fortnight")
