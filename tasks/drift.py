"""Whether new rows are like those that the champions were trained on: a quantile profile stands beside every dataset, and two
profiles are compared by PSI and KS. Uses pyarrow and Prefect.

Static and historical features are compared: prices and targets have no level to keep, and calendar columns move by nature."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from models.features import FeatureContract, canonical_json
from models.manifest import Dataset, ModelManifest
from tasks.artifacts import read_manifest
from tasks.expectations import DataReport
from tasks.leaks import with_line
from tasks.plots import COLOURS, INK, data_uri, legend_above, svg_plot
from tasks.storage import ArtifactIntegrityError, ObjectMissing, ObjectStore

if TYPE_CHECKING:
    from tasks.staging import StagedFiles

LEVELS = np.linspace(0, 1, 101)
BINS = 10  # of the reference, by tenths; one more on each side for what it never saw
EMPTY = 1e-4  # share that stands for none
SAMPLE_ROWS = 10_000
NEW_ROWS = 200  # so many bars after the champion's last one are compared alone; fewer with all others
FALSE_ALARM = 1e-3  # chance that a source like the champion's is called drifted
SHOWN = 15
PROFILE_LIMIT = 16 * 2**20

Floats = NDArray[np.float64]


class FeatureProfile(BaseModel):
    """Quantiles of one feature at 0, 1, ..., 100 %, and how much a bar tells beyond the one before it: 1 for white noise,
    towards 0 for a slow one."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    quantiles: tuple[float, ...] = Field(min_length=101, max_length=101)
    freshness: float = Field(ge=0, le=1)


class QuantileProfile(BaseModel):
    """Features of some rows at `instants` different times, from a sample."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    rows: int = Field(ge=1)
    instants: int = Field(ge=1)
    features: dict[str, FeatureProfile]


class FeatureDrift(BaseModel):
    """One feature against the reference; `chance` is the PSI that a source of the same kind hardly ever exceeds."""

    model_config = ConfigDict(frozen=True)
    feature: str
    psi: float
    ks: float
    chance: float

    def __str__(self) -> str:
        return f"{self.feature} (PSI {self.psi:.2f}, KS {self.ks:.2f})"


class Drift(BaseModel):
    """The rows of a source against the dataset that some champions learnt from: every feature, the farthest first. `since` is set
    when only bars after that dataset's last one were compared."""

    model_config = ConfigDict(frozen=True)
    champions: tuple[str, ...]  # name and version
    rows: int
    since: str | None
    threshold: float
    features: tuple[FeatureDrift, ...]
    reference: QuantileProfile = Field(exclude=True)
    current: QuantileProfile = Field(exclude=True)

    @property
    def drifted(self) -> list[FeatureDrift]:
        """Features beyond the threshold and beyond chance."""
        return [f for f in self.features if f.psi > max(self.threshold, f.chance)]

    def lines(self) -> list[str]:
        """Every drifted feature with its numbers and whom it is far from."""
        return [f"{f} against {', '.join(self.champions)}" for f in self.drifted]


class DriftReport(BaseModel):
    """What a source was compared with, and its own profile."""

    model_config = ConfigDict(frozen=True)
    profile: QuantileProfile
    comparisons: tuple[Drift, ...]
    notes: tuple[str, ...]  # champions that could not be compared with, or that there is none

    @property
    def drifted(self) -> list[str]:
        """Names of the features that drifted from any champion's dataset."""
        return list(dict.fromkeys(f.feature for drift in self.comparisons for f in drift.drifted))


