"""The TFT: exact algebra, true recomputation, no look-ahead. Every property is shown to catch a planted fault."""

import contextlib
import dataclasses
import math

import numpy as np
import pytest
import torch
from synthetic import series_arrays
from torch.nn import functional

import models.tft.layers as layers
from models.config import Split
from models.tft.config import TFTConfig
from models.tft.evaluation import forecast_block
from models.tft.layers import Recompute
from models.tft.loss import pinball
from models.tft.network import TemporalFusionTransformer
from models.tft.scaling import Frame, Scaler
from models.tft.selection import VariableSelection
from models.windows import WindowDataset, block_rows

SIZES = (3, 20, 4)


def config(**change):
    plain = {"context": 12, "horizon": 4, "hidden_size": 8, "num_heads": 2, "grn_layers": 2, "dropout": 0.3, "device": "cpu"}
    return TFTConfig(**{**plain, "windows_per_start": 3, **change})


def inputs(c, starts=4, windows=3, seed=1, dtype=torch.float32):
    torch.manual_seed(seed)
    T, H = c.context, c.horizon
    shapes = ((starts, SIZES[0]), (starts, windows + T - 1, SIZES[1]), (starts, windows + H - 1, SIZES[2]))
    return [torch.randn(s, dtype=dtype) for s in shapes], torch.randn(starts, windows, H, dtype=dtype)


def network(c, seed=0):
    torch.manual_seed(seed)
    return TemporalFusionTransformer(c, SIZES)


# --- the textbook form as an oracle --------------------------------------------------------------------------------


def textbook_selection(vsn, x_RV, context_RD):
    """Variable selection as in the paper: a loop of per-variable GRNs over embeddings that are made in full."""
    V, _ = vsn.embed_weight.shape
    embedded = [x_RV[:, v : v + 1] * vsn.embed_weight[v] + vsn.embed_bias[v] for v in range(V)]
    joint = torch.cat(embedded, 1)
    hidden = joint @ vsn.joint_first_weight.flatten(0, 1) + vsn.joint_first_bias
    if vsn.joint_context is not None:
        hidden = hidden + vsn.joint_context(context_RD)
    gated = functional.glu(vsn.joint_gate.linear(vsn.joint_second(functional.elu(hidden))))
    skip = joint @ vsn.joint_skip_weight.flatten(0, 1) + vsn.joint_skip_bias
    weights = torch.softmax(vsn.joint_norm(skip + gated), -1)
    out = 0.0
    for v in range(V):
        hidden = functional.elu(embedded[v] @ vsn.first_weight[v] + vsn.first_bias[v])
        hidden = hidden @ vsn.second_weight[v] + vsn.second_bias[v]
        gated = functional.glu(hidden @ vsn.gate_weight[v] + vsn.gate_bias[v])
        normed = functional.layer_norm(embedded[v] + gated, gated.shape[-1:], vsn.norm_weight[v], vsn.norm_bias[v])
        out = out + weights[:, v : v + 1] * normed
    return out, weights


