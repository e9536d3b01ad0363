"""Flows against a real Prefect server, started once here, and real stores."""

import hashlib
import json
import re
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter
from synthetic import DAY, START, write_market
from test_leaks import leaking_source

import models.dqn.forecasts
import models.dqn.training
import tasks.retraining
from deployments.apply import declared
from flows.__main__ import main
from flows.ingest import ingest
from flows.pipeline import pipeline
from flows.predict import predict
from flows.publish import publish
from flows.retrain_dqn import retrain_dqn
from flows.retrain_tft import retrain_tft
from models.checkpoint import load_checkpoint
from models.config import EarlyStopping
from models.dqn.config import DQNConfig
from models.features import FeatureContract
from models.tft.config import TFTConfig
from tasks.artifacts import read_champion, read_dataset, read_manifest, run_key, verify
from tasks.registry import fetch, promote, show, versions
from tasks.storage import LocalStore, ObjectMissing, StoreError, open_store
from tasks.training import TrainingInterrupted

TFT = TFTConfig(
    context=8, horizon=3, hidden_size=8, num_heads=2, grn_layers=1, epochs=2, updates_per_epoch=3, batch_size=4,
    windows_per_start=2, checkpoint_every=1, device="cpu",
)  # fmt: skip
DQN = DQNConfig(hidden_sizes=(16,), epochs=2, updates_per_epoch=5, batch_size=16, num_envs=4, checkpoint_every=1, device="cpu")
CONTRACT = """entity = "symbol"
timestamp = "ts"
price = "close"
targets = ["close"]
static = { prefix = "s_", count = 3 }
historical = { prefix = "h_", count = 40 }
future = { prefix = "f_", count = 4 }
lookback_bars = 5
"""
MARKET = {
    "static": 3,
    "historical": 40,
    "future": 4,
    "names": {"entity": "symbol", "timestamp": "ts", "price": "close", "targets": ("close",)},
    "prefixes": {"static": "s_", "historical": "h_", "future": "f_"},
}


pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    (folder / "_contract.toml").write_text(CONTRACT)
    write_market(folder, series={"AAA": 220, "BBB": 180, "CCC": 6}, seed=3, **MARKET)
    return folder


def artifact_keys(prefix=""):
    with get_client(sync_client=True) as client:
        return [a.key for a in client.read_artifacts(artifact_filter=ArtifactFilter(), limit=200) if a.key.startswith(prefix)]


def runs_of(task_prefix):
    with get_client(sync_client=True) as client:
        return [r for r in client.read_task_runs(limit=200) if r.name.startswith(task_prefix)]


@pytest.fixture(scope="module")
def published(prefect_server, source, tmp_path_factory):
    store = (tmp_path_factory.mktemp("store")).as_uri()
    return store, pipeline(str(source), store, str(source / "_contract.toml"), TFT, DQN)


def test_pipeline_publishes_two_verified_models_from_another_contract(published):
    store, report = published
    opened = open_store(store)
    assert report.ingest.series == {"AAA": 220, "BBB": 180, "CCC": 6}
    assert report.ingest.skipped_series == ["CCC"]
    for model, outcome in (("tft", report.tft), ("dqn", report.dqn)):
        manifest = read_manifest(opened, model, outcome.version)
        names = {f"{model}_epoch_1.safetensors", f"{model}_epoch_2.safetensors", f"{model}_final_epoch2.safetensors"}
        assert set(manifest.files) == {*names, "report.html", *(["interpretation.parquet"] if model == "tft" else [])}
        for name, file in manifest.files.items():
            data = opened.get(f"models/{model}/{manifest.version}/{name}")
            assert (hashlib.sha256(data).hexdigest(), len(data)) == (file.sha256, file.size)
        verify(opened, model, manifest.version)
        assert manifest.dataset.fingerprint == report.ingest.fingerprint
        assert manifest.versions["torch"]


