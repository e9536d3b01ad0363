"""What a signal leaves behind: runs of the command line in processes of their own, against a real Prefect server."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from prefect.client.orchestration import get_client
from test_flows import CONTRACT, MARKET, TFT, write_market

from flows.ingest import ingest
from flows.retrain_tft import retrain_tft
from tasks.artifacts import read_manifest, verify
from tasks.storage import open_store
from tasks.training import stop_signals


@pytest.fixture(scope="module")
def ingested(prefect_server, tmp_path_factory):
    """A store and its only dataset."""
    source, store = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("store").as_uri()
    (source / "_contract.toml").write_text(CONTRACT)
    write_market(source, series={"AAA": 220, "BBB": 180}, seed=3, **MARKET)
    return store, ingest(str(source), store, str(source / "_contract.toml")).dataset


@pytest.fixture
def environment(prefect_server, tmp_path):
    """Of a process with a home of its own that reports to this module's server."""
    with get_client(sync_client=True) as client:
        return {**os.environ, "FORECASTLE_HOME": str(tmp_path / "home"), "PREFECT_API_URL": str(client.api_url)}


def train(family, name, ingested, **options):
    store, dataset = ingested
    tokens = [t for k, v in options.items() for t in (f"--config.{k.replace('_', '-')}", str(v))]
    return [
        sys.executable, "-m", "flows", "train", family, "--dataset", dataset, "--store", store, *tokens, "--name", name, "--json",
    ]  # fmt: skip


def train_dqn(name, ingested, epochs, **options):
    sizes = {"epochs": epochs, "updates_per_epoch": 60, "checkpoint_every": 2, "num_envs": 8, "hidden_sizes": 32}
    return train("dqn", name, ingested, **sizes, device="cpu", **{"early-stopping.patience": 0}, **options)


def stopped(command, environment, line):
    """What a run said that got SIGTERM as soon as it said `line`."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    seen = []
    for said in process.stderr:
        seen.append(said)
        if line in said:
            process.send_signal(signal.SIGTERM)
            break
    text = "".join(seen) + process.communicate(timeout=60)[1]
    assert process.returncode != 0, text
    return text


def finished(command, environment):
    """What a run told that came to its end: its outcome, and what people read."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def published_of(store, model):
    return [key for key in store.list(f"models/{model}/") if key.endswith("manifest.json")]


def interrupted(store):
    return {key for key in store.list("runs/") if "/interrupted/" in key}


def test_sigterm_saves_the_final_file_aside_and_a_rerun_publishes_the_same_weights(ingested, environment):
    """Killed by SIGTERM and run again equals never killed: same final file, byte for byte."""
    opened, command = open_store(ingested[0]), train_dqn("stopped", ingested, 12)
    before = interrupted(opened)
    text = stopped(command, environment, "epoch=3/12")
    aside = interrupted(opened) - before
    assert len(aside) == 1, (aside, text)
    assert re.search(r"\bdqn_final_epoch([3-9]|1[01])\.safetensors$", *aside)
    assert opened.head("models/stopped/champion.json") is None
    assert not published_of(opened, "stopped")
    outcome, said = finished(command, environment)
    assert "resuming stopped after" in said
    assert outcome["epochs"] == 12
    assert set(outcome["files"]) == {
        *(f"dqn_epoch_{n}.safetensors" for n in range(2, 13, 2)), "dqn_final_epoch12.safetensors", "report.html",
    }  # fmt: skip
    finished(train_dqn("whole", ingested, 12), environment)
    finals = {model: read_manifest(opened, model, 1).files["dqn_final_epoch12.safetensors"] for model in ("stopped", "whole")}
    assert finals["stopped"] == finals["whole"]


def test_sigterm_during_further_trainings_publishes_nothing_and_a_rerun_publishes_the_model(ingested, environment):
    options = TFT.model_dump(mode="json", include={*TFT.model_fields_set} - {"quantiles"}) | {"extra_seeds": 3}
    opened, command = open_store(ingested[0]), train("tft", "further", ingested, **options)
    text = stopped(command, environment, "seeds {'seed': 1")
    assert not published_of(opened, "further"), text
    outcome, said = finished(command, environment)
    assert "resuming further after 2 completed epochs" in said
    assert len(outcome["metrics"]["seeds"]) == 3
    assert outcome["metrics"]["spread"]["seeds"]["complete"]
    assert set(outcome["files"]) == set(verify(opened, "further", 1).files)


def test_sigterm_while_a_tft_of_the_agents_input_is_trained_keeps_the_ones_before_it(ingested, environment):
    """That they make the same agent as folds never stopped is shown in tests/test_dqn_forecasts.py."""
    store, dataset = ingested
    retrain_tft(dataset, store, "tft", TFT.model_copy(update={"updates_per_epoch": 20, "promotion": "always"}))
    opened, command = open_store(store), train_dqn("fed", ingested, 2, tft_folds=3)
    text = stopped(command, environment, "tft fold 2 of 3")
    assert "tft fold 3 of 3" not in text
    assert "dqn epoch=1" not in text
    assert not published_of(opened, "fed")
    outcome, said = finished(command, environment)
    assert re.findall(r"tft fold (\d) of 3", said) == ["2", "3"]
    assert set(outcome["files"]) == set(verify(opened, "fed", 1).files)


@pytest.mark.parametrize(("handler", "stops"), [(signal.SIG_IGN, False), (lambda number, frame: None, True)])
def test_a_signal_that_is_ignored_stays_ignored(handler, stops):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with stop_signals() as stop_requested:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop_requested() is stops
        assert signal.getsignal(signal.SIGINT) is handler or signal.getsignal(signal.SIGINT) == handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_saves_stops_everything_and_is_recorded(ingested, tmp_path):
    """SIGINT to every process of the terminal: Prefect's temporary server must live until the run's end is recorded."""
    store = open_store(ingested[0])
    before = interrupted(store)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    environment |= {"FORECASTLE_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)}
    process = subprocess.Popen(
        train_dqn("ctrl-c", ingested, 2000), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs the tests may ignore it
    )  # fmt: skip
    seen = []
    for line in process.stderr:
        seen.append(line)
        if "epoch=3/2000" in line:
            os.killpg(process.pid, signal.SIGINT)
            break
    _, err = process.communicate(timeout=45)
    text = "".join(seen) + err
    assert process.returncode == 130, text
    assert "Crashed" in text, "the run's end reached the server"
    assert len(interrupted(store) - before) == 1
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