def spread(module):
    """The module with every parameter moved from where it starts: a LayerNorm's ones and zeros hide faults."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return module


@pytest.mark.parametrize("variables", [1, 3, 40])
@pytest.mark.parametrize("setting", ["none", "full", 0.4])
def test_folded_chunked_selection_equals_the_textbook_loop(variables, setting):
    torch.manual_seed(0)
    vsn = spread(VariableSelection(variables, 8, 0.0, context=True).double())
    x = torch.randn(30, variables, dtype=torch.float64, requires_grad=True)
    context = torch.randn(30, 8, dtype=torch.float64, requires_grad=True)
    ours, weights = vsn(x, context, Recompute(setting), "historical")
    theirs, expected = textbook_selection(vsn, x, context)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)
    aim, leaves = torch.randn_like(ours), [x, context, *vsn.parameters()]
    gradients = torch.autograd.grad((ours * aim).sum(), leaves)
    for found, wanted in zip(gradients, torch.autograd.grad((theirs * aim).sum(), leaves), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        again, _ = vsn(x, context, Recompute(setting), "historical")
    assert torch.equal(again, ours)


def textbook_lstm(lstm, x_TD, hidden_D, cell_D):
    """One LSTM layer cell by cell: outputs [T, D] and the last state."""
    outputs = []
    for x_D in x_TD:
        gates = lstm.weight_ih_l0 @ x_D + lstm.bias_ih_l0 + lstm.weight_hh_l0 @ hidden_D + lstm.bias_hh_l0
        enter, forget, new, leave = gates.chunk(4)
        cell_D = torch.sigmoid(forget) * cell_D + torch.sigmoid(enter) * torch.tanh(new)
        hidden_D = torch.sigmoid(leave) * torch.tanh(cell_D)
        outputs.append(hidden_D)
    return torch.stack(outputs), hidden_D, cell_D


def textbook_grn(grn, x, context=None):
    hidden = grn.first(x) if context is None else grn.first(x) + grn.context(context)
    return grn.norm(x + functional.glu(grn.gate.linear(grn.second(functional.elu(hidden)))))


def textbook_skip(skip, x, residual):
    return skip.norm(residual + functional.glu(skip.gate.linear(x)))


def textbook_forecast(net, static_V, history_TV, future_HV):
    """Quantiles [H, Q] of one window, as in the paper: all T + H queries, a loop over heads, weights averaged."""
    T, H = net.context, net.horizon

    def encoded(selection, encoder, x_RV, context):
        x_RD, _ = textbook_selection(selection, x_RV, context)
        for layer in encoder.layers:
            x_RD = textbook_grn(layer, x_RD)
        return x_RD

    static_D = encoded(net.static_selection, net.static_encoder, static_V[None], None)[0]
    context = {name: textbook_grn(grn, static_D) for name, grn in net.static_context.items()}
    history = encoded(net.historical_selection, net.historical_encoder, history_TV, context["selection"])
    future = encoded(net.future_selection, net.future_encoder, future_HV, context["selection"])
    past, hidden, cell = textbook_lstm(net.lstm_encoder, history, context["hidden"], context["cell"])
    ahead, _, _ = textbook_lstm(net.lstm_decoder, future, hidden, cell)
    temporal = textbook_skip(net.lstm_skip, torch.cat([past, ahead]), torch.cat([history, future]))
    enriched = textbook_grn(net.enrichment, temporal, context["enrichment"])
    attention, value = net.attention, net.attention.value(enriched)
    size = value.shape[-1]
    heads = []
    for h in range(attention.heads):
        mine = slice(h * size, (h + 1) * size)
        scores = attention.query(enriched)[:, mine] @ attention.key(enriched)[:, mine].T / math.sqrt(size)
        mask = torch.full((T + H, T + H), -math.inf, dtype=scores.dtype).triu(1)
        heads.append(torch.softmax(scores + mask, -1) @ value)
    attended = attention.out(sum(heads) / len(heads))
    decoded = textbook_grn(net.position_wise, textbook_skip(net.attention_skip, attended, enriched))
    heads_HQ = net.quantile_heads(textbook_skip(net.output_skip, decoded, temporal)[T:])
    quantiles = [heads_HQ[:, 0]]
    for q in range(1, heads_HQ.shape[1]):
        quantiles.append(quantiles[-1] + functional.softplus(heads_HQ[:, q]))
    return torch.stack(quantiles, 1)


@pytest.mark.parametrize("gradient_checkpointing", ["none", "full"])
def test_network_equals_the_textbook_window_by_window(gradient_checkpointing):
    c = config(dropout=0.0, gradient_checkpointing=gradient_checkpointing)
    net = network(c).double()
    (static, history, future), target = inputs(c, starts=2, dtype=torch.float64)

    def both():
        """Outputs and gradients of the network and of the textbook form."""
        ours = net(static, history, future)
        windows = [
            textbook_forecast(net, static[s], history[s, k : k + c.context], future[s, k : k + c.horizon])
            for s in range(2)
            for k in range(3)
        ]
        theirs = torch.stack(windows).view_as(ours)
        parameters = list(net.parameters())
        gradients = [torch.autograd.grad(pinball(q, target, c.quantiles).mean(), parameters) for q in (ours, theirs)]
        return (ours, *gradients[0]), (theirs, *gradients[1])

    for found, wanted in zip(*both(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    if gradient_checkpointing == "none":  # planted: attention over rows shifted by one
        net.attention.forward = lambda x, horizon: type(net.attention).forward(net.attention, x.roll(1, 1), horizon)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(*(side[0] for side in both()), rtol=1e-12, atol=1e-12)


def test_windows_that_share_rows_equal_the_same_windows_fed_apart():
    c = config(dropout=0.0)
    net = network(c).double()
    (static, history, future), _ = inputs(c, dtype=torch.float64)
    shared = net(static, history, future)
    for k in range(3):
        apart = net(static, history[:, k : k + c.context], future[:, k : k + c.horizon])
        torch.testing.assert_close(shared[:, k : k + 1], apart, rtol=1e-12, atol=1e-12)


def test_every_parameter_gets_a_finite_gradient_that_is_somewhere_not_zero():
    c = config(gradient_checkpointing="full")
    net = network(c)
    x, target = inputs(c)
    pinball(net(*x), target, c.quantiles).mean().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_dropout_keeps_the_mean_and_the_share():
    torch.manual_seed(0)
    x = torch.ones(200_000)
    out = layers.dropout(x, 0.25, True)
    assert abs(float((out == 0).float().mean()) - 0.25) < 0.005
    assert abs(float(out.mean()) - 1) < 0.01
    assert layers.dropout(x, 0.25, False) is x
    assert torch.isfinite(layers.dropout(x, 0.999, True)).all()


def test_quantiles_never_cross_and_follow_static_features():
    c = config(quantiles=(0.05, 0.25, 0.5, 0.75, 0.95))
    net = network(c).eval()
    (static, history, future), _ = inputs(c)
    out = net(static * 30, history * 30, future)
    assert (out.diff(dim=-1) >= 0).all()
    changed = static.clone()
    changed[:, 1] += 1
    assert not torch.equal(net(static, history, future), net(changed, history, future))


def test_interpretation_weights_sum_to_one_and_attention_is_causal():
    c = config()
    net = network(c).eval()
    x, _ = inputs(c)
    found = net.interpret(*x)
    for weights in (found.static, found.historical, found.future, found.attention):
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    ahead = torch.ones(c.horizon, c.context + c.horizon).triu(c.context + 1).bool()
    assert (found.attention[:, ahead] == 0).all()


def test_pinball_matches_its_formula():
    loss = pinball(torch.tensor([[1.0, 3.0]]), torch.tensor([2.0]), (0.1, 0.9))
    assert loss.tolist() == [[pytest.approx(0.1), pytest.approx(0.1)]]


# --- no look-ahead -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def off_by_one():
    """A planted fault: windows whose history ends one row after the origin."""
    sound = WindowDataset.batch

    def shifted(self, starts, windows):
        batch = sound(self, starts, windows)
        back = starts[:, 1][:, None] + np.arange(2 - self.context, windows + 1)
        return dataclasses.replace(batch, historical=self.series.historical[back])

    WindowDataset.batch = shifted
    try:
        yield
    finally:
        WindowDataset.batch = sound


def forecast_of(series, origin, mode, gradient_checkpointing, anchor="ratio"):
    """The quantiles forecast from one origin, with a scaler fitted on this very series' train block."""
    c = config(gradient_checkpointing=gradient_checkpointing)
    rows = block_rows(series, Split(train=0.5, val=0.25), 0)
    scaler = Scaler.fit(series, rows["train"], series.target(None), anchor, c.horizon)
    windows = WindowDataset(series, np.array([[origin + 1, origin + 1 + c.horizon]]), c.context, c.horizon)
    batch = windows.batch(np.array([[0, origin]]), 1)
    net = network(c)
    torch.manual_seed(11)
    net.train(mode == "train")
    normalised = net(*scaler.inputs(batch, scaler.rows_of(series))).detach().double().numpy()
    return scaler.restore(normalised, scaler.frame(series, series.target(None)).at(batch.origins))


