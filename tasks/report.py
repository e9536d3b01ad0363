"""Plots and tables of a run: as Prefect artifacts and as report.html beside the model. Same numbers, same bytes: no
clock and no host name is in report.html, since it is hashed and published. Uses matplotlib and Prefect."""

from __future__ import annotations

import html
import re
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prefect import get_run_logger
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from models.checkpoint import write_atomically
from models.manifest import Dataset, ModelManifest
from models.progress import TrainResult
from models.tft.config import TFTConfig
from tasks.artifacts import TrainedRun
from tasks.plots import COLOURS, INK, data_uri, legend_above, plots_of, svg_plot
from tasks.promotion import Decision


def _policies(metrics: dict[str, Any]) -> Iterable[tuple[str, list[list[str]]]]:
    """The agent's measures beside those of its baselines, a table for either fill: a row a measure, the first the names."""
    for fill in ("close", "next"):
        found = metrics.get(f"test_fill_{fill}", {})
        baselines = found.get("baselines", {})
        if "flat" in baselines:
            rows = [[m.replace("_", " "), *(_number(p[m]) for p in (found, *baselines.values()))] for m in baselines["flat"]]
            yield f"Agent and baselines, filled at the {fill}", [["", "agent", *(n.replace("_", " ") for n in baselines)], *rows]


