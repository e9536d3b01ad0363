"""The registry: versions by number, the champion and its history, lineage, download, clearing up."""

import json
import platform
from importlib.metadata import version

import pytest
from synthetic import small_contract, write_market
from test_artifacts import publish, trained
from test_training_rules import CONFIGS, Run

from flows.__main__ import main
from models.checkpoint import Snapshot, checkpoint_bytes, save_checkpoint
from models.config import IngestConfig
from tasks.artifacts import champion_version, encode, run_key, verify
from tasks.datasets import write_dataset
from tasks.expectations import validate_features
from tasks.garbage import collect
from tasks.promotion import challenge
from tasks.registry import fetch, history, lineage, list_models, promote, rollback, show, standing, swap_champion
from tasks.runs import claim_run, newest_resume, save_resume
from tasks.staging import stage_parquet
from tasks.storage import ArtifactIntegrityError, LocalStore, ObjectMissing, StoreError, digest


def publish_seeds(store, folder, seeds):
    return [publish(store, trained(folder / str(seed), seed=seed)) for seed in seeds]


def test_versions_are_listed_by_number_and_the_champion_is_marked(store, folder):
    publish_seeds(store, folder, range(11))
    promote(store, "dqn", 9, why="the best so far")
    found = list_models(store, None)
    assert [row.version for row in found.versions] == list(range(1, 12)), "10 comes after 9"
    assert [row.version for row in found.versions if row.champion] == [9]
    assert "* dqn 9" in found.for_people()
    assert "none -> version 9 (by hand: the best so far)" in found.for_people()
    with pytest.raises(ObjectMissing, match="other"):
        list_models(store, "other")
    with pytest.raises(StoreError, match="no name"):
        list_models(store, "../dqn")


@pytest.mark.parametrize("damaged", ["2/manifest.json", "champion.json", "history/1.json"])
def test_what_is_damaged_is_listed_and_hides_nothing_else(folder, damaged):
    store = LocalStore(folder / "store")
    publish_seeds(store, folder, range(3))
    promote(store, "dqn", 1, why="first")
    path = folder / "store" / "models" / "dqn" / damaged
    path.write_bytes(path.read_bytes()[:-9])
    found = list_models(store, None)
    assert [row.version for row in found.versions] == ([1, 3] if "manifest" in damaged else [1, 2, 3])
    (told,) = found.damaged
    assert damaged in told
    assert f"! {told}" in found.for_people()


def test_each_rollback_goes_one_champion_back_and_is_recorded(store, folder):
    publish_seeds(store, folder, range(3))
    for number in (1, 2, 3):
        promote(store, "dqn", number, why="newer")
    assert rollback(store, "dqn", why="bad fills") == 2
    assert rollback(store, "dqn", why="worse still") == 1
    with pytest.raises(StoreError, match="no champion before version 1"):
        rollback(store, "dqn", why="no")
    promote(store, "dqn", 3, why="mended")
    assert rollback(store, "dqn", why="not mended") == 1
    changes = history(store, "dqn")
    assert [(c.from_version, c.to_version, c.rule) for c in changes] == [
        (None, 1, "by hand"), (1, 2, "by hand"), (2, 3, "by hand"), (3, 2, "rollback"), (2, 1, "rollback"),
        (1, 3, "by hand"), (3, 1, "rollback"),
    ]  # fmt: skip
    assert standing(changes) == [1]


def test_a_version_rolled_back_from_comes_back_by_hand_alone(store, folder):
    _, second = publish_seeds(store, folder, range(2))
    promote(store, "dqn", 1, why="first")
    assert challenge(store, second, "always").promoted
    rollback(store, "dqn", why="bad fills")
    decision = challenge(store, second, "always")
    assert (decision.promoted, champion_version(store, "dqn")) == (False, 1)
    assert "bad fills" in decision.why
    assert promote(store, "dqn", 2, why="it was the data")


def test_rollback_to_a_damaged_version_is_refused_and_changes_nothing(folder):
    store = LocalStore(folder / "store")
    publish_seeds(store, folder, range(2))
    for number in (1, 2):
        promote(store, "dqn", number, why="newer")
    (folder / "store/models/dqn/1/report.html").write_text("other")
    with pytest.raises(ArtifactIntegrityError, match=r"report\.html"):
        rollback(store, "dqn", why="bad")
    assert champion_version(store, "dqn") == 2


def test_a_change_whose_swap_came_too_late_is_no_part_of_the_history(store, folder):
    publish_seeds(store, folder, range(2))
    assert swap_champion(store, "dqn", 1, None, rule="by hand", why="quick")
    assert not swap_champion(store, "dqn", 2, None, rule="by hand", why="late")
    assert [c.why for c in history(store, "dqn")] == ["quick"]
    promote(store, "dqn", 2, why="again")
    assert [(c.sequence, c.previous) for c in history(store, "dqn")] == [(1, None), (3, 1)]
    assert "models/dqn/history/2.json" in collect(store, grace=0, apply=True).keys
    assert store.head("models/dqn/history/2.json") is None
    assert [c.why for c in history(store, "dqn")] == ["quick", "again"]


