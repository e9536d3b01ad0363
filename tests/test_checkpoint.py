"""Checkpoint files: names, reproducible bytes, refusal of anything damaged."""

import hashlib
import json
import os
import stat
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch

from models.checkpoint import (
    CheckpointError,
    Snapshot,
    checkpoint_bytes,
    checkpoint_name,
    load_checkpoint,
    load_weights,
    read_checkpoint_bytes,
    save_checkpoint,
)

SNAPSHOT = Snapshot({"w": torch.arange(12.0).view(3, 4), "b": torch.ones(2)}, {"b": 1, "a": {"y": [1, 2], "x": None}})


def test_names_count_completed_epochs_and_neither_form_meets_the_other():
    assert checkpoint_name("dqn", 5, False) == "dqn_epoch_5.safetensors"
    assert checkpoint_name("dqn", 5, True) == "dqn_final_epoch5.safetensors"
    assert checkpoint_name("tft", 0, True) == "tft_final_epoch0.safetensors"
    with pytest.raises(ValueError, match="before epoch 1"):
        checkpoint_name("dqn", 0, False)


def test_same_snapshot_gives_the_same_bytes_in_every_process():
    code = (
        "import hashlib, torch\nfrom models.checkpoint import Snapshot, checkpoint_bytes\n"
        "s = Snapshot({'w': torch.arange(12.0).view(3, 4), 'b': torch.ones(2)}, {'b': 1, 'a': {'y': [1, 2], 'x': None}})\n"
        "print(hashlib.sha256(checkpoint_bytes(s)).hexdigest())"
    )
    prints = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in range(3)}
    assert prints == {hashlib.sha256(checkpoint_bytes(SNAPSHOT)).hexdigest() + "\n"}


def test_tied_and_transposed_tensors_come_back_as_they_were():
    tied = torch.randn(4, 3)
    snapshot = Snapshot({"a": tied, "b": tied, "t": tied.t()}, {})
    back = read_checkpoint_bytes(checkpoint_bytes(snapshot), None)
    for name, value in snapshot.tensors.items():
        assert torch.equal(back.tensors[name], value)


def test_saved_file_is_readable_as_the_umask_says_and_leaves_no_temporary(tmp_path):
    before = os.umask(0o027)
    try:
        saved = save_checkpoint(tmp_path, "tft", 2, True, SNAPSHOT)
    finally:
        os.umask(before)
    assert [p.name for p in tmp_path.iterdir()] == ["tft_final_epoch2.safetensors"]
    assert stat.S_IMODE((tmp_path / saved.name).stat().st_mode) == 0o640
    assert load_checkpoint(tmp_path / saved.name, saved.sha256).metadata == SNAPSHOT.metadata


def corrupted(count, seed=0):
    data, random = checkpoint_bytes(SNAPSHOT), np.random.default_rng(seed)
    for _ in range(count):
        bit = int(random.integers(len(data) * 8))
        yield data[: bit // 8] + bytes([data[bit // 8] ^ (1 << bit % 8)]) + data[bit // 8 + 1 :]
        yield data[: int(random.integers(len(data)))]


@pytest.mark.parametrize("count", [50, pytest.param(300, marks=pytest.mark.slow)])
def test_every_flipped_bit_and_every_truncation_is_refused(count):
    sha256 = hashlib.sha256(checkpoint_bytes(SNAPSHOT)).hexdigest()
    silent = 0
    for data in corrupted(count):
        with pytest.raises(CheckpointError, match="sha256"):
            read_checkpoint_bytes(data, sha256)
        try:
            read_checkpoint_bytes(data, None)
            silent += 1
        except CheckpointError:
            pass
    assert silent > 0, "without the digest some of these load: the digest is what refuses them"


def header(value):
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "data",
    [
        b"", b"short", struct.pack("<Q", 2**40) + b"{}", header(b"not json"), header([1]), header({}),
        header(b'{"a": {}, "a": {}}'), header({f"t{i}": {} for i in range(30_000)}),
        header({"__metadata__": {"forecastle": "{}"}, "w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}),
    ],
)  # fmt: skip
def test_strange_headers_are_refused(data):
    with pytest.raises(CheckpointError):
        read_checkpoint_bytes(data, None)


def test_weights_of_another_shape_or_not_finite_are_refused():
    network = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="do not fit"):
        load_weights(network, {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="weight is not finite"):
        load_weights(network, {"weight": torch.full((2, 2), float("nan")), "bias": torch.zeros(2)})