def changed_after(series, origin, random):
    """The same series with other targets, prices and historical values after `origin`."""
    after = np.arange(len(series.price)) > origin
    fresh = {}
    for name in ("price", "targets", "historical"):
        values = getattr(series, name).copy()
        values[after] = np.abs(random.normal(50, 20, values[after].shape)) + 1
        fresh[name] = values
    return dataclasses.replace(series, **fresh)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("gradient_checkpointing", ["none", "full"])
@pytest.mark.parametrize("anchor", ["ratio", "linear"])
def test_what_happens_after_the_origin_changes_no_forecast(mode, gradient_checkpointing, anchor):
    series = series_arrays({"AAA": 120})
    other = changed_after(series, 80, np.random.default_rng(5))
    before = forecast_of(series, 80, mode, gradient_checkpointing, anchor)
    assert np.array_equal(before, forecast_of(other, 80, mode, gradient_checkpointing, anchor))
    with off_by_one():
        assert not np.array_equal(
            forecast_of(series, 80, mode, gradient_checkpointing, anchor),
            forecast_of(other, 80, mode, gradient_checkpointing, anchor),
        )


@pytest.mark.parametrize("anchor", ["ratio", "difference", "linear"])
def test_planted_level_or_spread_of_a_later_row_is_caught(monkeypatch, anchor):
    series = series_arrays({"AAA": 120})
    other, sound = changed_after(series, 80, np.random.default_rng(5)), Frame.at
    for field in ("levels", "spreads"):

        def later(self, origins, field=field):
            return sound(self, origins)._replace(**{field: getattr(sound(self, origins + 1), field)})

        monkeypatch.setattr(Frame, "at", later)
        same = np.array_equal(*(forecast_of(s, 80, "eval", "none", anchor) for s in (series, other)))
        # With a linear anchor the spread is the series' own, the same at every row
        assert same == (anchor == "linear" and field == "spreads")


