"""Checkpoint files: their names and their bytes. One metadata key with canonical JSON keeps safetensors files
reproducible. Where checkpoints are published is told in tasks/artifacts.py."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from models.features import canonical_json
from models.manifest import Checkpoint

METADATA_KEY = "forecastle"
HEADER_LIMIT = 4 * 2**20
TENSOR_LIMIT = 20_000
CHECKPOINT_NAME = re.compile(r"(?P<family>[a-z]+)_(?:epoch_(?P<epoch>\d+)|final_epoch(?P<final>\d+))\.safetensors")


class CheckpointError(ValueError):
    """A checkpoint file that cannot be trusted: damaged, oversized, or not what its digest says."""


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint file holds: CPU tensors by name, and metadata that JSON can spell."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, by the rest of their names."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}


def checkpoint_name(family: str, epoch: int, is_final: bool) -> str:
    """`dqn_epoch_5.safetensors` or `dqn_final_epoch12.safetensors`; `epoch` counts completed epochs."""
    if epoch < 0 or (epoch == 0 and not is_final):
        raise ValueError(f"no regular checkpoint before epoch 1 (got {epoch})")
    return f"{family}_final_epoch{epoch}.safetensors" if is_final else f"{family}_epoch_{epoch}.safetensors"


def checkpoint_bytes(snapshot: Snapshot) -> bytes:
    """The file's bytes: the same snapshot gives the same bytes in every process.

    Tied and transposed tensors are stored as their own contiguous copies.
    """
    metadata = {METADATA_KEY: canonical_json(snapshot.metadata)}
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in sorted(snapshot.tensors.items())}
    if "__metadata__" in tensors:
        raise CheckpointError("a tensor cannot be called __metadata__: it could never be loaded")
    return save_safetensors(tensors, metadata=metadata)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A new file beside `path` that takes its place when the block ends well: whole or not at all, on disk before this returns,
    readable as the umask says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".tmp-{uuid.uuid4().hex}"
    # Created with the mode the umask says: reading the umask means setting it, for every thread
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Put `data` at `path`, as `atomic_file` does."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


def save_checkpoint(folder: Path, family: str, epoch: int, is_final: bool, snapshot: Snapshot) -> Checkpoint:
    """Write the snapshot under its own name in `folder` and tell what was written."""
    name = checkpoint_name(family, epoch, is_final)
    data = checkpoint_bytes(snapshot)
    write_atomically(folder / name, data)
    return Checkpoint(name=name, epoch=epoch, is_final=is_final, sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def read_header(data: bytes) -> dict[str, Any]:
    """The header of safetensors bytes as JSON, after its size, its tensor count and its keys were checked."""
    if len(data) < 8:
        raise CheckpointError(f"{len(data)} bytes: too short for a safetensors file")
    (length,) = struct.unpack("<Q", data[:8])
    if length > HEADER_LIMIT or 8 + length > len(data):
        raise CheckpointError(f"header of {length} bytes in a file of {len(data)} (limit {HEADER_LIMIT})")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(keys := dict(pairs)) != len(pairs):
            raise CheckpointError("the header names a tensor twice")
        return keys

    try:
        header = json.loads(data[8 : 8 + length], object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"the header is not JSON: {error}") from error
    if not isinstance(header, dict) or len(header) > TENSOR_LIMIT:
        raise CheckpointError(f"the header is no table of at most {TENSOR_LIMIT} tensors")
    return header


def read_checkpoint_bytes(data: bytes, sha256: str | None) -> Snapshot:
    """The snapshot in a checkpoint's bytes. `sha256` (hex) is compared first; None only for bytes just written
    by this process. Raises CheckpointError: safetensors itself has no checksum."""
    if sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise CheckpointError(f"sha256 is {found}, expected {sha256} ({len(data)} bytes)")
    header = read_header(data)
    try:
        tensors = load_safetensors(data)
        metadata = json.loads(header.get("__metadata__", {})[METADATA_KEY])
    except KeyError as error:
        raise CheckpointError(f"not a checkpoint of this project: no {METADATA_KEY!r} in its metadata") from error
    except Exception as error:  # the Rust loader raises its own classes
        raise CheckpointError(f"not a checkpoint of this project: {error}") from error
    return Snapshot(tensors, metadata)


def load_checkpoint(path: Path, sha256: str | None) -> Snapshot:
    """The snapshot in a checkpoint file, refused when its bytes do not have that sha256 (hex)."""
    try:
        return read_checkpoint_bytes(path.read_bytes(), sha256)
    except CheckpointError as error:
        raise CheckpointError(f"{path.name}: {error}") from error


def check_weights(network: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError on other names, shapes or non-finite values; the network may be on the meta device."""
    expected = {name: tuple(t.shape) for name, t in network.state_dict().items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    if expected != found:
        odd = sorted(set(expected.items()) ^ set(found.items()))[:4]
        raise CheckpointError(f"weights do not fit this configuration, for instance {odd}")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"weight {name} is not finite")


def load_weights(network: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy weights into the network. Raises CheckpointError on other names, shapes or non-finite values."""
    check_weights(network, tensors)
    network.load_state_dict(dict(tensors))
