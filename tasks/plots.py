"""Plots of a run as SVG text, readable on a light and on a dark page. Same numbers, same bytes. Uses matplotlib."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from models.progress import TrainResult

# Readable on a light and on a dark page: mid-tone lines on no background of our own
INK = "#7a7f87"
COLOURS = ("#2f7ed8", "#e0731d", "#3aa655", "#b04fc4", "#c9a227")


def svg_plot(draw: Callable[[Any], None], size: tuple[float, float] = (7.0, 3.0)) -> str:
    """The SVG text of one plot; `draw` gets the matplotlib axes. The same data give the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style: Any = {
        "svg.hashsalt": "forecastle", "svg.fonttype": "none", "font.size": 10, "font.sans-serif": ["DejaVu Sans"],
        "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
        "axes.grid": True, "grid.alpha": 0.25, "path.simplify_threshold": 1.0,
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        try:
            draw(axes)
            figure.patch.set_alpha(0)
            axes.patch.set_alpha(0)
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        finally:
            pyplot.close(figure)
    return re.sub(r"\s*\n\s*", " ", out.getvalue())


def legend_above(axes: Any) -> None:
    """Above the plot, where it hides no line."""
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=5, borderpad=0)


def data_uri(svg: str) -> str:
    """The plot as an image address: the Prefect UI shows these and drops inline SVG."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _loss_curve(result: TrainResult) -> str:
    def draw(axes: Any) -> None:
        epochs = [row.epoch for row in result.history]
        axes.plot(epochs, [row.train_loss for row in result.history], color=COLOURS[0], marker=".", label="train loss")
        scored = [row for row in result.history if row.score is not None]
        if scored:
            twin = axes.twinx()
            twin.plot([r.epoch for r in scored], [r.score for r in scored], color=COLOURS[1], marker=".")
            twin.set_ylabel("validation score (higher is better)", color=COLOURS[1])
            twin.grid(False)
        if result.best_epoch:
            axes.axvline(result.best_epoch, color=INK, linestyle=":", label=f"best epoch {result.best_epoch}")
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("train loss", color=COLOURS[0])
        legend_above(axes)

    return svg_plot(draw)


def _fan_charts(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for sample in report.get("samples", ())[:4]:

        def draw(axes: Any, sample: dict[str, Any] = sample) -> None:
            quantiles = sample["quantiles"]  # [H, Q]
            steps = range(1, len(quantiles) + 1)
            low, middle, high = (
                [row[0] for row in quantiles],
                [row[len(row) // 2] for row in quantiles],
                [row[-1] for row in quantiles],
            )
            axes.fill_between(steps, low, high, color=COLOURS[0], alpha=0.25, label="outer quantiles")
            axes.plot(steps, middle, color=COLOURS[0], label="middle quantile")
            axes.plot(steps, sample["actual"], color=COLOURS[1], marker=".", label="actual")
            axes.set_xlabel("bars ahead")
            axes.xaxis.get_major_locator().set_params(integer=True)
            legend_above(axes)

        yield f"Forecast of {sample['series']} from {sample['origin']}", svg_plot(draw)


def _selection(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    found = report.get("interpretation")
    if not found:
        return
    for group, names in found.names.items():
        top = np.argsort(-found.means[group], kind="stable")[:15][::-1]

        def draw(axes: Any, group: str = group, names: Sequence[str] = names, top: Any = top) -> None:
            means, low, high = (x[top] for x in (found.means[group], found.percentiles[group][0], found.percentiles[group][2]))
            axes.barh([names[i] for i in top], means, color=COLOURS[0])
            axes.hlines(range(len(top)), low, high, color=COLOURS[1], linewidth=1.2, label="10th to 90th percentile of rows")
            axes.set_xlabel("mean selection weight")
            legend_above(axes)

        yield f"Variable selection, {group} (largest 15)", svg_plot(draw, (7.0, 0.9 + 0.2 * len(top)))


def _attention(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    found = report.get("interpretation")
    if not found:
        return
    steps, width = found.attention.shape
    # Long contexts in bins: an SVG point each would take more room than it shows
    starts = np.arange(0, width, -(-width // 300))
    sizes = np.diff(np.append(starts, width))

    def draw(axes: Any) -> None:
        for step, colour in zip(sorted({1, (1 + steps) // 2, steps}), COLOURS, strict=False):
            means = np.add.reduceat(found.attention[step - 1], starts) / sizes
            axes.plot(starts + (sizes - 1) / 2 + 1 + steps - width, means, color=colour, label=f"{step} ahead")
        axes.axvline(0.5, color=INK, linestyle=":")
        axes.set_xlabel("bar relative to the origin (0: the last known one)")
        axes.set_ylabel("mean attention")
        legend_above(axes)

    yield f"Attention, mean of {found.windows} test windows", svg_plot(draw)


def _by_step(metrics: dict[str, Any]) -> Iterable[tuple[str, str]]:
    test = metrics.get("test", {})
    if "pinball_by_step" not in test:
        return
    own = np.array(test["pinball_by_step"])
    steps = range(1, len(own) + 1)

    def skill(axes: Any) -> None:
        for (name, row), colour in zip(test["baselines"].items(), COLOURS, strict=False):
            simple = np.array(row["pinball_by_step"])
            shares = 100 * np.where(simple > 0, 1 - own / np.where(simple > 0, simple, 1), 0)
            axes.plot(steps, shares, color=colour, marker=".", label=f"less than {name}")
        axes.axhline(0, color=INK, linestyle=":")
        axes.set_xlabel("bars ahead")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("pinball saved, %")
        legend_above(axes)

    def coverage(axes: Any) -> None:
        axes.plot(steps, test["coverage_by_step"], color=COLOURS[0], marker=".", label="outer band covers")
        axes.axhline(test["coverage"], color=INK, linestyle=":", label="all steps")
        axes.set_xlabel("bars ahead")
        axes.xaxis.get_major_locator().set_params(integer=True)
        legend_above(axes)

    def calibration(axes: Any) -> None:
        promised = [float(name[1:]) / 100 for name in test["share_below"]]
        axes.plot([0, 1], [0, 1], color=INK, linestyle=":", label="as promised")
        axes.plot(promised, list(test["share_below"].values()), color=COLOURS[0], marker=".", label="found")
        axes.set_xlabel("share of actual values promised below the quantile")
        axes.set_ylabel("share found")
        legend_above(axes)

    yield "Skill by step on the test block", svg_plot(skill)
    yield "Coverage by step on the test block", svg_plot(coverage)
    yield "Calibration on the test block", svg_plot(calibration)


def _other_trainings(metrics: dict[str, Any]) -> Iterable[tuple[str, str]]:
    kinds = {"rolling": ("earlier cuts", "test_from"), "seeds": ("other seeds", "seed")}
    for kind, (title, name) in kinds.items():
        rows = [row for row in metrics.get(kind, ()) if "error" not in row]
        if not rows:
            continue

        def draw(axes: Any, rows: Any = rows, name: str = name) -> None:
            labels = ["this run", *(str(row[name])[:10] for row in rows)]
            for skill, colour in zip(("skill_vs_naive", "skill_vs_linear"), COLOURS, strict=False):
                axes.plot(labels, [100 * row[skill] for row in (metrics["test"], *rows)], color=colour, marker="o", ls="",
                          label=skill.replace("_", " "))  # fmt: skip
            axes.axhline(0, color=INK, linestyle=":")
            axes.set_ylabel("pinball saved, %")
            legend_above(axes)

        yield f"Skill of this run and of {title}", svg_plot(draw)


def _trading(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for title, unit, name in (
        ("Equity", "summed log return", "equity"), ("Drawdown", "share of wealth lost", "drawdown"),
        ("Position", "held by the agent", "positions"),
    ):  # fmt: skip
        if not (found := report.get(name)):
            continue
        series = found if isinstance(found, dict) else {"agent": found}

        def draw(axes: Any, series: dict[str, list[float]] = series, unit: str = unit, name: str = name) -> None:
            for (policy, values), colour in zip(series.items(), COLOURS, strict=False):
                at = np.linspace(0, 1, len(values))
                axes.plot(
                    at,
                    values,
                    color=colour,
                    label=policy.replace("_", " "),
                    drawstyle="steps-post" if name == "positions" else None,
                )
            axes.set_xlabel("share of the test block, series after series")
            axes.set_ylabel(unit)
            if name == "positions":
                axes.set_yticks([-1, 0, 1], ["short", "flat", "long"])
            else:
                legend_above(axes)

        yield f"{title} on the test block", svg_plot(draw)


def plots_of(result: TrainResult) -> list[tuple[str, str]]:
    curve = [("Training", _loss_curve(result))] if result.history else []
    report = result.report
    looked = [*_attention(report), *_selection(report)]
    # The artifact leaves out what no longer fits: examples last
    tested = [*_by_step(result.metrics), *_other_trainings(result.metrics)]
    return [*curve, *_trading(report), *tested, *looked, *_fan_charts(report)]
