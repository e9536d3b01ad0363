"""Models that somebody else has made: every hash is right, and yet nothing is loaded, written or allocated that the manifest
and the configuration do not account for."""

import json
import os
import stat
import struct

import pytest
import torch
from synthetic import small_contract
from test_artifacts import DATASET, publish, trained
from test_training_rules import CONFIGS, Run

import models.dqn.training
import models.tft.training
from models.checkpoint import METADATA_KEY, CheckpointError, checkpoint_bytes, save_checkpoint, write_atomically
from models.features import canonical_json
from models.manifest import Checkpoint
from tasks.artifacts import encode, read_manifest, run_key
from tasks.registry import fetch
from tasks.storage import SWAP_LIMIT, ArtifactIntegrityError, LocalStore, StoreError, digest

FAMILIES = {"tft": models.tft.training, "dqn": models.dqn.training}
both = pytest.mark.parametrize("family", ["tft", "dqn"])


@pytest.fixture(scope="module")
def sound():
    """The final file of a tiny training of each family, as bytes."""
    return {family: Run(family).weights for family in FAMILIES}


def published(folder, family, weights, config=None, data=None):
    """A store whose version 1 has these weights, or these bytes, as its final file."""
    config = config or CONFIGS[family]
    weights.metadata.update(
        dataset=DATASET.fingerprint, config=config.model_dump(mode="json"), contract=small_contract().model_dump(mode="json")
    )
    run = trained(
        folder / "run", config=config, family=family, model=family, run_key=run_key(DATASET, config, family), metrics={}
    )
    final = save_checkpoint(folder / "run", family, 2, True, weights)
    if data is not None:
        write_atomically(folder / "run" / final.name, data)
        final = Checkpoint(name=final.name, epoch=2, is_final=True, **digest(data).model_dump())
    store = LocalStore(folder / "store")
    publish(store, run.model_copy(update={"checkpoints": (run.checkpoints[0], final)}))
    return store


def copy_of(snapshot):
    return type(snapshot)({k: v.clone() for k, v in snapshot.tensors.items()}, dict(snapshot.metadata))


@both
def test_an_honest_file_is_loaded_and_the_group_may_read_it(family, sound, folder):
    before = os.umask(0o027)
    try:
        manifest = fetch(published(folder, family, copy_of(sound[family])), family, 1, folder / "here")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(p.stat().st_mode) for p in (folder / "here").iterdir()} == {0o640}
    assert {p.name for p in (folder / "here").iterdir()} == set(manifest.files)


def first(tensors, prefix):
    return next(name for name in tensors if name.startswith(prefix) and tensors[name].numel())


def poison(value, prefix):
    def change(tensors):
        tensors[first(tensors, prefix)].view(-1)[0] = value

    return change


def reshape(tensors):
    name = first(tensors, "network.")
    tensors[name] = tensors[name][None].clone()


def leave_out(tensors):
    del tensors[first(tensors, "network.")]


def add(tensors):
    tensors["network.../../x"] = torch.zeros(1)


def leave_out_scaler(tensors):
    for name in [n for n in tensors if n.startswith("scaler.")]:
        del tensors[name]


@both
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (poison(float("nan"), "network."), "not finite"), (poison(float("inf"), "network."), "not finite"),
        (poison(float("nan"), "scaler."), "finite"), (reshape, "do not fit"), (leave_out, "do not fit"), (add, "do not fit"),
        (leave_out_scaler, "scaler"),
    ],
    ids=["nan", "inf", "scaler nan", "shape", "missing", "extra", "no scaler"],
)  # fmt: skip
def test_weights_that_do_not_fit_or_are_not_finite_are_refused(family, change, said, sound, folder):
    weights = copy_of(sound[family])
    change(weights.tensors)
    store = published(folder, family, weights)
    with pytest.raises(CheckpointError, match=said):
        fetch(store, family, 1, folder / "here")


