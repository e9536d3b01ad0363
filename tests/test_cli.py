"""The command line: quick help, one JSON object on stdout, exit codes. Flows run in tests/test_flows.py."""

import json
import re
import subprocess
import sys

import pytest

from flows.__main__ import UsageError, _exit_code, _expand, app, main

HEAVY = ("torch", "prefect", "great_expectations", "duckdb", "boto3", "pyarrow", "matplotlib")


def test_help_loads_no_heavy_library():
    code = (
        "import sys\nfrom flows.__main__ import main\n"
        "try:\n    main(['--help'])\n"
        f"finally:\n    print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().endswith("[]"), done.stderr
    for command in ("run", "ingest", "train", "predict", "models", "storage", "ui"):
        assert command in done.stdout


def test_every_command_loads_and_explains_its_options(capfd):
    for name in (
        "run",
        "ingest",
        "train tft",
        "train dqn",
        "predict",
        "storage start",
        "models verify",
        "models gc",
        "publish",
        "ui",
        "plan",
    ):
        with pytest.raises(SystemExit) as ended:
            main([*name.split(), "--help"])
        assert ended.value.code == 0, name
    assert "--config.epochs" in capfd.readouterr().out


def test_gradient_checkpointing_flag_and_config_file_reach_the_config(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("epochs = 3\nquantiles = [0.2, 0.8]\n[early_stopping]\npatience = 2\n")
    tokens = ["train", "tft", "--config", str(file), "--config.epochs", "7", "--use-gradient-checkpointing"]
    _, bound, _ = app.parse_args(_expand(tokens))
    config = bound.arguments["config"]
    assert (config.epochs, config.early_stopping.patience) == (7, 2), "the command line wins over the file"
    assert config.gradient_checkpointing == "full"
    assert config.quantiles == (0.2, 0.8)


def test_plan_itemises_the_variable_selection_and_fits_a_budget(capfd):
    def plan(*options):
        with pytest.raises(SystemExit) as ended:
            main(["plan", "--config.windows-per-start", "1", *options])
        return ended.value.code, capfd.readouterr().out

    code, text = plan("--config.hidden-size", "128", "--config.batch-size", "64", "--config.context", "190")
    assert code == 0
    gib = float(re.search(r"([\d.]+) GiB of it are activations of the variable selection networks", text).group(1))
    # 64 x 190 rows x 210 variables x 128 wide x 5.25 floats, and what the joint selection keeps
    assert gib == pytest.approx(64 * 190 * 210 * 128 * 5.25 * 4 / 2**30, rel=0.05)
    assert "RTX A4000" in text
    _, free = plan("--config.batch-size", "64", "--json")
    code, fitted = plan("--config.batch-size", "64", "--memory-budget", "300MiB", "--json")
    free, fitted = json.loads(free), json.loads(fitted)
    assert code == 0
    assert fitted["peak_mib"] <= 300 < free["peak_mib"]
    assert (free["recomputed_share"], fitted["starts_at_a_time"]) == (0.0, 64)
    assert 0 < fitted["recomputed_share"] < 1
    assert plan("--memory-budget", "10MiB")[0] == 2


def test_config_file_that_is_no_toml_is_wrong_usage(tmp_path):
    with pytest.raises(UsageError, match=r"nothing\.toml"):
        _expand(["train", "tft", "--config", str(tmp_path / "nothing.toml")])


@pytest.mark.parametrize(
    "tokens",
    [
        ["nonsense"],
        ["train", "tft", "--config.epochs", "0"],
        ["train", "dqn"],
        ["ingest"],
        ["train", "tft", "--no-such", "1"],
    ],
)
def test_wrong_usage_exits_2_and_json_says_so(tokens, capfd):
    with pytest.raises(SystemExit) as ended:
        main([*tokens, "--json"])
    assert ended.value.code == 2
    assert json.loads(capfd.readouterr().out)["exit_code"] == 2


def test_ui_pages_ask_the_port_that_serves_them(monkeypatch, capfd):
    import os

    started = []
    monkeypatch.setattr(os, "execv", lambda program, command: started.append((command, dict(os.environ))))
    monkeypatch.setenv("PREFECT_SERVER_UI_API_URL", "")
    with pytest.raises(SystemExit):
        main(["ui", "--port", "4321"])
    command, environment = started[0]
    assert command[-2:] == ["--port", "4321"]
    assert environment["PREFECT_SERVER_UI_API_URL"] == "http://127.0.0.1:4321/api"


def test_exit_codes_follow_the_kind_of_error():
    from models.checkpoint import CheckpointError
    from models.windows import UnfitSeriesError
    from tasks.expectations import DataContractError
    from tasks.storage import ArtifactIntegrityError, StoreError

    assert _exit_code(DataContractError("x")) == 3
    assert _exit_code(UnfitSeriesError("x")) == 3
    assert _exit_code(ArtifactIntegrityError("x")) == 4
    assert _exit_code(CheckpointError("x")) == 4
    assert _exit_code(StoreError("x")) == 1
    assert _exit_code(RuntimeError("x")) == 1