def keys(store):
    return set(store.list("")) if isinstance(store, LocalStore) else set(store.list("models/")) | set(store.list("runs/"))


def test_garbage_is_shown_first_and_only_what_nothing_names_is_deleted(store, folder):
    for manifest in publish_seeds(store, folder, range(3)):
        save_resume(store, manifest.run_key, "000001", b"state")
    promote(store, "dqn", 1, why="first")
    promote(store, "dqn", 3, why="newer")
    orphans = {"models/dqn/2/report-old.html", "models/dqn/9/dqn_epoch_1.safetensors", "datasets/abc/part-00000.parquet"}
    for key in orphans:
        store.put_if_absent(key, b"left over")
    before = keys(store)
    assert collect(store, apply=True).keys == {}, "younger than a day: nobody is disturbed"
    shown = collect(store, grace=0)
    assert keys(store) == before, "nothing is deleted without --apply"
    assert orphans <= set(shown.keys)
    assert "report-old.html  not named by the version's manifest" in shown.for_people()
    gone = set(collect(store, grace=0, apply=True).keys)
    assert gone == set(shown.keys)
    assert not any("/resume/" in key or "/files/" in key for key in keys(store))
    for number in (1, 2, 3):
        verify(store, "dqn", number)
    assert collect(store, grace=0, apply=True).keys == {}
    assert publish(store, trained(folder / "0")).version == 1, "already trained, still known"


def test_versions_are_dropped_only_when_asked_and_never_a_former_champion(store, folder):
    manifests = publish_seeds(store, folder, range(5))
    promote(store, "dqn", 1, why="first")
    promote(store, "dqn", 4, why="newer")
    collect(store, grace=0, apply=True)
    assert [row.version for row in list_models(store, "dqn").versions] == [1, 2, 3, 4, 5]
    collect(store, grace=0, keep_versions=1, apply=True)
    assert [row.version for row in list_models(store, "dqn").versions] == [1, 4, 5]
    assert rollback(store, "dqn", why="still there") == 1
    assert not [key for key in keys(store) if manifests[1].run_key in key or key.startswith("models/dqn/2/")]
    assert publish(store, trained(folder / "1", seed=1)).version == 6, "a run whose version is gone may be made again"


def test_a_run_at_work_and_a_recent_one_are_left_alone(store, folder):
    run = trained(folder / "run")
    with claim_run(store, run.run_key, "dqn", beat_seconds=0.1):
        for number in range(5):
            save_resume(store, run.run_key, f"{number:06d}", b"state %d" % number)
        store.put_if_absent(f"models/dqn/1/{run.checkpoints[0].name}", folder / "run" / run.checkpoints[0].name)
        before = keys(store)
        assert len([key for key in before if "/resume/" in key]) == 3, "older resume states went when newer ones came"
        assert collect(store, grace=30, unfinished_runs=0, apply=True).keys == {}
    assert set(collect(store, grace=0, apply=True).keys) == {f"models/dqn/1/{run.checkpoints[0].name}"}
    assert set(collect(store, grace=0, unfinished_runs=0, apply=True).keys) == {k for k in before if k.startswith("runs/")}


def test_resume_states_behind_damaged_ones_are_kept(store):
    """Three damaged states later than the good ones: neither saving nor clearing up may take those for enough."""
    for number in (7, 8, 9):
        store.put_if_absent(f"runs/k/resume/{number:06d}-{'0' * 64}.safetensors", b"cut")
    for number in range(1, 6):
        save_resume(store, "k", f"{number:06d}", checkpoint_bytes(Snapshot({}, {"n": number})))
    assert newest_resume(store, "k")[0].metadata == {"n": 5}
    collect(store, grace=0, apply=True)
    assert newest_resume(store, "k")[0].metadata == {"n": 5}
    assert len(list(store.list("runs/k/resume/"))) == 6


def test_left_overs_of_killed_writers_are_ended(store, folder):
    if isinstance(store, LocalStore):
        (folder / "store/models").mkdir(parents=True)
        (folder / "store/models/.tmp-0123").write_bytes(b"half")
    else:
        store.client.create_multipart_upload(Bucket="models", Key=f"{store.prefix}/models/half")
    assert collect(store, apply=True).unfinished_uploads == []
    assert len(collect(store, grace=0).unfinished_uploads) == 1
    assert len(collect(store, grace=0, apply=True).unfinished_uploads) == 1
    assert collect(store, grace=0).unfinished_uploads == []


