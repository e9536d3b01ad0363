"""What touches the world. Importing this package sets Prefect's defaults, which must stand before Prefect loads.

A user's own environment or profile wins. Nothing else is loaded here.
"""

import logging
import os
import tomllib
from pathlib import Path


def forecastle_home() -> Path:
    """Folder of everything this machine keeps: run database, local S3, caches, work in progress."""
    return Path(os.environ.get("FORECASTLE_HOME", ".forecastle")).absolute()


def _user_profile_has_api() -> bool:
    """Whether the user's own Prefect profile names a server: then it is theirs to choose the home too."""
    path = Path.home() / ".prefect" / "profiles.toml"
    try:
        profiles = tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return False
    active = profiles.get("profiles", {}).get(os.environ.get("PREFECT_PROFILE", profiles.get("active", "")), {})
    return "PREFECT_API_URL" in active


def set_prefect_defaults() -> None:
    """Defaults for a machine without a Prefect set-up of its own: a private home, a patient start, no calls out."""
    defaults = {
        # 20 s is Prefect's default; a loaded 2-core machine needed 75 s for the first migration
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_V2_ENABLED": "false",  # v2 asks an outside host for its settings even then
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
        "DO_NOT_TRACK": "1",
        "GX_ANALYTICS_ENABLED": "false",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        # What models/ logs (out of memory, growth, series passed over) belongs to the run, in the UI too
        "PREFECT_LOGGING_EXTRA_LOGGERS": "models",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    }
    if "PREFECT_API_URL" not in os.environ and not _user_profile_has_api():
        defaults["PREFECT_HOME"] = os.environ.get("PREFECT_HOME") or str(forecastle_home() / "prefect")
        Path(defaults["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)  # Prefect makes one level only, and warns
        defaults["PREFECT_SERVER_EPHEMERAL_ENABLED"] = "true"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    logging.getLogger("models").setLevel(logging.INFO)  # Prefect gives extra loggers its handlers, not its level


def default_store(store: str | None) -> str:
    """The store to use: the one named, else FORECASTLE_STORE, else a plain folder of this machine."""
    return store or os.environ.get("FORECASTLE_STORE") or (forecastle_home() / "store").as_uri()


set_prefect_defaults()