def test_a_published_final_checkpoint_tells_where_it_comes_from(published, tmp_path):
    store, report = published
    opened = open_store(store)
    manifest = read_manifest(opened, "dqn", report.dqn.version)
    path = tmp_path / manifest.final
    path.write_bytes(opened.get(f"models/dqn/{manifest.version}/{manifest.final}"))
    metadata = load_checkpoint(path, manifest.files[manifest.final].sha256).metadata
    assert metadata["config"] == DQN.model_dump(mode="json")
    assert metadata["contract_fingerprint"] == manifest.dataset.contract.fingerprint
    assert (metadata["dataset"], metadata["stop_reason"]) == (manifest.dataset.fingerprint, "all_epochs")
    assert metadata["weights"] in {"best", "last"}


def test_interpretation_is_published_as_parquet_with_a_row_per_variable_and_attention_cell(published):
    store, report = published
    data = open_store(store).get(f"models/tft/{report.tft.version}/interpretation.parquet")
    table = pq.read_table(pa.BufferReader(data)).to_pylist()
    assert [row["kind"] for row in table] == ["selection"] * (3 + 40 + 4) + ["attention"] * 3 * (8 + 3)
    assert {row["variable"] for row in table if row["group"] == "future"} == {f"f_{i:03d}" for i in range(4)}
    for step in (1, 2, 3):
        assert sum(row["weight"] for row in table if row["horizon_step"] == step) == pytest.approx(1)


def test_runs_show_validation_training_and_lineage_in_the_ui(published):
    keys = artifact_keys()
    for key in ("validation", "tft-training-report", "dqn-training-report", "tft-lineage", "dqn-lineage"):
        assert key in keys, keys
    with get_client(sync_client=True) as client:
        report = next(a for a in client.read_artifacts(limit=200) if a.key == "tft-training-report")
    assert "data:image/svg+xml;base64," in report.data
    assert re.search(r"\d+ MiB planned for an update, \d+ MiB measured", report.data)
    assert re.search(r"\| throughput \| \d+ windows a second", report.data)
    assert "| historical selection | parameters" in report.data
    assert len(report.data) < 300_000


def test_one_dataset_and_config_train_once(published, source):
    store, report = published
    before = len(runs_of("train-"))
    again = pipeline(str(source), store, str(source / "_contract.toml"), TFT, DQN)
    assert (again.tft.already_trained, again.dqn.already_trained) == (True, True)
    assert (again.tft.version, again.dqn.version) == (report.tft.version, report.dqn.version)
    assert again.tft.files == report.tft.files
    assert len(runs_of("train-")) == before
    assert again.ingest.fingerprint == report.ingest.fingerprint


def test_again_trains_a_new_version_with_the_same_weights(published):
    store, report = published
    second = retrain_dqn(report.ingest.dataset, store, "dqn", DQN, again=True)
    assert second.version == report.dqn.version + 1
    assert not second.already_trained
    old = read_manifest(open_store(store), "dqn", report.dqn.version)
    final = open_store(store).get(f"models/dqn/{second.version}/{old.final}")
    first = open_store(store).get(f"models/dqn/{report.dqn.version}/{old.final}")
    assert final == first, "the same data, config, seed and device give the same bytes"


def test_a_publication_that_breaks_off_is_made_by_prefects_retry_or_by_hand_and_there_is_one_version(published, monkeypatch):
    store, report = published
    opened, sound, lost = open_store(store), LocalStore.put_if_absent, []

    def breaks_off(self, key, *data):
        done = sound(self, key, *data)
        if (key == "models/retried/1/manifest.json" and not lost) or key.startswith("models/later/"):
            lost.append(key)
            raise StoreError("the answer is lost")
        return done

    monkeypatch.setattr(LocalStore, "put_if_absent", breaks_off)
    outcome = retrain_dqn(report.ingest.dataset, store, "retried", DQN)
    assert (outcome.version, lost) == (1, ["models/retried/1/manifest.json"])
    assert versions(opened, "retried") == [1]
    monkeypatch.setattr(tasks.retraining.publish, "retries", 0)
    with pytest.raises(StoreError, match="lost"):
        retrain_dqn(report.ingest.dataset, store, "later", DQN)
    assert versions(opened, "later") == []
    monkeypatch.setattr(LocalStore, "put_if_absent", sound)
    key = run_key(read_dataset(report.ingest.dataset), DQN, "later")
    assert (publish(key[:8], store).version, versions(opened, "later")) == (1, [1])
    assert publish(key, store).already_trained
    for model in ("retried", "later"):
        assert len(runs_of(f"train-dqn[{model}]")) == 1
        verify(opened, model, 1)