@pytest.fixture
def from_source(store, folder):
    """A version with a real network, from source files by way of a stored dataset."""
    return published_from_source(store, folder)


def published_from_source(store, folder, unknown=()):
    """`unknown` are settings that did not exist when the file was written."""
    write_market(folder / "source", series={"AAA": 220, "BBB": 180}, static=3, historical=20, future=4)
    contract = small_contract()
    staged = stage_parquet(str(folder / "source"), contract, IngestConfig(), folder / "staged")
    dataset, uri = write_dataset(staged, validate_features(staged), store)
    config = CONFIGS["dqn"]
    weights = Run("dqn").weights
    weights.metadata.update(dataset=dataset.fingerprint, contract=dataset.contract.model_dump(mode="json"))
    for name in unknown:
        del weights.metadata["config"][name]
    run = trained(
        folder / "run", config=config, dataset=dataset, dataset_uri=uri, run_key=run_key(dataset, config, "dqn"),
        versions={"python": platform.python_version(), "torch": version("torch")},
    )  # fmt: skip
    final = save_checkpoint(folder / "run", "dqn", 2, True, weights)
    run = run.model_copy(update={"checkpoints": (run.checkpoints[0], final)})
    return publish(store, run)


def test_lineage_leads_from_source_files_to_weights(store, folder, from_source):
    shown = show(store, "dqn", 1)
    (record,) = shown.lineage.sources
    files = shown.lineage.sources[record]
    assert {p.rpartition("/")[2]: f.sha256 for p, f in files.items()} == {
        path.name: digest(path).sha256 for path in (folder / "source").iterdir()
    }
    assert (shown.lineage.rerun, shown.lineage.differences) == ("the same bits", [])
    text = shown.for_people()
    places = [text.index(part) for part in ("AAA.parquet", from_source.dataset.fingerprint, "hidden_sizes", "dqn_final_epoch2")]
    assert places == sorted(places)
    other = from_source.model_copy(update={"versions": {"torch": "1.0", "nowhere": "2"}, "code_version": "0.0"})
    found = lineage(other)
    assert found.rerun == "other bits"
    assert [d.split(":")[0] for d in found.differences] == ["code", "torch", "nowhere"]
    store.delete(next(key for key in store.list("datasets/") if key.endswith(".parquet")))
    assert lineage(from_source).rerun == "not possible"


def test_a_fetched_version_is_whole_and_its_network_stands(store, folder, from_source):
    assert fetch(store, "dqn", 1, folder / "here") == from_source
    for name, file in from_source.files.items():
        assert digest(folder / "here" / name) == file


def test_a_version_from_before_a_setting_existed_is_loaded(store, folder):
    older = published_from_source(store, folder, unknown=("updates_per_bar",))
    assert fetch(store, "dqn", 1, folder / "here") == older


def test_a_file_of_another_configuration_than_its_manifest_is_not_loaded(store, folder, from_source):
    """All hashes right, and yet not what the manifest says: only whoever makes manifests could do this."""
    change = {"version": 2, "config": from_source.config.model_copy(update={"seed": 3}), "run_key": "f" * 64}
    wrong = from_source.model_copy(update=change)
    for name in wrong.files:
        store.put_if_absent(f"models/dqn/2/{name}", store.get(f"models/dqn/1/{name}"))
    store.put_if_absent("models/dqn/2/manifest.json", encode(wrong))
    with pytest.raises(ArtifactIntegrityError, match="another config than"):
        fetch(store, "dqn", 2, folder / "here")


def test_commands_of_the_registry(folder, capfd):
    store = LocalStore(folder / "store")
    publish_seeds(store, folder, range(2))

    def command(*tokens):
        with pytest.raises(SystemExit) as ended:
            main(["models", *tokens, "--store", store.uri, "--json"])
        return ended.value.code, json.loads(capfd.readouterr().out)

    assert command("promote", "dqn", "1", "--why", "first") == (0, {"promoted": True})
    assert command("promote", "dqn", "2", "--why", "newer") == (0, {"promoted": True})
    assert command("rollback", "dqn", "--why", "no") == (0, {"champion": 1})
    code, found = command("list", "dqn")
    assert (code, [row["champion"] for row in found["versions"]]) == (0, [True, False])
    assert [change["rule"] for change in found["history"]["dqn"]] == ["by hand", "by hand", "rollback"]
    code, found = command("show", "dqn")
    assert (code, found["version"], found["lineage"]["rerun"]) == (0, 1, "not possible")
    assert command("verify", "dqn", "--version", "2")[0] == 0
    code, found = command("gc", "--grace-hours", "0")
    assert (code, found["deleted"]) == (0, False)
    assert command("fetch", "dqn", str(folder / "x"))[0] == 4, "its one tensor is no network"
    assert command("show", "nobody")[0] == 1
