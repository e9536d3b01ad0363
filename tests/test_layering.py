"""Imports point down only: flows -> tasks -> models; what ingests needs no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "models": {
        "prefect",
        "duckdb",
        "boto3",
        "great_expectations",
        "pyarrow",
        "pandas",
        "matplotlib",
        "tasks",
        "flows",
        "deployments",
    },
    "tasks": {"flows", "deployments"},
    "flows": {"torch", "duckdb", "boto3", "great_expectations", "pyarrow"},
}
FLOWS_THAT_CALL_FLOWS = {"pipeline.py", "commands.py", "__main__.py"}


def imports_of(source):
    """Modules imported anywhere in the source, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            yield from (a.value for a in node.args if isinstance(a, ast.Constant))


def upward_imports(layer, name, source):
    """Imports of the file that its layer must not have."""
    found = [m for m in imports_of(source) if m.split(".")[0] in FORBIDDEN[layer]]
    if layer == "flows" and name not in FLOWS_THAT_CALL_FLOWS:
        found += [m for m in imports_of(source) if m.startswith("flows.")]
    return found


@pytest.mark.parametrize("layer", ["models", "tasks", "flows"])
def test_imports_point_down_only(layer):
    files = sorted((ROOT / layer).rglob("*.py"))
    assert files
    for path in files:
        allowed = {"great_expectations.expectations"} if path.name == "expectations.py" else set()
        assert not set(upward_imports(layer, path.name, path.read_text())) - allowed, path


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("models", "def f():\n    from tasks.storage import open_store"),
        ("models", "import prefect.flows"),
        ("tasks", "from flows.ingest import ingest"),
        ("flows", "import torch"),
        ("flows", "from flows.ingest import ingest"),
    ],
)
def test_planted_upward_import_is_caught(layer, source):
    assert upward_imports(layer, "some.py", source)


@pytest.mark.parametrize(
    "module", ["models.features", "models.config", "models.manifest", "models.tft.config", "models.dqn.config"]
)
def test_value_types_load_without_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
