"""Set-ups in containers, against their own schemas: compose file, Dockerfile, Kubernetes manifests, SkyPilot task."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deployments.serve import environment
from tasks import local_s3
from tasks.s3_client import s3_client

ROOT = Path(__file__).parent.parent
DEPLOYMENTS = ROOT / "deployments"
KUBERNETES = "1.33"


def program(name):
    """A program beside this Python, from the locked packages."""
    return str(Path(sys.executable).parent / name)


def compose_errors(text, folder):
    """What Docker Compose says against a compose file; its paths are checked at start, not here."""
    (folder / "compose.yaml").write_text(text)
    command = [program("docker-compose"), "-f", str(folder / "compose.yaml"), "--profile", "gpu", "config", "--quiet"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stderr


def test_compose_file_is_valid_and_a_planted_fault_is_caught(tmp_path):
    text = (DEPLOYMENTS / "compose.yaml").read_text()
    assert compose_errors(text, tmp_path) == ""
    for right, wrong in (("restart: unless-stopped", "restrat: unless-stopped"), ("secrets: [s3_keys]", "secrets: [s3_kyes]")):
        assert right in text
        assert compose_errors(text.replace(right, wrong), tmp_path)


def test_compose_file_keeps_secrets_in_files_and_every_service_has_a_health_check():
    found = yaml.safe_load((DEPLOYMENTS / "compose.yaml").read_text())
    for name, service in found["services"].items():
        assert "healthcheck" in service, name
        assert not [k for k in service.get("environment", {}) if re.search("PASSWORD$|SECRET|ACCESS_KEY", k)], name
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), name
        assert "latest" not in service["image"], name
    assert all("file" in secret for secret in found["secrets"].values())
    assert found["services"]["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


def test_containers_and_make_serve_have_the_same_settings(monkeypatch):
    monkeypatch.setattr(local_s3, "environment", lambda home: {})
    monkeypatch.setattr(os, "environ", {})
    ours = environment(Path("/data"), 4200)
    services = yaml.safe_load((DEPLOYMENTS / "compose.yaml").read_text())["services"]
    places = {"PREFECT_API_URL", "PREFECT_SERVER_UI_API_URL", "FORECASTLE_SOURCE", "FORECASTLE_HOME"}
    for name in ("server", "worker-cpu", "worker-gpu"):
        theirs = services[name]["environment"]
        wanted = {k: v for k, v in ours.items() if k.startswith("PREFECT_SERVER_") == (name == "server") and k not in places}
        wanted.pop("PREFECT_HOME", None)
        assert wanted == {k: theirs.get(k) for k in wanted}, name
    monkeypatch.setattr(os, "environ", {**ours, "AWS_DEFAULT_REGION": "us-east-1"})
    assert s3_client().meta.config.retries["total_max_attempts"] == int(ours["AWS_MAX_ATTEMPTS"])


def test_secrets_are_random_kept_and_fit_each_other(tmp_path):
    shutil.copy(DEPLOYMENTS / "secrets.sh", tmp_path)
    made = []
    for _ in range(2):
        subprocess.run([tmp_path / "secrets.sh"], check=True)
        made.append({p.name: p.read_text() for p in (tmp_path / "secrets").iterdir()})
    assert made[0] == made[1]
    keys = json.loads(made[0]["s3_keys.json"])["identities"][0]["credentials"][0]
    assert f"aws_secret_access_key = {keys['secretKey']}\n" in made[0]["s3_credentials"]
    assert len(keys["secretKey"]) == len(made[0]["database_password"]) == 48
    assert (tmp_path / "secrets").stat().st_mode & 0o77 == 0, "nobody else on the machine reads them"


def dockerfile_findings(text, folder):
    """What hadolint says of a Dockerfile."""
    (folder / "Dockerfile").write_text(text)
    return subprocess.run([program("hadolint"), str(folder / "Dockerfile")], capture_output=True, text=True, timeout=60).stdout


def test_dockerfile_passes_its_linter_and_a_planted_fault_is_caught(tmp_path):
    text = (ROOT / "Dockerfile").read_text()
    assert dockerfile_findings(text, tmp_path) == ""
    assert "DL3002" in dockerfile_findings(text.replace("USER 10001", "USER root"), tmp_path)


def test_dockerfile_has_both_targets_the_lock_a_plain_user_and_a_health_check():
    text = (ROOT / "Dockerfile").read_text()
    assert {"FROM base AS cpu", "FROM base AS cuda"} <= set(text.splitlines())
    assert text.count("install -r runtime.lock") == 2
    assert "USER 10001" in text
    assert "HEALTHCHECK" in text
    excluded = re.compile(re.search(r"grep -vE '([^']+)' requirements.lock", text)[1])
    kept = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not excluded.match(line)]
    for needed in ("torch", "prefect", "duckdb", "boto3", "pydantic", "PyYAML"):
        assert any(line.startswith(f"{needed}==") for line in kept), needed


def test_the_installed_project_holds_every_file_that_it_reads(tmp_path):
    """An image has no other copy of them."""
    for folder in ("flows", "tasks", "models", "deployments"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("secrets", "__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "."]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    held = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    assert {"deployments/prefect.yaml", "deployments/automations.yaml", "flows/gpus.toml"} <= held


def filled(value, values):
    """A base job template with its variables filled in, as Prefect's worker does; unset ones are left out."""
    if isinstance(value, dict):
        return {k: v for k, v in ((k, filled(v, values)) for k, v in value.items()) if v is not None}
    if isinstance(value, list):
        return [filled(v, values) for v in value]
    match = re.fullmatch(r"\{\{ (\w+) \}\}", value) if isinstance(value, str) else None
    return values.get(match[1]) if match else value


