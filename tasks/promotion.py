"""What becomes champion by itself: the rule of a version's configuration, asked again whenever the champion changes meanwhile.
Promotion by hand and rollback stand in tasks/registry.py."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from models.checkpoint import CheckpointError
from models.comparison import Comparison, Incomparable, compare_forecasts, compare_policies, rows_from, untouched_from
from models.features import canonical_json
from models.manifest import ModelManifest
from tasks import forecastle_home
from tasks.artifacts import champion_version, load_published, read_champion, read_manifest, verify
from tasks.registry import history, swap_champion
from tasks.series import load_series
from tasks.storage import ArtifactIntegrityError, ObjectMissing, ObjectStore, StoreConflict, StoreError

INT8_LIMIT = 0.02
"""How much worse than its float weights, relative to their loss, a model with int8 weights may be and become champion."""


class Decision(BaseModel):
    """Whether a version becomes champion, why, against which one, and what that was decided on."""

    model_config = ConfigDict(frozen=True)
    promoted: bool
    why: str
    champion: int | None
    comparisons: tuple[Comparison, ...] = Field((), exclude=True)

    @property
    def evidence(self) -> list[dict[str, Any]]:
        """The numbers it was decided on, for the history."""
        return [comparison.evidence() for comparison in self.comparisons]


def decide(manifest: ModelManifest, store: ObjectStore, rule: str) -> Decision:
    """Whether a published version should become champion now."""
    current = champion_version(store, manifest.model)
    if (obstacle := _obstacle(manifest, store, rule, current)) is not None:
        return Decision(promoted=False, why=obstacle, champion=current)
    if current is None:
        return Decision(promoted=True, why="first version that qualifies", champion=None)
    if rule == "always":
        return Decision(promoted=True, why="rule is always", champion=current)
    try:
        comparisons = _compare(store, manifest, read_manifest(store, manifest.model, "champion"))
    except (Incomparable, ArtifactIntegrityError, CheckpointError, ObjectMissing) as error:
        return Decision(promoted=False, why=f"cannot be compared with champion {current}: {error}", champion=current)
    promoted, why = judge(comparisons, rule)
    why = f"against champion {current} (rule {rule}): {why}"
    return Decision(promoted=promoted, why=why, champion=current, comparisons=comparisons)


def judge(comparisons: Sequence[Comparison], rule: str) -> tuple[bool, str]:
    """By `better` every interval must lie above zero, by `not_worse` none may lie below it. Against flat an interval must lie
    above zero by either."""
    for row in comparisons:
        if row.high < 0:
            return False, f"worse in {_told(row)}"
        if row.low <= 0 and (rule == "better" or row.measure.endswith("against flat")):
            return False, f"not clearly better in {_told(row)}"
    return True, f"better in {_told(comparisons[0])}" if rule == "better" else f"not worse in {_told(comparisons[0])}"


def _told(row: Comparison) -> str:
    return f"{row.measure}: {row.difference:+.4g}, 95 % interval {row.low:+.4g} to {row.high:+.4g}"


def _compare(store: ObjectStore, challenger: ModelManifest, champion: ModelManifest) -> tuple[Comparison, ...]:
    """Both on the challenger's dataset, on the rows after what either learnt from."""
    if challenger.family != champion.family:
        raise Incomparable(f"a {challenger.family} against a {champion.family}")
    cache = forecastle_home() / "cache"
    series = load_series(challenger.dataset, challenger.dataset_uri, cache)
    seen = series
    if champion.dataset.fingerprint != challenger.dataset.fingerprint:
        seen = load_series(champion.dataset, champion.dataset_uri, cache)
    bounds = [untouched_from(series, challenger.config.split), untouched_from(seen, champion.config.split)]
    compare = {"tft": compare_forecasts, "dqn": compare_policies}[challenger.family]
    with tempfile.TemporaryDirectory(prefix="forecastle-") as folder:
        ours, theirs = (load_published(store, m, Path(folder) / str(m.version)) for m in (challenger, champion))
        return compare(ours, theirs, series, rows_from(series, bounds))


def _obstacle(manifest: ModelManifest, store: ObjectStore, rule: str, current: int | None) -> str | None:
    """What stands in the way whoever the champion is."""
    if current == manifest.version:
        return "champion already"
    if manifest.stop_reason == "non_finite_loss":
        return "the loss was not finite"
    if rule == "never":
        return "rule is never"
    if manifest.family == "dqn" and not manifest.metrics.get("beats_flat"):
        return "does not beat flat on the test block"
    if (int8 := manifest.metrics.get("quantisation")) is not None:
        if int8["delta"] is None:
            return "no validation block to compare the int8 weights on"
        if not int8["delta"] <= INT8_LIMIT:
            return f"int8 weights lose {int8['delta']:.1%} on the validation block (limit {INT8_LIMIT:.0%})"
    if current is not None and current > manifest.version:
        return f"the later version {current} is champion"
    for change in history(store, manifest.model):
        if change.rule == "rollback" and change.from_version == manifest.version:
            return f"rolled back before ({change.why}): promote it by hand"
    return None


def challenge(store: ObjectStore, manifest: ModelManifest, rule: str) -> Decision:
    """Decide, and make the version champion when it should be. When another version is quicker, the decision is made again
    against that one, so that of two promoters at once none goes back silently."""
    for _ in range(100):
        seen = read_champion(store, manifest.model)
        decision = decide(manifest, store, rule)
        if decision.champion != (seen[0].version if seen else None):
            continue
        if not decision.promoted:
            _record_refusal(store, manifest, decision, rule)
            return decision
        verify(store, manifest.model, manifest.version)
        if swap_champion(store, manifest.model, manifest.version, seen, rule=rule, why=decision.why, evidence=decision.evidence):
            return decision
    raise StoreError(f"{manifest.model}: the champion kept changing; try again")


def _record_refusal(store: ObjectStore, manifest: ModelManifest, decision: Decision, rule: str) -> None:
    """What a challenger lost on, beside the history of those that won; the first time it is told stays."""
    if not decision.comparisons:
        return
    record = {
        "version": manifest.version, "against": decision.champion, "rule": rule, "why": decision.why,
        "evidence": decision.evidence,
    }  # fmt: skip
    key = f"models/{manifest.model}/history/refused/{manifest.version}-against-{decision.champion}.json"
    with suppress(StoreConflict):
        store.put_if_absent(key, canonical_json(record).encode())
