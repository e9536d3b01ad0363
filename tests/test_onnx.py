"""The ONNX file of a TFT forecasts what torch does, for any number of windows."""

import json

import onnx
import onnxruntime
import pytest
import torch
from synthetic import small_contract

import models.tft.export as export
from models.checkpoint import CheckpointError, Snapshot
from models.features import canonical_json
from models.tft.config import TFTConfig
from models.tft.export import PlainSelection, export_onnx
from models.tft.layers import Recompute
from models.tft.network import TemporalFusionTransformer
from models.tft.quantisation import packed, unpacked
from models.tft.selection import VariableSelection

CONTRACT = small_contract()
CONFIG = TFTConfig(context=9, horizon=4, hidden_size=16, num_heads=2, grn_layers=1, quantisation="int8")
METADATA = {"config": CONFIG.model_dump(mode="json"), "contract": CONTRACT.model_dump(mode="json"), "anchor": "ratio"}


def network():
    torch.manual_seed(0)
    made = TemporalFusionTransformer(CONFIG, CONTRACT.sizes).eval()
    with torch.no_grad():  # of fresh ones, norms and biases would be invisible
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    made.load_state_dict(unpacked(packed(made)))
    return made


def windows(starts, seed=1):
    torch.manual_seed(seed)
    V = CONTRACT.sizes
    return torch.randn(starts, V[0]), torch.randn(starts, CONFIG.context, V[1]), torch.randn(starts, CONFIG.horizon, V[2])


def snapshot(tensors):
    return Snapshot({f"network.{name}": t for name, t in tensors.items()}, METADATA)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "tft.onnx"
    export_onnx(snapshot(packed(network())), path)
    return path


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_plain_selection_is_the_real_one(context, dtype, limit):
    torch.manual_seed(0)
    real = VariableSelection(7, 8, 0.3, context=context).to(dtype).eval()
    with torch.no_grad():
        for parameter in real.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        arguments = (torch.randn(11, 7, dtype=dtype), torch.randn(11, 8, dtype=dtype) if context else None, Recompute("none"), "")
        for a, b in zip(real(*arguments), PlainSelection(real)(*arguments), strict=True):
            assert (a - b).abs().max() < limit


@pytest.mark.parametrize("starts", [1, 2, 3, 17])
def test_onnx_forecasts_what_torch_does(path, starts):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["static", "historical", "future"]
    inputs = windows(starts, seed=starts)
    with torch.no_grad():
        expected = network()(*inputs)[:, 0]
    (found,) = session.run(["quantiles"], {n: t.numpy() for n, t in zip(export.INPUTS, inputs, strict=True)})
    assert found.shape == (starts, CONFIG.horizon, len(CONFIG.quantiles))
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-5)


def test_planted_other_weight_is_seen(path):
    changed = network()
    with torch.no_grad():
        changed.historical_selection.gate_weight[3, 2, 1] += 1
        inputs = windows(3)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {n: t.numpy() for n, t in zip(export.INPUTS, inputs, strict=True)})
        with pytest.raises(AssertionError):
            torch.testing.assert_close(torch.from_numpy(found), changed(*inputs)[:, 0], rtol=1e-4, atol=1e-5)


def test_file_is_valid_says_what_it_is_and_no_paths_of_this_machine(path):
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert {p.key: p.value for p in model.metadata_props} == {"forecastle": canonical_json(METADATA)}
    assert TFTConfig.model_validate(json.loads(model.metadata_props[0].value)["config"]) == CONFIG
    assert str(export.__file__).encode() not in path.read_bytes()
    assert b"/torch/" not in path.read_bytes()


def test_float_checkpoint_of_the_same_values_exports_the_same_bytes(path):
    assert export.exported_bytes(snapshot(unpacked(packed(network())))) == path.read_bytes()


def test_weights_of_another_config_are_refused():
    with pytest.raises(CheckpointError):
        export.exported_bytes(snapshot({"quantile_heads.bias": torch.zeros(3)}))