def job_of(template, **values):
    """The Kubernetes job that the template makes from its defaults."""
    defaults = {k: v["default"] for k, v in template["variables"]["properties"].items() if v.get("default") is not None}
    job = filled(template["job_configuration"]["job_manifest"], {**defaults, **values})
    container = job["spec"]["template"]["spec"]["containers"][0]
    # What prefect-kubernetes does with command and environment
    container["args"] = str(values.get("command", "prefect flow-run execute")).split()
    container["env"] = [{"name": k, "value": v} for k, v in container["env"].items()]
    return job


def test_base_job_template_makes_a_valid_job_with_one_gpu_and_explains_every_value():
    template = json.loads((DEPLOYMENTS / "kubernetes" / "gpu-pool.json").read_text())
    jsonschema.Draft202012Validator.check_schema(template["variables"])
    properties = template["variables"]["properties"]
    assert all(len(p["description"]) > 10 for p in properties.values())
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used == set(properties), "every variable is used, every used one is declared"
    job = job_of(template)
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job_of(template, finished_job_ttl="a day"), KUBERNETES, strict=True)


def test_worker_manifests_are_valid_and_a_planted_fault_is_caught():
    found = list(yaml.safe_load_all((DEPLOYMENTS / "kubernetes" / "worker.yaml").read_text()))
    assert [m["kind"] for m in found] == ["Namespace", "ServiceAccount", "Role", "RoleBinding", "Deployment"]
    for manifest in found:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    found[-1]["spec"]["template"]["spec"]["containers"][0]["imgae"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found[-1], KUBERNETES, strict=True)


def test_skypilot_task_asks_for_a_spot_gpu_and_recovers():
    task = yaml.safe_load((DEPLOYMENTS / "skypilot.yaml").read_text())
    assert task["resources"]["use_spot"] is True
    assert task["resources"]["job_recovery"]
    assert {"RTXA4000", "RTX4090"} <= {name.partition(":")[0] for name in task["resources"]["accelerators"]}
    assert set(task["secrets"]) == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert not any(task["secrets"].values()), "no secret in the file"