def test_a_challenger_is_held_against_the_champion_and_the_run_shows_it(published):
    store, report = published
    outcome = retrain_tft(report.ingest.dataset, store, "tft", TFT.model_copy(update={"seed": 1, "promotion": "not_worse"}))
    assert re.search(r"against champion 1 \(rule not_worse\): .*95 % interval", outcome.promotion)
    with get_client(sync_client=True) as client:
        shown = next(a for a in client.read_artifacts(limit=200) if a.key == "tft-promotion")
    assert "total pinball loss per window" in shown.data
    assert "data:image/svg+xml;base64," in shown.data


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"epochs": 7, "checkpoint_every": 5}, {"dqn_epoch_5.safetensors", "dqn_final_epoch7.safetensors"}),
        ({"epochs": 5, "checkpoint_every": 5}, {"dqn_epoch_5.safetensors", "dqn_final_epoch5.safetensors"}),
        ({"epochs": 3, "keep_checkpoints": 1}, {"dqn_epoch_3.safetensors", "dqn_final_epoch3.safetensors"}),
        ({"epochs": 4, "keep_checkpoints": 0}, {"dqn_final_epoch4.safetensors"}),
    ],
)
def test_exactly_the_named_checkpoints_are_published(published, change, expected):
    store, report = published
    config = DQN.model_copy(update={**change, "early_stopping": EarlyStopping(patience=0)})
    outcome = retrain_dqn(report.ingest.dataset, store, "named", config)
    assert {n for n in outcome.files if n.endswith(".safetensors")} == expected


def test_non_finite_loss_is_published_but_never_promoted(published, monkeypatch):
    import torch

    import models.dqn.learner

    store, report = published
    monkeypatch.setattr(models.dqn.learner, "huber", lambda values, _: (torch.tensor(float("nan")), torch.zeros_like(values)))
    config = DQN.model_copy(update={"seed": 5, "promotion": "always"})
    outcome = retrain_dqn(report.ingest.dataset, store, "broken", config)
    assert (outcome.stop_reason, outcome.epochs, outcome.promoted) == ("non_finite_loss", 0, False)
    assert {n for n in outcome.files if n.endswith(".safetensors")} == {"dqn_final_epoch0.safetensors"}
    verify(open_store(store), "broken", outcome.version)


def test_predict_dates_forecasts_after_the_last_bar_of_a_source_with_rows_ahead(published, tmp_path):
    store, report = published
    write_market(tmp_path / "new", series={"AAA": 40, "NEWX": 30}, future_rows=3, **MARKET)
    found = predict("tft", str(tmp_path / "new"), str(tmp_path / "out.parquet"), store, version=report.tft.version)
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert found.rows == len(table) == 6
    for name, rows in (("AAA", 40), ("NEWX", 30)):
        mine = [r for r in table if r["series"] == name]
        last = datetime.fromtimestamp((START + (rows - 1) * DAY) / 1e6, UTC)
        assert {r["origin"] for r in mine} == {last}
        assert [r["timestamp"] for r in mine] == [last + timedelta(days=k) for k in (1, 2, 3)]
        assert all(r["p10"] <= r["p50"] <= r["p90"] for r in mine)
        assert {r["version"] for r in mine} == {report.tft.version}


