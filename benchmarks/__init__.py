"""One script per claim that we publish; results stand in benchmarks/README.md."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version


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
