"""The command line: the flows' own signatures, by cyclopts. Commands load when they are called, so that --help is
quick. People read stderr; stdout holds the result, with --json as exactly one JSON object."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cyclopts import App, CycloptsError

app = App(name="forecastle", help="Feature Parquet in, verified models out.", help_format="plaintext")
app.command("flows.commands:run", name="run", help="The whole job on SOURCE, or on real daily share prices.")
app.command("flows.ingest:ingest", name="ingest", help="Check feature Parquet and keep it as a dataset.")
train = App(name="train", help="Train one model family and publish it.")
train.command("flows.commands:train_tft", name="tft", help="The Temporal Fusion Transformer (quantile forecasts).")
train.command("flows.commands:train_dqn", name="dqn", help="The DQN agent (buy, hold, sell).")
app.command(train)
app.command("flows.predict:predict", name="predict", help="Forecasts or actions for new rows, to Parquet.")
app.command("flows.plan:plan", name="plan", help="Memory of a TFT update by layer, what to recompute, GPUs that fit.")
app.command("flows.publish:publish", name="publish", help="Publish a finished run that could not be published.")
models = App(name="models", help="Published versions.")
models.command("flows.commands:list_versions", name="list", help="Versions, champions and what happened to them.")
models.command("flows.commands:show_model", name="show", help="A version from source files to weights.")
models.command("flows.commands:verify_model", name="verify", help="Check every byte of a version.")
models.command("flows.commands:promote_model", name="promote", help="Make a version the champion.")
models.command("flows.commands:rollback_model", name="rollback", help="Make the champion before this one champion again.")
models.command("flows.commands:fetch_model", name="fetch", help="Download a version, verify and load it.")
models.command("flows.commands:collect_garbage", name="gc", help="Show or delete what nothing names.")
app.command(models)
storage = App(name="storage", help="The local S3 server (SeaweedFS).")
storage.command("flows.commands:storage_start", name="start", help="Start it and print its environment.")
storage.command("flows.commands:storage_stop", name="stop", help="Stop it; the data stay.")
storage.command("flows.commands:storage_env", name="env", help="Print its environment as export lines.")
app.command(storage)
app.command("flows.commands:ui", name="ui", help="The Prefect server and UI on the project's own runs.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 done, 2 wrong usage or config, 3 data refused, 4 a stored artifact fails
    verification, 130 interrupted, 1 anything else."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in tokens
    if as_json:
        tokens.remove("--json")
    # Nothing but the result may reach stdout: a library's stray print goes to stderr
    stdout = os.fdopen(os.dup(1), "w")
    if tokens and not {"--help", "-h", "--version"} & set(tokens):
        sys.stdout.flush()
        os.dup2(2, 1)
    try:
        result = app(
            _expand(tokens), exit_on_error=False, print_error=True, result_action="return_value",
            error_console=_stderr_console(),
        )  # fmt: skip
        _print_result(result, as_json, stdout)
        code = 0
    except Exception as error:
        code = _exit_code(error)
        if not isinstance(error, CycloptsError):
            _explain(error, code)
        if as_json:
            print(json.dumps({"error": str(error), "exit_code": code}), file=stdout)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    finally:
        sys.stdout.flush()
        stdout.flush()
        os.dup2(stdout.fileno(), 1)
    sys.exit(code)


def _stderr_console() -> Any:
    from rich.console import Console

    return Console(stderr=True)


def _expand(tokens: list[str]) -> list[str]:
    """Spell out `--use-gradient-checkpointing`, `--[no-]leak-check` and `--config FILE` (TOML) as the config's own options."""
    out: list[str] = []
    files: list[str] = []
    rest = iter(tokens)
    for token in rest:
        if token == "--use-gradient-checkpointing":
            out += ["--config.gradient-checkpointing", "full"]
        elif token in ("--leak-check", "--no-leak-check"):
            out.append(f"--config.{token.removeprefix('--')}")
        elif token == "--config":
            files.append(next(rest, ""))
        elif token.startswith("--config="):
            files.append(token.removeprefix("--config="))
        else:
            out.append(token)
    given = {token.split("=")[0] for token in out}
    for file in files:
        try:
            values = tomllib.loads(Path(file).read_text())
        except (OSError, ValueError) as error:
            raise UsageError(f"--config {file}: {error}") from error
        for option, value in _options("--config", values):
            if option not in given:
                out += [option, value]
    return out


class UsageError(ValueError):
    """Wrong usage that the parser cannot see."""


def _options(prefix: str, values: dict[str, Any]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        option = f"{prefix}.{name.replace('_', '-')}"
        if isinstance(value, dict):
            pairs += _options(option, value)
        elif isinstance(value, list):
            pairs += [(option, str(item)) for item in value]
        else:
            pairs.append((option, str(value)))
    return pairs


def _exit_code(error: BaseException) -> int:
    """By class name along the error's bases, so that no heavy module loads to compare with."""
    names = {base.__name__ for base in type(error).__mro__}
    if names & {"DataContractError", "UnfitSeriesError"}:
        return 3
    if names & {"ArtifactIntegrityError", "CheckpointError", "StoreConflict"}:
        return 4
    if names & {
        "CycloptsError",
        "ValidationError",
        "ContractError",
        "UsageError",
        "ParameterTypeError",
        "MemoryBudgetError",
        "SuiteError",
    }:
        return 2
    return 1


def _explain(error: Exception, code: int) -> None:
    """The error as a person wants it; the traceback only for what nobody foresaw."""
    if code == 1 and type(error).__module__.split(".")[0] not in {"tasks", "flows", "models"}:
        import traceback

        traceback.print_exception(error)
    print(f"forecastle: {error}", file=sys.stderr)


def _print_result(result: Any, as_json: bool, stdout: Any) -> None:
    if result is None:
        if as_json:
            print("{}", file=stdout)
        return
    value = result.model_dump(mode="json") if hasattr(result, "model_dump") else result
    if as_json:
        print(json.dumps(value), file=stdout)
    elif isinstance(value, str):
        print(value, file=stdout)
    else:
        print(getattr(result, "for_people", lambda: json.dumps(value, indent=1))(), file=stdout)


if __name__ == "__main__":
    main()