def check_drift(staged: StagedFiles, report: DataReport, store: ObjectStore) -> tuple[DataReport, DriftReport]:
    """The report with a line about drift, and the comparison with every champion of the same contract. Raises
    DataContractError, with the lines so far, when the policy is to refuse what has drifted."""
    profile = quantile_profile(staged.parts, staged.contract)
    comparisons: list[Drift] = []
    notes: list[str] = []
    by_dataset: dict[str, list[ModelManifest]] = {}
    for name in sorted({key.split("/")[1] for key in store.list("models/") if key.endswith("/champion.json")}):
        try:
            manifest = read_manifest(store, name, "champion")
        except (ObjectMissing, ArtifactIntegrityError) as error:
            notes.append(f"{name}: not compared: {error}")
            continue
        if manifest.dataset.contract.fingerprint == staged.contract.fingerprint:
            by_dataset.setdefault(manifest.dataset.fingerprint, []).append(manifest)
        else:
            notes.append(f"{name}: the champion has another contract")
    for manifests in by_dataset.values():
        names = [f"{m.model} {m.version}" for m in manifests]
        try:
            found = compare(manifests[0].dataset, store, staged.parts, profile, staged.config.drift_threshold)
            comparisons.append(found.model_copy(update={"champions": tuple(names)}))
        except ObjectMissing:
            notes.append(f"{', '.join(names)}: its dataset has no profile; ingest it again to make one")
        except ArtifactIntegrityError as error:
            notes.append(f"{', '.join(names)}: not compared: {error}")
    if not comparisons and not notes:
        notes = ["no champion to compare with"]
    lines = [line for drift in comparisons for line in drift.lines()]
    rule = "like the rows that the champion learnt from"
    report = with_line(report, staged.config.policy("drift"), rule, lines, "; ".join(notes), judged=bool(comparisons))
    return report, DriftReport(profile=profile, comparisons=tuple(comparisons), notes=tuple(notes))


def compare(
    dataset: Dataset, store: ObjectStore, parts: Sequence[str], profile: QuantileProfile | None, threshold: float
) -> Drift:
    """The rows of the parts (whose profile may be given) against those of a dataset: bars after its last one alone where there
    are enough of them. Raises ObjectMissing when the dataset has no profile, and ArtifactIntegrityError."""
    reference = stored_profile(store, dataset.fingerprint)
    since: str | None = dataset.last_timestamp
    after = int(np.datetime64(dataset.last_timestamp.removesuffix("Z"), "us").astype(np.int64))
    if _count(parts, dataset.contract, after) >= NEW_ROWS:
        current = quantile_profile(parts, dataset.contract, after)
    else:
        since, current = None, profile or quantile_profile(parts, dataset.contract)
    return Drift(
        champions=(), rows=current.rows, since=since, threshold=threshold, features=tuple(differences(reference, current)),
        reference=reference, current=current,
    )  # fmt: skip


def tell_drift(staged: StagedFiles, manifest: ModelManifest, store: ObjectStore) -> None:
    """Whether rows to predict from are like those that the version was trained on, in the run's log and as its artifact `drift`;
    no drift stops a prediction."""
    logger = get_run_logger()
    try:
        drift = compare(manifest.dataset, store, staged.parts, None, staged.config.drift_threshold)
    except (ObjectMissing, ArtifactIntegrityError) as error:
        logger.info("no comparison with the rows that %s was trained on: %s", manifest.model, error)
        return
    drift = drift.model_copy(update={"champions": (f"{manifest.model} {manifest.version}",)})
    for line in drift.lines()[:SHOWN]:
        logger.warning("drift: %s", line)
    show_drift(DriftReport(profile=drift.current, comparisons=(drift,), notes=()), "the rows to predict from")


# --- profiles ------------------------------------------------------------------------------------------------------


