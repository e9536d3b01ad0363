"""The Temporal Fusion Transformer over batches of S starts x K consecutive windows that share their rows. Whatever
depends on a row alone (variable selection, feature encoders) is computed once per row. S starts, K windows a start,
T history rows, H horizon rows, B = S x K windows, D hidden size, Q quantiles, V variables of a group."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.tft.config import TFTConfig
from models.tft.layers import (
    GatedResidual,
    GatedSkip,
    InterpretableAttention,
    Recompute,
    full_precision,
)
from models.tft.selection import VariableSelection


class Interpretation(NamedTuple):
    """Selection weights by group (static [S, V], historical [S, K+T-1, V], future [S, K+H-1, V]) and attention [B, H, T+H]."""

    static: Tensor
    historical: Tensor
    future: Tensor
    attention: Tensor


class GRNStack(nn.Module):
    """`layers` gated residual networks, one after the other; none passes its input on."""

    def __init__(self, layers: int, size: int, p: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GatedResidual(size, size, size, p) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TemporalFusionTransformer(nn.Module):
    """Quantiles [S, K, H, Q] in normalised units, rising along the last axis, from scaled inputs.

    `sizes` are the number of static, historical and future variables; each must be at least 1.
    """

    def __init__(self, config: TFTConfig, sizes: tuple[int, int, int]) -> None:
        super().__init__()
        if min(sizes) < 1:
            raise ValueError(f"the TFT needs a static, a historical and a future column at least; got {sizes}")
        D, p = config.hidden_size, config.dropout
        self.context, self.horizon = config.context, config.horizon
        self.recompute = Recompute(config.gradient_checkpointing)
        self.static_selection = VariableSelection(sizes[0], D, p, context=False)
        self.historical_selection = VariableSelection(sizes[1], D, p, context=True)
        self.future_selection = VariableSelection(sizes[2], D, p, context=True)
        self.static_encoder = GRNStack(config.grn_layers, D, p)
        self.historical_encoder = GRNStack(config.grn_layers, D, p)
        self.future_encoder = GRNStack(config.grn_layers, D, p)
        names = ("selection", "hidden", "cell", "enrichment")
        self.static_context = nn.ModuleDict({name: GatedResidual(D, D, D, p) for name in names})
        # One layer, no dropout inside: cuDNN's own dropout state would not be restored for recomputation
        self.lstm_encoder = nn.LSTM(D, D, batch_first=True)
        self.lstm_decoder = nn.LSTM(D, D, batch_first=True)
        self.lstm_skip = GatedSkip(D, p)
        self.enrichment = GatedResidual(D, D, D, p, context=True)
        self.attention = InterpretableAttention(D, config.num_heads, p)
        self.attention_skip = GatedSkip(D, p)
        self.position_wise = GatedResidual(D, D, D, p)
        self.output_skip = GatedSkip(D, p)
        self.quantile_heads = nn.Linear(D, len(config.quantiles))

    def forward(self, static_SV: Tensor, historical_SRV: Tensor, future_SRV: Tensor) -> Tensor:
        """Quantiles of static [S, V], historical [S, K+T-1, V] and future [S, K+H-1, V] inputs."""
        return self._run(static_SV, historical_SRV, future_SRV)[0]

    def interpret(self, static_SV: Tensor, historical_SRV: Tensor, future_SRV: Tensor) -> Interpretation:
        """Selection and attention weights of one batch, without gradients."""
        with torch.no_grad():
            return self._run(static_SV, historical_SRV, future_SRV)[1]

    def _run(self, static_SV: Tensor, historical_SRV: Tensor, future_SRV: Tensor) -> tuple[Tensor, Interpretation]:
        S, T, H = static_SV.shape[0], self.context, self.horizon  # len() would fix the size of an exported graph
        K = historical_SRV.shape[1] - T + 1
        recompute = self.recompute
        static_SD, static_weights = self.static_selection(static_SV, None, recompute, "static")
        static_SD = recompute("static encoder", self.static_encoder, static_SD)
        contexts = {name: grn(static_SD) for name, grn in self.static_context.items()}

        def rows(selection: VariableSelection, encoder: GRNStack, x_SRV: Tensor, name: str) -> tuple[Tensor, Tensor]:
            R = x_SRV.shape[1]
            context_RD = contexts["selection"].repeat_interleave(R, 0)
            flat, weights = selection(x_SRV.reshape(S * R, -1), context_RD, recompute, name)
            flat = recompute(f"{name} encoder", encoder, flat)
            return flat.view(S, R, -1), weights.view(S, R, -1)

        history_SRD, history_weights = rows(self.historical_selection, self.historical_encoder, historical_SRV, "historical")
        future_SRD, future_weights = rows(self.future_selection, self.future_encoder, future_SRV, "future")
        history_BTD = history_SRD.unfold(1, T, 1).transpose(2, 3).reshape(S * K, T, -1)
        future_BHD = future_SRD.unfold(1, H, 1).transpose(2, 3).reshape(S * K, H, -1)
        hidden_BD, cell_BD, enriching_BD = (contexts[name].repeat_interleave(K, 0) for name in ("hidden", "cell", "enrichment"))
        recurrent_BJD = recompute("lstm", self._recur, history_BTD, future_BHD, hidden_BD, cell_BD)
        temporal_BJD = self.lstm_skip(recurrent_BJD, torch.cat([history_BTD, future_BHD], 1))
        kept: list[Tensor] = []

        def attend(x_BJD: Tensor, context_BD: Tensor) -> Tensor:
            enriched_BJD = self.enrichment(x_BJD, context_BD.unsqueeze(1))
            attended_BHD, weights_BHJ = self.attention(enriched_BJD, H)
            if not torch.is_grad_enabled():
                kept.append(weights_BHJ)
            return self.position_wise(self.attention_skip(attended_BHD, enriched_BJD[:, T:]))

        decoded_BHD = recompute("attention", attend, temporal_BJD, enriching_BD)
        decoded_BHD = self.output_skip(decoded_BHD, temporal_BJD[:, T:])
        with full_precision(decoded_BHD):
            heads_BHQ = self.quantile_heads(decoded_BHD.to(self.quantile_heads.weight.dtype))
        # Never crossing: the lowest quantile, then steps that cannot be negative
        lowest, steps = heads_BHQ[..., :1], functional.softplus(heads_BHQ[..., 1:])
        quantiles_BHQ = torch.cat([lowest, lowest + torch.cumsum(steps, -1)], -1)
        attention = kept[0] if kept else torch.empty(0)
        interpretation = Interpretation(static_weights, history_weights, future_weights, attention)
        return quantiles_BHQ.view(S, K, H, -1), interpretation

    def _recur(self, history_BTD: Tensor, future_BHD: Tensor, hidden_BD: Tensor, cell_BD: Tensor) -> Tensor:
        # In full precision under autocast too: not every CPU has a bf16 LSTM
        with full_precision(history_BTD):
            state = tuple(x.to(history_BTD.dtype).unsqueeze(0) for x in (hidden_BD, cell_BD))
            encoded, state = self.lstm_encoder(history_BTD, state)
            decoded, _ = self.lstm_decoder(future_BHD.to(history_BTD.dtype), state)
        return torch.cat([encoded, decoded], 1)