def test_scaler_learns_from_the_train_rows_alone():
    """Case: a scale jump after the train block; statistics equal those of the train rows to the last bit."""
    series = series_arrays({"AAA": 200})
    jump = {"price": series.price.copy(), "targets": series.targets.copy(), "historical": series.historical.copy()}
    for values in jump.values():
        values[170:] *= 1000
    train = block_rows(series, Split(), 10)["train"]
    assert train.tolist() == [[0, 140]]
    plain = Scaler.fit(series, train, series.target(None), "none", 4)
    jumped = dataclasses.replace(series, **jump)
    shifted = Scaler.fit(jumped, train, jumped.target(None), "none", 4)
    for name, values in plain._arrays().items():
        assert np.array_equal(values, getattr(shifted, name)), name
    assert plain.target_mean[0] == pytest.approx(series.price[:140].mean(), rel=1e-9)
    assert plain.target_scale[0] == pytest.approx(series.price[:140].std(), rel=1e-9)
    assert plain.historical_mean[0] == pytest.approx(series.historical[:140].astype(float).mean(0), abs=1e-9)


def test_static_columns_keep_their_differences_between_series():
    series = series_arrays({"AAA": 60, "BBB": 60})
    scaler = Scaler.fit(series, block_rows(series, Split(), 0)["train"], series.target(None), "none", 4)
    windows = WindowDataset(series, block_rows(series, Split(), 0)["train"], 12, 4)
    static, _, _ = scaler.inputs(windows.batch(np.array([[0, 20], [1, 80]]), 1), scaler.rows_of(series))
    assert not torch.equal(static[0], static[1])


@pytest.mark.parametrize("level", [1e-8, 1.0, 1e30])
def test_constant_and_extreme_values_stay_finite(level):
    series = series_arrays({"AAA": 80})
    historical = series.historical.copy()
    historical[:, 0], historical[:, 1] = level, historical[:, 1] * np.float32(level)
    extreme = dataclasses.replace(series, historical=historical, targets=series.targets * level)
    train = block_rows(extreme, Split(), 0)["train"]
    target = extreme.target(None)
    for anchor in ("none", "difference", "ratio", "linear"):
        scaler = Scaler.fit(extreme, train, target, anchor, config().horizon)
        assert scaler.historical_scale[0, 0] == 1.0
        windows = WindowDataset(extreme, train, 12, 4)
        found = forecast_block(network(config()), scaler, windows, target, scaler.frame(extreme, target), "cpu")
        assert np.isfinite(found.quantiles).all()
        assert np.isfinite(found.normalised_actual).all()


@pytest.mark.parametrize("anchor", ["none", "difference", "ratio"])
def test_normalising_and_restoring_are_inverse(anchor):
    series = series_arrays({"AAA": 80, "BBB": 40})
    scaler = Scaler.fit(series, block_rows(series, Split(), 0)["train"], series.target(None), anchor, 4)
    values = np.abs(np.random.default_rng(0).normal(30, 3, (2, 3, 4)))
    frame = scaler.frame(series, series.target(None)).at(np.array([[5, 6, 7], [90, 91, 92]]))
    there = scaler.normalise(values, frame)
    back = scaler.restore(there[..., None], frame)[..., 0]
    assert np.allclose(values, back, rtol=1e-12)
    assert math.isfinite(float(there.sum()))


def test_series_never_seen_is_forecast_with_pooled_statistics_and_a_warning(caplog):
    series = series_arrays({"AAA": 80, "BBB": 40})
    scaler = Scaler.fit(series, block_rows(series, Split(), 0)["train"], series.target(None), "none", 4)
    static = series.static.copy()
    static[0, 2] = 99
    fresh = dataclasses.replace(series, names=("NEWX", "BBB"), static=static)
    assert scaler.rows_of(fresh).tolist() == [2, 1]
    scaler.warn_unseen(series)
    assert not caplog.text
    scaler.warn_unseen(fresh)
    assert [r.getMessage() for r in caplog.records] == [
        "series NEWX: not in training, pooled statistics are used; static_002 is 99, a code never seen in training"
    ]
    caplog.clear()
    scaler.warn_unseen(dataclasses.replace(series, static=static))
    assert [r.getMessage() for r in caplog.records] == ["series AAA: static_002 is 99, a code never seen in training"]


def test_ratio_of_a_target_that_is_not_above_zero_is_refused_by_series():
    series = series_arrays({"AAA": 80, "BBB": 40})
    scaler = Scaler.fit(series, block_rows(series, Split(), 0)["train"], series.target(None), "auto", 4)
    target = series.target(None).copy()
    scaler.check_ratio(series, target, np.arange(120))
    target[115] = 0.0  # after the train block
    with pytest.raises(ValueError, match=r"above zero.*: BBB$"):
        scaler.check_ratio(series, target, np.arange(120))
    ahead = dataclasses.replace(series, history_rows=np.array([80, 35]))
    scaler.check_ratio(ahead, target, np.arange(120))  # a row to predict holds no target