def quantile_profile(parts: Sequence[str], contract: FeatureContract, after: int | None = None) -> QuantileProfile:
    """The profile of all rows, or of those later than `after` (microseconds), from one pass that samples SAMPLE_ROWS of them."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    groups = contract.groups()
    names = [*groups["static"], *groups["historical"]]
    total = _count(parts, contract, after)
    random = np.random.default_rng(0)
    # By column: values of the sampled rows and of the rows before them (the same where a series begins)
    sample: list[NDArray[np.float64]] = []
    times: list[NDArray[np.int64]] = []
    codes: list[NDArray[np.int64]] = []
    moved: list[NDArray[np.bool_]] = []
    numbers: dict[str, int] = {}
    for part in parts:
        with pq.ParquetFile(part) as file:
            for batch in file.iter_batches(16_384, columns=[contract.entity, contract.timestamp, *names]):
                if any(column.null_count for column in batch.columns):
                    batch = batch.drop_null()  # rows to predict hold no history
                moments = batch[contract.timestamp].cast("int64").to_numpy()
                wanted = random.random(len(moments)) < SAMPLE_ROWS / total
                rows = np.flatnonzero(wanted & (moments > after) if after is not None else wanted)
                if not len(rows):
                    continue
                series = pc.dictionary_encode(batch[contract.entity])
                known = [numbers.setdefault(name, len(numbers)) for name in series.dictionary.to_pylist()]
                series = np.array(known)[series.indices.to_numpy()]
                earlier = np.maximum(rows - 1, 0)
                same = (rows > 0) & (series[rows] == series[earlier])
                both = np.stack([rows, np.where(same, earlier, rows)])
                sample.append(np.stack([batch[name].to_numpy()[both] for name in names]).astype(np.float64))
                times.append(moments[rows])
                codes.append(series[rows])
                moved.append(same)
    values = np.concatenate(sample, axis=2)  # [features, 2, rows]
    # Values that occur (inverted_cdf): the steps of a discrete feature stay steps
    ordered = np.sort(values[:, 0], axis=1)
    places = np.maximum(-(np.arange(len(LEVELS)) * -ordered.shape[1] // 100) - 1, 0)
    apart, of = np.concatenate(moved), np.concatenate(codes)
    features = {
        name: FeatureProfile(
            quantiles=tuple(ordered[i, places].tolist()), freshness=_freshness(values[i, 0], values[i, 1], apart, of)
        )
        for i, name in enumerate(names)
    }
    return QuantileProfile(rows=total, instants=_instants(np.concatenate(times), total), features=features)


def _instants(times: NDArray[np.int64], rows: int) -> int:
    """Different times among the rows, from those of a sample."""
    return max(1, round(len(np.unique(times)) * rows / len(times)))


def _count(parts: Sequence[str], contract: FeatureContract, after: int | None) -> int:
    """Complete rows, of all or of those later than `after`."""
    import pyarrow.parquet as pq

    count = 0
    for part in parts:
        with pq.ParquetFile(part) as file:
            for batch in file.iter_batches(65_536, columns=[contract.timestamp, contract.price]):
                moments = batch.drop_null()[contract.timestamp].cast("int64").to_numpy()
                count += len(moments) if after is None else int((moments > after).sum())
    return count


def _freshness(values: Floats, earlier: Floats, moved: NDArray[np.bool_], series: NDArray[np.int64]) -> float:
    """(1 - r) / (1 + r) of the correlation r of a bar with the one before, within series: n bars of such an AR(1) tell as much as
    that share of them would if they were independent (Bayley and Hammersley 1946)."""
    count = np.bincount(series)
    centred = values - (np.bincount(series, values) / count)[series]
    spread = float((centred**2).mean())
    if spread <= 0 or not moved.any():
        return 1.0
    news = min(1.0, float(((values - earlier)[moved] ** 2).mean()) / (2 * spread))  # 1 - r
    return news / (2 - news)


def keep_profile(store: ObjectStore, fingerprint: str, profile: QuantileProfile) -> None:
    """Put the profile beside the dataset, unless one is there: another NumPy may come to other last digits."""
    key = _place(fingerprint)
    if store.head(key) is None:
        store.put_if_absent(key, canonical_json(profile.model_dump(mode="json")).encode())


def stored_profile(store: ObjectStore, fingerprint: str) -> QuantileProfile:
    """The profile of a dataset. Raises ObjectMissing, and ArtifactIntegrityError when it is none."""
    try:
        return QuantileProfile.model_validate_json(store.get(_place(fingerprint), limit=PROFILE_LIMIT))
    except ValidationError as error:
        raise ArtifactIntegrityError(f"{_place(fingerprint)}: no profile of this project: {error}") from error


def _place(fingerprint: str) -> str:
    return f"datasets/{fingerprint}/profile.json"


# --- comparison ----------------------------------------------------------------------------------------------------


def differences(reference: QuantileProfile, current: QuantileProfile) -> list[FeatureDrift]:
    """PSI and KS of every feature of both, the farthest first.

    `chance`: under no drift PSI / (1/n + 1/m) is chi-square with one degree of freedom less than bins (Yurdakul and Naranjo
    2020, Statistical properties of the population stability index); n and m count what rows of one instant, and bars that
    resemble the one before, tell together.
    """
    found = []
    both = [name for name in reference.features if name in current.features]
    for name in both:
        a, b = reference.features[name], current.features[name]
        fresh = min(a.freshness, b.freshness)
        told = sum(1 / max(1.0, fresh * min(profile.rows, profile.instants)) for profile in (reference, current))
        psi, ks, bins = psi_and_ks(np.array(a.quantiles), np.array(b.quantiles))
        found.append(FeatureDrift(feature=name, psi=psi, ks=ks, chance=told * _chi_square(FALSE_ALARM / len(both), bins - 1)))
    return sorted(found, key=lambda f: (-f.psi, f.feature))


def psi_and_ks(reference: Floats, current: Floats) -> tuple[float, float, int]:
    """Population stability index, Kolmogorov-Smirnov distance and number of bins, from quantiles at LEVELS.

    PSI = sum over bins of (q - p) ln(q / p), p and q the shares of reference and current (Siddiqi 2006, Credit Risk Scorecards:
    above 0.25 is a major shift). Bins are tenths of the reference, and below and above all of it; an empty share counts as
    EMPTY. KS = largest distance of the two distribution functions, to the one per cent that the quantiles are apart.
    """
    edges = np.unique(reference[:: len(LEVELS) // BINS])
    shares = []
    for quantiles in (reference, current):
        below = np.concatenate([[0.0, _share(quantiles, edges[:1], "left")[0]], _share(quantiles, edges, "right"), [1.0]])
        shares.append(np.maximum(np.diff(below), EMPTY))
    p, q = shares
    points = np.concatenate([reference, current])
    apart = [np.abs(_share(reference, points, side) - _share(current, points, side)).max() for side in ("left", "right")]
    return float(((q - p) * np.log(q / p)).sum()), float(max(apart)), len(p)


def _share(quantiles: Floats, points: Floats, side: Any) -> Floats:
    """Share of values at or below (`right`) or below (`left`) each point, linear between quantiles."""
    at, last = np.searchsorted(quantiles, points, side), len(quantiles) - 1
    low, high = quantiles[np.clip(at - 1, 0, last)], quantiles[np.clip(at, 0, last)]
    between = np.where(high > low, (points - low) / np.where(high > low, high - low, 1.0), 0.0)
    return np.clip((at - 1 + np.clip(between, 0, 1)) / last, 0, 1)


def _chi_square(chance: float, degrees: int) -> float:
    """Upper limit of chi-square (Wilson and Hilferty 1931)."""
    k = max(degrees, 1)
    return k * (1 - 2 / (9 * k) + NormalDist().inv_cdf(1 - chance) * np.sqrt(2 / (9 * k))) ** 3


# --- the UI --------------------------------------------------------------------------------------------------------


def show_drift(report: DriftReport, source: str) -> None:
    """What moved most against every champion, as an artifact of the current run."""
    text = f"# Drift of {source}\n\n" + "".join(f"{note}\n\n" for note in report.notes)
    for drift in report.comparisons:
        which = f"{drift.rows} rows after {drift.since}" if drift.since else f"all {drift.rows} rows"
        verdict = f"{len(drift.drifted)} of {len(drift.features)} features drifted" if drift.drifted else "no drift"
        text += f"## {', '.join(drift.champions)}: {verdict}\n\n{which} against the dataset it learnt from\n\n"
        text += "| feature | PSI | by chance up to | KS |\n|---|---|---|---|\n"
        text += "".join(f"| {f.feature} | {f.psi:.3f} | {f.chance:.3f} | {f.ks:.3f} |\n" for f in drift.features[:SHOWN])
        for title, svg in (("Top movers", _movers(drift)), (f"Quantiles of {drift.features[0].feature}", _quantiles(drift))):
            text += f"\n![{title}]({data_uri(svg)})\n"
    create_markdown_artifact(text, key="drift", description=f"{source} against the champions' datasets")


def _movers(drift: Drift) -> str:
    top = drift.features[:SHOWN][::-1]

    def draw(axes: Any) -> None:
        colours = [COLOURS[1] if f in drift.drifted else COLOURS[0] for f in top]
        axes.barh([f.feature for f in top], [f.psi for f in top], color=colours)
        axes.axvline(drift.threshold, color=INK, linestyle=":", label=f"threshold {drift.threshold:g}")
        axes.set_xlabel("PSI")
        legend_above(axes)

    return svg_plot(draw, (7.0, 0.9 + 0.2 * len(top)))


def _quantiles(drift: Drift) -> str:
    name = drift.features[0].feature

    def draw(axes: Any) -> None:
        for profile, label, colour in ((drift.reference, "learnt from", COLOURS[0]), (drift.current, "now", COLOURS[1])):
            axes.plot(100 * LEVELS, profile.features[name].quantiles, color=colour, label=label)
        axes.set_xlabel("per cent of rows")
        axes.set_ylabel(name)
        legend_above(axes)

    return svg_plot(draw)
