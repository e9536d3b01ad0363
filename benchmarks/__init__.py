"""One script per claim that we publish; results stand in benchmarks/README.md."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version


def command_line(description: str | None, quick: str) -> argparse.ArgumentParser:
    """Of a script: --quick, which does what `quick` says, and --json."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true")
    return parser


def show(
    name: str, figures: dict[str, float], targets: dict[str, tuple[str, float]], packages: tuple[str, ...], as_json: bool
) -> None:
    """Print the figures for people, or with `as_json` the one JSON object that stays comparable from month to month."""
    holds = {"<=": lambda value, bound: value <= bound, ">=": lambda value, bound: value >= bound}
    met = all(holds[sign](figures[key], bound) for key, (sign, bound) in targets.items() if key in figures)
    rounded = {key: round(value, 4) for key, value in figures.items()}
    if as_json:
        versions = {"python": sys.version.split()[0], **{package: version(package) for package in packages}}
        print(json.dumps({"name": name, "figures": rounded, "targets": targets, "met": met, "versions": versions}))
        return
    for key, value in rounded.items():
        sign, bound = targets.get(key, ("", ""))
        print(f"{key:32} {value:<12g} {sign} {bound}")