def test_an_agent_that_reads_the_champion_tft_names_it_and_another_champion_is_another_run(published, tmp_path, monkeypatch):
    store, report = published
    opened, config = open_store(store), DQN.model_copy(update={"tft_folds": 2})
    with pytest.raises(ObjectMissing, match="needs a champion of nobody"):
        retrain_dqn(report.ingest.dataset, store, "fed", config.model_copy(update={"tft_model": "nobody"}))
    champion = read_champion(opened, "tft")[0]
    calls, sound = [], models.dqn.forecasts._trained
    monkeypatch.setattr(models.dqn.forecasts, "_trained", lambda *a: calls.append(a[2]) or sound(*a))
    monkeypatch.setattr(models.dqn.training, "train", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        retrain_dqn(report.ingest.dataset, store, "fed", config)
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr("tasks.training.walk_forward", lambda *a, **k: None)  # asked to stop
        with pytest.raises(TrainingInterrupted, match="while its TFTs were trained"):
            retrain_dqn(report.ingest.dataset, store, "fed", config)
    assert versions(opened, "fed") == []
    monkeypatch.setattr(models.dqn.forecasts, "_trained", None)  # both folds are kept: none is trained again
    first = retrain_dqn(report.ingest.dataset, store, "fed", config)
    monkeypatch.undo()
    assert calls == [1, 2]
    manifest = verify(opened, "fed", first.version)
    assert (manifest.tft.model, manifest.tft.version) == ("tft", champion.version)
    data = opened.get(f"models/tft/{champion.version}/manifest.json")
    assert manifest.tft.manifest_sha256 == hashlib.sha256(data).hexdigest()
    assert (
        f"tft version {champion.version}  manifest sha256 {manifest.tft.manifest_sha256}" in show(opened, "fed", 1).for_people()
    )
    with get_client(sync_client=True) as client:
        shown = [a.data for a in client.read_artifacts(limit=200) if a.key == "dqn-lineage"]
    assert any(manifest.tft.manifest_sha256 in text for text in shown)
    assert retrain_dqn(report.ingest.dataset, store, "fed", config).already_trained
    write_market(tmp_path / "new", series={"AAA": 240, "NEWX": 300}, future_rows=3, **MARKET)
    predict("fed", str(tmp_path / "new"), str(tmp_path / "out.parquet"), store, version=first.version)
    rows = {(r["series"], r["timestamp"]) for r in pq.read_table(tmp_path / "out.parquet").to_pylist()}
    assert rows == {(n, datetime.fromtimestamp((START + (k - 1) * DAY) / 1e6, UTC)) for n, k in (("AAA", 240), ("NEWX", 300))}
    fetch(opened, "fed", first.version, tmp_path / "fetched")
    other = retrain_tft(report.ingest.dataset, store, "tft", TFT.model_copy(update={"seed": 9, "promotion": "never"}))
    promote(opened, "tft", other.version, why="a test")
    second = retrain_dqn(report.ingest.dataset, store, "fed", config)
    promote(opened, "tft", champion.version, why="as before")
    assert (second.run_key != first.run_key, second.already_trained, second.version) == (True, False, first.version + 1)
    assert read_manifest(opened, "fed", second.version).tft.version == other.version
    assert read_manifest(opened, "dqn", report.dqn.version).tft is None


def test_predict_tells_an_action_for_every_position_and_needs_a_champion_or_a_version(published, source, tmp_path):
    store, report = published
    out = tmp_path / "out.parquet"
    predict("dqn", str(source), str(out), store, version=report.dqn.version)
    table = pq.read_table(out).to_pylist()
    assert len(table) == 3 * 3
    assert {r["action"] for r in table} <= {"sell", "hold", "buy"}
    with pytest.raises(ObjectMissing, match="no champion"):
        predict("nobody", str(source), str(out), store)


def test_refused_source_exits_3_names_column_and_count_and_leaves_the_store_empty(source, tmp_path, capfd):
    bad = tmp_path / "bad"
    bad.mkdir()
    file = sorted(source.rglob("*.parquet"))[0]
    table = pq.read_table(file)
    column = table.schema.names.index("h_007") if "h_007" in table.schema.names else len(table.schema.names) - 5
    name = table.schema.names[column]
    values = table[name].to_pylist()
    values[3] = float("nan")
    pq.write_table(table.set_column(column, name, pa.array(values, table.schema.field(name).type)), bad / "part.parquet")
    store = tmp_path / "store"
    with pytest.raises(SystemExit) as ended:
        main(["ingest", str(bad), "--store", store.as_uri(), "--contract", str(source / "_contract.toml"), "--json"])
    assert ended.value.code == 3
    out, err = capfd.readouterr()
    assert json.loads(out)["exit_code"] == 3
    assert "part.parquet" in err
    assert name in err
    assert "1" in err
    assert not [p for p in store.rglob("*") if p.is_file() and not p.name.startswith(".")]
    with get_client(sync_client=True) as client:
        tables = [json.loads(a.data) for a in client.read_artifacts(limit=200) if a.key == "validation"]
    failed = [line for table in tables for line in table if line["result"] == "FAILED"]
    assert [(line["rule"], line["columns"], line["rows"]) for line in failed] == [("no NaN", name, 1)]


SMALL = "".join(
    f'{group} = {{ prefix = "{prefix}", count = {count} }}\n'
    for group, prefix, count in (("static", "static_", 3), ("historical", "hist_", 20), ("future", "fut_", 4))
)


def test_a_leak_is_told_in_the_validation_table_and_refused_when_asked(tmp_path, capfd, caplog):
    leaking_source(tmp_path / "source")
    (tmp_path / "contract.toml").write_text(SMALL)
    command = ["ingest", str(tmp_path / "source"), "--contract", str(tmp_path / "contract.toml"), "--json"]
    for policy, code, result in (("warn", 0, "warning"), ("refuse", 3, "FAILED")):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--store", (tmp_path / policy).as_uri(), "--config.rules.leak", policy])
        assert ended.value.code == code
        assert "hist_004: correlation +0.99 with the next bar" in capfd.readouterr().err + caplog.text
        with get_client(sync_client=True) as client:
            tables = [json.loads(a.data) for a in client.read_artifacts(limit=200) if a.key == "validation"]
        (line,) = [line for table in tables for line in table if line["result"] == result and "bars to come" in line["rule"]]
        assert line["columns"].startswith("hist_004")
    assert not (tmp_path / "refuse").exists()


@pytest.mark.parametrize("moved", [False, True])
def test_a_source_unlike_the_champions_is_told_plotted_and_sent_as_an_event(moved, published, source, tmp_path, monkeypatch):
    store, report = published
    copy = tmp_path / "source"
    copy.mkdir()
    for path in source.glob("*.parquet"):
        table = pq.read_table(path)
        at = table.schema.names.index("h_007")
        pq.write_table(
            table.set_column(at, "h_007", pc.multiply(table["h_007"], pa.scalar(100.0 if moved else 1.0))), copy / path.name
        )
    events = []
    monkeypatch.setattr("flows.ingest.emit_event", lambda name, resource, payload: events.append((name, resource, payload)))
    found = ingest(str(copy), store, str(source / "_contract.toml"))
    assert [name for name, *_ in events] == ["dataset.landed", *(["dataset.drifted"] if moved else [])]
    with get_client(sync_client=True) as client:
        texts = [a.data for a in client.read_artifacts(limit=200) if a.key == "drift"]
    (text,) = [t for t in texts if str(copy) in t]
    triggers = [entry["trigger"] for entry in declared("automations.yaml") if entry["name"].startswith("retrain-")]
    for trigger in triggers:
        retrain = trigger["match"]["forecastle.retrain"]
        started = [n for n, about, _ in events if n in trigger["expect"] and about["forecastle.retrain"] == retrain]
        assert started == [events[-1][0]], "one of two events trains"
    assert len(triggers) == 2
    if moved:
        _, resource, payload = events[1]
        assert resource == {"prefect.resource.id": f"dataset.{found.fingerprint[:16]}", "forecastle.retrain": "true"}
        assert (payload["dataset"], payload["store"], payload["features"]) == (found.dataset, store, ["h_007"])
        assert re.search(r"tft \d+: 1 of 43 features drifted", text)
        assert text.count("data:image/svg+xml") == 2
    else:
        assert "no drift" in text
        assert found.fingerprint == report.ingest.fingerprint


def test_ingest_of_the_same_rows_is_the_same_dataset(source, tmp_path):
    contract = str(source / "_contract.toml")
    first = ingest(str(source), (tmp_path / "one").as_uri(), contract)
    second = ingest(str(source), (tmp_path / "two").as_uri(), contract)
    assert first.fingerprint == second.fingerprint
    assert FeatureContract.from_toml(contract).lookback_bars == 5
