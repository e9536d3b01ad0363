"""The agent's report: equity, drawdown and position drawn, every measure beside the baselines', the speed in the UI alone."""

import pytest
from synthetic import series_arrays
from test_artifacts import trained as run_of
from test_dqn import trained

import tasks.report as report

PLOTS = ("Training", "Equity on the test block", "Drawdown on the test block", "Position on the test block")
MEASURES = ("net return", "sharpe", "sortino", "max drawdown", "turnover per bar", "hit rate", "trades", "fees", "exposure")


def result(fee=5e-4):
    return trained(series_arrays({"AAA": 300, "BBB": 200}), updates_per_epoch=5, hidden_sizes=(8,), fee=fee)


def html_of(result, folder):
    report.write_report(run_of(folder, metrics=result.metrics), result, folder / "report.html")
    return (folder / "report.html").read_text()


def test_report_draws_and_tabulates_and_two_trainings_give_the_same_bytes(folder):
    first = html_of(result(), folder / "a")
    assert [title for title in PLOTS if f"<h2>{title}</h2>" not in first] == []
    for fill in ("close", "next"):
        table = first.split(f"<h2>Agent and baselines, filled at the {fill}</h2>")[1].split("</table>")[0]
        assert "<th></th><th>agent</th><th>flat</th><th>buy and hold</th><th>best constant</th><th>optimum</th>" in table
        rows = {row.split("</th>")[0]: row.count("<td>") for row in table.split("<tr><th>")[2:]}
        assert {rows.get(name) for name in MEASURES} == {5}
    assert "baselines." not in first
    assert html_of(result(), folder / "b") == first, "no clock, though the two took different times"
    assert html_of(result(fee=6e-4), folder / "c") != first


def test_ui_shows_the_same_and_how_fast_it_was(folder, monkeypatch):
    shown = {}
    monkeypatch.setattr(report, "create_markdown_artifact", lambda text, **about: shown.update(text=text, **about))
    found = result()
    report.show_training(run_of(folder, metrics=found.metrics), found, [])
    text = shown["text"].replace("<br>", " ")
    assert [title for title in PLOTS if f"![{title}](data:image/svg+xml;base64," not in text] == []
    assert text.count("||agent|flat|buy and hold|best constant|optimum|\n") == 2
    speed = found.report["speed"]
    epochs = sorted(row.seconds for row in found.history)
    assert f"| speed | {epochs[1]:.3g} s an epoch (median of 3); {1e3 * speed.ours:.2f} ms an update" in text
    assert f"{speed.plain / speed.ours:.2f} times as fast as the plain loop ({1e3 * speed.plain:.2f} ms)" in text
    assert len(text) < 290_000


def test_the_speed_is_the_clock_s(monkeypatch):
    """A plain update made to take a CPU second more takes a second more."""
    import models.dqn.plain as plain

    before, sound = result().report["speed"], plain.PlainLearner.update
    ticks = [0.0]
    monkeypatch.setattr(plain.time, "process_time", lambda: ticks[0])

    def slow(self):
        ticks[0] += 1
        return sound(self)

    monkeypatch.setattr(plain.PlainLearner, "update", slow)
    assert result().report["speed"] == (0, pytest.approx(1))
    assert 0 < before.ours < before.plain * 3