def _other_metrics(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """Every metric that does not stand in a table of its own."""
    return [(name, value) for name, value in flat_metrics(metrics) if not re.match(r"test_fill_\w+\.baselines\.", name)]


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def flat_metrics(metrics: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Metrics as name and text, nested ones with dotted names."""
    rows: list[tuple[str, str]] = []
    for name, value in metrics.items():
        if isinstance(value, dict):
            rows += flat_metrics(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
            rows += flat_metrics({str(i): row for i, row in enumerate(value, 1)}, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            rows.append((prefix + name, ", ".join(_number(v) for v in value)))
        else:
            rows.append((prefix + name, _number(value)))
    return rows


def _facts(run: TrainedRun) -> list[tuple[str, str]]:
    return [
        ("model", f"{run.model} ({run.family})"),
        ("dataset", f"{run.dataset.fingerprint[:12]}, {run.dataset.rows} rows, {len(run.dataset.series)} series"),
        ("period", f"{run.dataset.first_timestamp} to {run.dataset.last_timestamp}"),
        ("ended", f"{run.stop_reason} after {run.epochs} epochs, best epoch {run.best_epoch}, weights: {run.weights}"),
        *([("tft", f"like {t.model} version {t.version}, manifest {t.manifest_sha256}")] if (t := run.tft) else []),
        ("run key", run.run_key),
        ("seed", str(run.config.seed)),
        ("versions", ", ".join(f"{k} {v}" for k, v in run.versions.items())),
    ]


def write_report(run: TrainedRun, result: TrainResult, path: Path) -> None:
    """The run's plots and tables as one self-contained HTML file."""

    def table(rows: Sequence[tuple[str, str]]) -> str:
        cells = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in rows)
        return f"<table>{cells}</table>"

    def grid(rows: list[list[str]]) -> str:
        tags = [["th" if not (i and j) else "td" for j in range(len(row))] for i, row in enumerate(rows)]
        lines = [
            "".join(f"<{t}>{html.escape(c)}</{t}>" for t, c in zip(*pair, strict=True)) for pair in zip(tags, rows, strict=True)
        ]
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"

    plots = "".join(f"<h2>{html.escape(title)}</h2>{svg[svg.index('<svg') :]}" for title, svg in plots_of(result))
    policies = "".join(f"<h2>{title}</h2>{grid(rows)}" for title, rows in _policies(run.metrics))
    plan = f"<h2>Memory plan, MiB</h2>{table(rows)}" if (rows := _plan_rows(result)) else ""
    config = [(k, str(v)) for k, v in run.config.model_dump(mode="json").items()]
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(run.model)}</title>
<meta name="viewport" content="width=device-width"><style>
:root{{color-scheme:light dark}}body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse}}th,td{{text-align:left;padding:.15rem .8rem .15rem 0;vertical-align:top;overflow-wrap:anywhere}}
th{{font-weight:600;white-space:nowrap}}svg{{max-width:100%;height:auto}}</style>
<h1>{html.escape(run.model)}</h1>{table(_facts(run))}{plots}
{policies}<h2>Metrics</h2>{table(_other_metrics(run.metrics))}{plan}<h2>Configuration</h2>{table(config)}</html>
"""
    write_atomically(path, page.encode())


def _markdown_table(rows: Iterable[tuple[str, str]]) -> str:
    # Prefect's older UI does not wrap the lines of a cell, and the newer one writes long words over its side panel
    cells = ((k, "<br>".join(textwrap.wrap(v.replace("|", "/"), 80))) for k, v in rows)
    body = "\n".join(f"| {k} | {v} |" for k, v in cells)
    return f"| | |\n|---|---|\n{body}\n"


def show_training(run: TrainedRun, result: TrainResult, where: Sequence[tuple[str, str]]) -> None:
    """The training report as an artifact of the current run (under 300 kB: it sits in Prefect's database). `where` tells on
    what it ran, how long and at what cost (tasks/run_record.py)."""
    facts = [*_facts(run), *where, *_throughput(run, result), *_memory(run, result), *_speed(result)]
    text = f"# {run.model}\n\n{_markdown_table(facts)}\n"
    metrics = "".join(
        f"\n## {title}\n\n|{'|'.join(head)}|\n{'|---' * len(head)}|\n" + "".join(f"|{'|'.join(row)}|\n" for row in rows)
        for title, (head, *rows) in _policies(run.metrics)
    )
    metrics += f"\n## Metrics\n\n{_markdown_table(_other_metrics(run.metrics))}"
    if plan := _plan_rows(result):
        metrics += f"\n## Memory plan, MiB\n\n{_markdown_table(plan)}"
    for title, svg in plots_of(result):
        image = f"\n## {title}\n\n![{title}]({data_uri(svg)})\n"
        if len(text) + len(image) + len(metrics) < 290_000:
            text += image
    create_markdown_artifact(text + metrics, key=f"{run.family}-training-report", description=f"Training of {run.model}")


def _throughput(run: TrainedRun, result: TrainResult) -> list[tuple[str, str]]:
    """Training examples a second over all epochs, validation included."""
    seconds = sum(row.seconds for row in result.history)
    config = run.config
    each, unit = config.batch_size, "transitions"
    if isinstance(config, TFTConfig):
        each, unit = each * config.windows_per_start, "windows"
    updates = len(result.history) * config.updates_per_epoch
    return [("throughput", f"{updates * each / seconds:.0f} {unit} a second, validation included")] if seconds else []


def _memory(run: TrainedRun, result: TrainResult) -> list[tuple[str, str]]:
    """The planned peak of an update beside the measured one of the training, where the family has a plan."""
    planned = run.metrics.get("memory", {}).get("planned_mib")
    if planned is None:
        return []
    peak = result.report.get("memory_peak")
    measured = "not measured" if peak is None else f"{peak / 2**20:.0f} MiB measured (batches and validation too)"
    return [("memory", f"{planned:.0f} MiB planned for an update, {measured}")]


def _speed(result: TrainResult) -> list[tuple[str, str]]:
    """Seconds of an epoch, and of an update beside the plain loop's, where the family has measured it."""
    found = result.report.get("speed")
    if not (found and result.history):
        return []
    epoch = float(np.median([row.seconds for row in result.history]))
    each = f"{1e3 * found.ours:.2f} ms an update, {found.ratio:.2f} times as fast as the plain loop ({1e3 * found.plain:.2f} ms)"
    return [("speed", f"{epoch:.3g} s an epoch (median of {len(result.history)}); {each}")]


def _plan_rows(result: TrainResult) -> list[tuple[str, str]]:
    rows = result.report.get("memory_plan", ())
    names = ("parameters", "gradients", "adam", "kept")
    return [(str(row["layer"]), ", ".join(f"{name} {row[name]:.2f}" for name in names)) for row in rows]


def show_validation(table: list[dict[str, Any]], dataset_name: str) -> None:
    """What happened to every rule, as a table artifact of the current run."""
    create_table_artifact(table, key="validation", description=f"Validation of {dataset_name}")


def whole_source_refused(refused: Exception) -> list[dict[str, Any]]:
    """The table of a source that was refused before any rule could look at its rows."""
    found = {"policy": "refuse", "result": "FAILED", "columns": str(refused)[:2000], "rows": 0}
    return [{"rule": "whole files with the contract's columns", **found}]


class IngestLog:
    """Progress of reading and sorting a source: an artifact, and a log line every few seconds."""

    def __init__(self) -> None:
        self.artifact: Any = create_progress_artifact(0.0, key="ingest-progress", description="files read, rows in order")
        self.told = time.monotonic()

    def __call__(self, share: float, text: str) -> None:
        if time.monotonic() - self.told > 5 or share >= 1:
            self.told = time.monotonic()
            get_run_logger().info("%3.0f %% %s", 100 * share, text)
            update_progress_artifact(self.artifact, 100 * share)


def link_data_docs(uri: str, dataset_name: str) -> None:
    """Where Great Expectations' pages stand in the store, as an artifact of the current run."""
    create_link_artifact(uri, link_text=uri, key="data-docs", description=f"Data Docs of {dataset_name}")


def show_lineage(manifest: ModelManifest, dataset: Dataset, where: str, promotion: str) -> None:
    """From dataset to published files, as an artifact of the current run."""
    files = "\n".join(f"| {name} | {file.size} | `{file.sha256[:24]}` |" for name, file in sorted(manifest.files.items()))
    rows = [
        ("dataset", f"`{dataset.fingerprint}` ({dataset.rows} rows)"),
        ("kept at", manifest.dataset_uri),
        ("contract", f"`{dataset.contract.fingerprint}`"),
        ("run key", f"`{manifest.run_key}`"),
        *([("tft", f"{t.model} version {t.version}, manifest `{t.manifest_sha256}`")] if (t := manifest.tft) else []),
        ("code", manifest.code_version),
        ("published as", where),
        ("promotion", promotion),
    ]
    text = f"# {manifest.model} version {manifest.version}\n\n{_markdown_table(rows)}\n"
    create_markdown_artifact(
        f"{text}\n| file | bytes | sha256 (its start; whole in manifest.json) |\n|---|---|---|\n{files}\n",
        key=f"{manifest.family}-lineage",
        description=f"Lineage of {manifest.model} {manifest.version}",
    )


def show_comparison(manifest: ModelManifest, decision: Decision) -> None:
    """Challenger and champion on the same bars: decision, intervals and summed advantage, as an artifact of the current run."""
    rows = decision.comparisons
    head = "| measure | challenger | champion | better by | 95 % interval | values |\n" + "|---" * 6 + "|\n"
    table = "\n".join(
        f"| {r.measure} | {r.challenger:.5g} | {r.champion:.5g} | {r.difference:+.4g} | {r.low:+.4g} to {r.high:+.4g} "
        f"| {r.values}, {r.first[:10]}<br>to {r.last[:10]} |"
        for r in rows
    )

    def draw(axes: Any) -> None:
        for row, colour in zip(rows, COLOURS, strict=False):
            axes.plot(np.linspace(0, 1, len(row.curve)), row.curve, color=colour, label=row.measure)
        axes.axhline(0, color=INK, linestyle=":")
        axes.set_xlabel("share of the common bars")
        axes.set_ylabel("summed advantage")
        legend_above(axes)

    verdict = "promoted" if decision.promoted else "not promoted"
    text = f"# {manifest.model} version {manifest.version} against {decision.champion}: {verdict}\n\n{decision.why}\n\n"
    plot = f"\n\n![summed advantage]({data_uri(svg_plot(draw))})\n"
    create_markdown_artifact(text + head + table + plot, key=f"{manifest.family}-promotion", description=decision.why[:200])


HEADLINES = {
    "tft": ("validation_score", "test.pinball", "test.skill_vs_naive", "test.skill_vs_linear", "test.coverage"),
    "dqn": ("validation_score", "test_fill_close.net_return", "test_fill_next.net_return", "test_fill_close.max_drawdown",
            "test_fill_close.fraction_of_optimum", "verdict"),
}  # fmt: skip
"""Numbers of the versions' table, by family. Each version's test block is its own: compare over time, not to the last digit."""


def show_versions(newest: Sequence[ModelManifest], champion: int | None) -> None:
    """The last versions of a model beside each other, newest first, as a table artifact of the current run."""
    table = []
    for manifest in newest:
        numbers = dict(flat_metrics(manifest.metrics))
        data = manifest.dataset
        table.append(
            {
                "version": manifest.version,
                "champion": "yes" if manifest.version == champion else "",
                **{name.removeprefix("test."): numbers.get(name, "") for name in HEADLINES[manifest.family]},
                "ended": f"{manifest.stop_reason} after {manifest.epochs}",
                "dataset": f"{data.fingerprint[:8]}, {data.rows} rows to {data.last_timestamp[:10]}",
            }
        )
    create_table_artifact(table, key=f"{newest[0].family}-versions", description=f"The last versions of {newest[0].model}")
