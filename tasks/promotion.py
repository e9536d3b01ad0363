"""What becomes champion by itself: the rule of a version's configuration, asked again whenever the champion changes meanwhile.
Promotion by hand and rollback stand in tasks/registry.py."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from models.manifest import ModelManifest
from tasks.artifacts import champion_version, read_champion, verify
from tasks.registry import history, swap_champion
from tasks.storage import ObjectStore, StoreError

INT8_LIMIT = 0.02
"""How much worse than its float weights, relative to their loss, a model with int8 weights may be and become champion."""


class Decision(BaseModel):
    """Whether a version becomes champion, why, against which one, and what that was decided on."""

    model_config = ConfigDict(frozen=True)
    promoted: bool
    why: str
    champion: int | None
    evidence: list[dict[str, Any]] = []


def decide(manifest: ModelManifest, store: ObjectStore, rule: str) -> Decision:
    """Whether a published version should become champion now."""
    current = champion_version(store, manifest.model)
    if (obstacle := _obstacle(manifest, store, rule, current)) is not None:
        return Decision(promoted=False, why=obstacle, champion=current)
    if current is None:
        return Decision(promoted=True, why="first version that qualifies", champion=None)
    if rule == "always":
        return Decision(promoted=True, why="rule is always", champion=current)
    why = f"no bars after both trainings to compare it with champion {current} on (rule {rule})"
    return Decision(promoted=False, why=why, champion=current)


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
        if not decision.promoted or decision.champion != (seen[0].version if seen else None):
            if decision.promoted:
                continue
            return decision
        verify(store, manifest.model, manifest.version)
        if swap_champion(store, manifest.model, manifest.version, seen, rule=rule, why=decision.why, evidence=decision.evidence):
            return decision
    raise StoreError(f"{manifest.model}: the champion kept changing; try again")
