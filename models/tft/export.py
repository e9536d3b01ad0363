"""A trained TFT as an ONNX file, for forecasts without torch. Needs the extra `onnx`; what stays outside the graph is told in
docs/tft.md."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.checkpoint import METADATA_KEY, Snapshot, load_weights, write_atomically
from models.features import FeatureContract, canonical_json
from models.tft.config import TFTConfig
from models.tft.layers import Recompute
from models.tft.network import TemporalFusionTransformer
from models.tft.quantisation import unpacked
from models.tft.selection import VariableSelection

INPUTS = ("static", "historical", "future")
OUTPUT = "quantiles"
OPSET = 18


class PlainSelection(nn.Module):
    """`VariableSelection` in evaluation, without autograd functions, buffers and chunks, which an exporter cannot follow: all
    variables at once, embeddings folded in beforehand."""

    def __init__(self, selection: VariableSelection) -> None:
        super().__init__()
        self.selection = selection
        with torch.no_grad():
            joint, first = selection.folded()
        names = ("joint_first", "joint_first_bias", "joint_skip", "joint_skip_bias", "first", "first_bias")
        for name, tensor in zip(names, (*joint, *first), strict=True):
            self.register_buffer(name, tensor)

    def forward(self, x_RV: Tensor, context_RD: Tensor | None, recompute: Recompute, name: str) -> tuple[Tensor, Tensor]:
        """Selected features [R, D] and selection weights [R, V], as `VariableSelection.forward`."""
        of = self.selection
        joint = (self.joint_first, self.joint_first_bias, self.joint_skip, self.joint_skip_bias)
        weights_RV = of._weights(x_RV, *joint, context_RD)  # type: ignore[arg-type]
        x_VR1 = x_RV.t().unsqueeze(-1)
        hidden_VRD = functional.elu(x_VR1 * self.first.unsqueeze(1) + self.first_bias.unsqueeze(1))  # type: ignore[operator]
        hidden_VRD = torch.bmm(hidden_VRD, of.second_weight) + of.second_bias.unsqueeze(1)
        gated_VRD = functional.glu(torch.bmm(hidden_VRD, of.gate_weight) + of.gate_bias.unsqueeze(1), -1)
        embedded_VRD = x_VR1 * of.embed_weight.unsqueeze(1) + of.embed_bias.unsqueeze(1)
        normed_VRD = functional.layer_norm(gated_VRD + embedded_VRD, gated_VRD.shape[-1:])
        out_VRD = normed_VRD * of.norm_weight.unsqueeze(1) + of.norm_bias.unsqueeze(1)
        return (out_VRD * weights_RV.t().unsqueeze(-1)).sum(0), weights_RV


class _OneWindow(nn.Module):
    """The network with plain selections: [S, H, Q] of one window per start."""

    def __init__(self, network: TemporalFusionTransformer) -> None:
        super().__init__()
        self.network = copy.deepcopy(network)
        for group in INPUTS:
            name = f"{group}_selection"
            setattr(self.network, name, PlainSelection(getattr(self.network, name)))

    def forward(self, static: Tensor, historical: Tensor, future: Tensor) -> Tensor:
        return self.network(static, historical, future)[:, 0]


def exported_bytes(snapshot: Snapshot) -> bytes:
    """The ONNX model of a checkpoint: float32 `static` [S, V], `historical` [S, T, V] and `future` [S, H, V], scaled as in
    training, to `quantiles` [S, H, Q] in normalised units, for any S. Int8 weights become float32 again.

    Raises CheckpointError when weights and config do not fit.
    """
    config = TFTConfig.model_validate(snapshot.metadata["config"])
    sizes = FeatureContract.model_validate(snapshot.metadata["contract"]).sizes
    network = TemporalFusionTransformer(config, sizes)
    load_weights(network, unpacked(snapshot.part("network.")))
    module = _OneWindow(network).eval()
    starts = torch.export.Dim("starts", min=1)
    rows = {"historical": config.context, "future": config.horizon}
    shapes = [(2, *((rows[name],) if name in rows else ()), size) for name, size in zip(INPUTS, sizes, strict=True)]
    with torch.no_grad():
        program = torch.onnx.export(
            module, tuple(torch.zeros(shape) for shape in shapes), dynamo=True, opset_version=OPSET, verbose=False,
            input_names=INPUTS, output_names=[OUTPUT], dynamic_shapes=tuple({0: starts} for _ in shapes),
        )  # fmt: skip
    assert program is not None
    # Where the exporter stood in which source file: of no use to a reader, and not the same on every machine
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()
    program.model.metadata_props.clear()
    program.model.metadata_props[METADATA_KEY] = canonical_json(snapshot.metadata)
    return program.model_proto.SerializeToString(deterministic=True)


def export_onnx(snapshot: Snapshot, path: Path) -> None:
    """Write a checkpoint's forward pass to `path`, its metadata as one canonical JSON under `forecastle`."""
    write_atomically(path, exported_bytes(snapshot))
