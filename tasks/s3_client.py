"""The S3 client: credentials and endpoint from the AWS chain, or from a Prefect Secret block that is named; never from a
parameter."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import urllib.parse
from typing import Any

from tasks.storage import StoreError

BLOCK = "FORECASTLE_CREDENTIALS_BLOCK"


def _is_loopback(host: str) -> bool:
    """Whether a host is this machine by its spelling; a name that merely starts with 127. is not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _credentials() -> dict[str, str]:
    """What the Prefect Secret block named by FORECASTLE_CREDENTIALS_BLOCK holds, for boto3's session; nothing without one."""
    name = os.environ.get(BLOCK)
    if not name:
        return {}
    from prefect.blocks.system import Secret

    known = {"aws_access_key_id", "aws_secret_access_key", "aws_session_token"}
    try:
        load: Any = Secret.load
        block: Any = load(name, _sync=True)
        held = block.get()
        values = json.loads(held) if isinstance(held, str) else dict(held)
    except Exception as error:  # its text may hold the secret
        raise StoreError(
            f"no credentials: Prefect Secret block {name!r} cannot be read ({type(error).__name__}): {BLOCK}"
        ) from None
    if not {"aws_access_key_id", "aws_secret_access_key"} <= set(values) <= known:
        raise StoreError(f"the Prefect Secret block {name!r} must hold a JSON object with {', '.join(sorted(known))}")
    return {key: str(value) for key, value in values.items()}


def s3_client() -> Any:
    """A client by the AWS chain. Raises StoreError for an endpoint that would give keys away."""
    import boto3
    from botocore.config import Config

    # At DEBUG it prints session tokens, signatures and the keys that a role is given
    botocore = logging.getLogger("botocore")
    botocore.setLevel(max(logging.INFO, botocore.getEffectiveLevel()))
    session = boto3.session.Session(**_credentials())

    attempts = int(os.environ.get("AWS_MAX_ATTEMPTS", 4))

    def client(**s3: Any) -> Any:
        return session.client("s3", config=Config(
            retries={"mode": "standard", "total_max_attempts": attempts}, connect_timeout=10, read_timeout=60, s3=s3,
        ))  # fmt: skip

    try:
        found = client(addressing_style="auto")
    except ValueError:  # its text holds the endpoint as it was written, a password in it too
        raise StoreError("the S3 endpoint is no http(s) address: check AWS_ENDPOINT_URL_S3") from None
    except Exception as error:
        raise StoreError(f"no S3 client: {type(error).__name__}: {error}") from error
    # As the client resolved it: an endpoint may also stand in the AWS configuration file
    parts = urllib.parse.urlsplit(found.meta.endpoint_url)
    host = parts.hostname or ""
    if parts.username or parts.password:
        raise StoreError("the S3 endpoint holds a user or a password: keep credentials in the AWS chain")
    if parts.scheme != "https" and not _is_loopback(host) and os.environ.get("FORECASTLE_ALLOW_HTTP") != "1":
        raise StoreError(f"{host}: plain http only to this machine; use https, or FORECASTLE_ALLOW_HTTP=1")
    if host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        return found
    # Every write bears the sha256 of its body in a signed header: over plain http too, the SDK need not hash it again
    checksums = found.meta.config.request_checksum_calculation != "when_required"
    return client(addressing_style="path", **({"payload_signing_enabled": False} if checksums else {}))