@both
def test_a_network_that_the_file_does_not_fill_is_never_allocated(family, sound, folder):
    """A manifest of a few bytes that asks for terabytes of weights."""
    vast = {"hidden_size": 4_000_000} if family == "tft" else {"hidden_sizes": (2_000_000, 2_000_000)}
    store = published(folder, family, copy_of(sound[family]), CONFIGS[family].model_copy(update=vast))
    with pytest.raises(CheckpointError, match="do not fit"):
        fetch(store, family, 1, folder / "here")


def with_header(snapshot, **tensors):
    """The file's bytes with further entries in its header."""
    data = checkpoint_bytes(snapshot)
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length]) | tensors
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(30_000)}, "at most 20000 tensors"),
        ({"x" * 5_000_000: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, "limit 4194304"),
        ({"x": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}}, "not a checkpoint"),
        ({"x": {"dtype": "F32", "shape": [2**62, 0], "data_offsets": [0, 0]}}, "no model of this project"),
        ({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "not a checkpoint"),
        ({"x": {"dtype": "PICKLE", "shape": [4], "data_offsets": [0, 16]}}, "not a checkpoint"),
    ],
    ids=["too many tensors", "too long a header", "overflow", "vast and empty", "overlap", "unknown type"],
)
def test_headers_that_are_bombs_are_refused_before_they_are_parsed(tensors, said, sound, folder):
    weights = copy_of(sound["dqn"])
    weights.metadata.update(
        dataset=DATASET.fingerprint, config=CONFIGS["dqn"].model_dump(mode="json"),
        contract=small_contract().model_dump(mode="json"),
    )  # fmt: skip
    store = published(folder, "dqn", weights, data=with_header(weights, **tensors))
    with pytest.raises(CheckpointError, match=said):
        fetch(store, "dqn", 1, folder / "here")


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/b", "..", ".hidden", "a\n", "x" * 200])
def test_a_manifest_cannot_name_a_file_outside_of_the_target_folder(name, sound, folder):
    store = published(folder, "dqn", copy_of(sound["dqn"]))
    manifest = json.loads(encode(read_manifest(store, "dqn", 1)))
    manifest["version"] = 2
    manifest["files"][name] = manifest["files"]["report.html"]
    store.put_if_absent("models/dqn/2/manifest.json", canonical_json(manifest).encode())
    with pytest.raises(ArtifactIntegrityError, match=r"illegal file names|no manifest of this project"):
        fetch(store, "dqn", 2, folder / "deep" / "here")
    assert not (folder / "deep").exists()


def test_a_link_that_waits_in_the_target_folder_is_replaced_and_not_followed(sound, folder):
    store = published(folder, "dqn", copy_of(sound["dqn"]))
    outside = folder / "outside"
    outside.write_text("mine")
    (folder / "here").mkdir()
    (folder / "here" / "report.html").symlink_to(outside)
    fetch(store, "dqn", 1, folder / "here")
    assert outside.read_text() == "mine"
    assert not (folder / "here" / "report.html").is_symlink()


def test_sizes_are_compared_before_a_byte_is_brought(store, folder):
    store.put_if_absent("models/dqn/1/x", b"x" * 1000)
    with pytest.raises(ArtifactIntegrityError, match="1000 bytes, expected"):
        store.download("models/dqn/1/x", folder / "x", digest(b"x" * 999))
    store.put_if_absent("models/dqn/champion.json", b"x" * (SWAP_LIMIT + 1))
    with pytest.raises(StoreError, match="more than the allowed"):
        read_manifest(store, "dqn", "champion")
    store.put_if_absent("models/dqn/3/manifest.json", b" " * (4 * 2**20 + 1))
    with pytest.raises(StoreError, match="more than the allowed"):
        read_manifest(store, "dqn", 3)
    assert not list(folder.glob("**/.tmp-*"))


def test_one_metadata_key_holds_everything(sound):
    (length,) = struct.unpack("<Q", (data := checkpoint_bytes(sound["dqn"]))[:8])
    assert list(json.loads(data[8 : 8 + length])["__metadata__"]) == [METADATA_KEY]
