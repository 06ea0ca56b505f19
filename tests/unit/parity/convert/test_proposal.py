"""Lines for a table of names are proposed by kinds of layers, their names and the order of their use."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jaxddp.parity.convert import Converter, NamesError
from jaxddp.parity.port import fused, part, summed

E = 4
Shapes = dict[str, tuple[int, ...]]


class Net(nn.Module):
    """Layers by name; several, or a dictionary of them, are a list or a module."""

    def __init__(self, **layers: Any):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, nn.ModuleList(layer) if isinstance(layer, list) else layer)


def stack(count: int = 3) -> list[nn.Module]:
    """Return blocks whose layers are defined in another order than they are used in."""
    return [Net(down=nn.Linear(E, E), up=nn.Linear(E, E), norm=nn.LayerNorm(E)) for _ in range(count)]


USE = [f"h.{n}.{name}" for n in range(3) for name in ("norm", "up", "down")]


def dense(*names: str, shape: tuple[int, ...] = (E, E), bias: int = 1) -> Shapes:
    """Return the arrays of layers whose biases have as many axes."""
    return {k: x for name in names for k, x in ((f"{name}.kernel", shape), (f"{name}.bias", shape[-bias:]))}


def stacked(arrays: Shapes, count: int = 3) -> Shapes:
    return {name: (count, *shape) for name, shape in arrays.items()}


NORM: Shapes = {"Blocks_0.Norm_0.scale": (E,), "Blocks_0.Norm_0.bias": (E,)}
SCANNED = stacked(NORM | dense("Blocks_0.Dense_0", "Blocks_0.Dense_1"))
STACK = {"Blocks_0.Norm_0": "h.{}.norm", "Blocks_0.Dense_0": "h.{}.up", "Blocks_0.Dense_1": "h.{}.down"}


def tables(module: nn.Module, jax: Shapes, use: list[str], jax_use: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the lines that give each array a twin, in each order of fused layers; all convert."""
    with pytest.raises(NamesError) as caught:
        Converter(module, jax)
    found = caught.value.propose(jax_use or [], use)
    tables = [{**found.lines, **order} for order in found.orders] if found.is_complete else []
    for table in tables:
        Converter(module, jax, table)
    return tables


def parts(layer: str, *names: str, heads: int | None = None) -> dict[str, Any]:
    return {name: part(layer, n, of=len(names), heads=heads) for n, name in enumerate(names)}


class OwnNorm(nn.Module):
    """A norm as models bring their own: nanoGPT's LayerNorm, a Llama's RMSNorm."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(E))
        self.bias = nn.Parameter(torch.zeros(E)) if bias else None


def norms(leaf: str, bias: bool) -> tuple[nn.Module, Shapes, list[str], dict[str, Any]]:
    module = Net(fc=nn.Linear(E, 1, bias=False), ln=OwnNorm(bias), ln_f=nn.LayerNorm(E))
    jax: Shapes = {f"Norm_0.{leaf}": (E,), f"Norm_1.{leaf}": (E,), "Norm_1.bias": (E,), "Dense_0.kernel": (E, 1)}
    jax |= {"Norm_0.bias": (E,)} if bias else {}
    return module, jax, [], {"Norm_0": "ln", "Norm_1": "ln_f", "Dense_0": "fc"}


def tied() -> nn.Module:
    module = Net(h=stack(), wte=nn.Embedding(7, E), head=nn.Linear(E, 7, bias=False))
    module.head.weight = module.wte.weight
    return module


Q_K_V = ("query", "key", "value")
ATTENTION = dense(*(f"mha.{name}" for name in Q_K_V), shape=(E, 2, 2), bias=2)
ATTENTION |= {"mha.out.kernel": (2, 2, E), "mha.out.bias": (E,)}
OF_TORCH = {f"mha.{name}": f"attn.{name}" for name in (*Q_K_V, "out")}
# Arrays of a plain function; torch has an LSTM.
CELL: Shapes = {"cells.0.w_x": (2, 12), "cells.0.b_x": (12,), "cells.0.b_h": (12,), "cells.0.w_h": (3, 12)}
PLAIN: Shapes = {"bias": (5,), **CELL, "embedding": (7, 2), "out": (3, 5)}
RECURRENT = Net(encoder=nn.Embedding(7, 2), rnn=nn.LSTM(2, 3), decoder=nn.Linear(3, 5))
WEIGHTS = {f"cells.0.{jax}": f"rnn.{torch}" for jax, torch in (("w_x", "weight_ih_l0"), ("w_h", "weight_hh_l0"))}
OF_CELL = WEIGHTS | {f"cells.0.{jax}": f"rnn.{torch}" for jax, torch in (("b_x", "bias_ih_l0"), ("b_h", "bias_hh_l0"))}

# Torch's module, jax's arrays, torch's layers in the order of their use, and the only lines.
ONE: dict[str, tuple[nn.Module, Shapes, list[str], dict[str, Any]]] = {
    "a stack": (Net(h=stack()), SCANNED, USE, STACK),
    "a stack and a layer": (
        Net(h=stack(), out=nn.Linear(E, 2)),
        SCANNED | dense("Dense_0", shape=(E, 2)),
        USE,
        STACK | {"Dense_0": "out"},
    ),
    "a stack beside an embedding, in a plain tree": (
        Net(tokens=nn.Embedding(11, 4), norm=nn.RMSNorm(4), layers=[nn.Linear(4, 4, bias=False) for _ in range(3)]),
        {"net.embedding": (11, 4), "net.norm": (4,), "net.decoder.proj": (3, 4, 4)},
        [],
        {"net.embedding": "tokens.weight", "net.norm": "norm.weight", "net.decoder.proj": "layers.{}.weight"},
    ),
    "a stack from 1": (
        Net(q1=nn.Linear(4, 1), q2=nn.Linear(4, 1), query=nn.Linear(4, 3)),
        {"kernel": (2, 4, 1), "bias": (2, 1)} | dense("Dense_0", shape=(4, 3)),
        [],
        {"kernel": "q{}.kernel", "bias": "q{}.bias", "Dense_0": "query"},
    ),
    "a stack from 1, in a plain tree": (
        Net(twin=Net(**{f"q{n}": Net(fc=nn.Linear(4, 1)) for n in (1, 2, 3)})),
        {"critics.w1": (3, 4, 1), "critics.b1": (3, 1)},
        [],
        {"critics.w1": "twin.q{}.fc.weight", "critics.b1": "twin.q{}.fc.bias"},
    ),
    "a stack of attentions": (
        Net(h=[Net(attn=nn.MultiheadAttention(E, 2)) for _ in range(2)]),
        stacked(ATTENTION, 2),
        [],
        {name: f"h.{{}}.{twin}" for name, twin in OF_TORCH.items()},
    ),
    "a stack of norms": (
        Net(h=[Net(ln=nn.LayerNorm(E)) for _ in range(3)]),
        {"blocks.norm.weight": (3, E), "blocks.norm.bias": (3, E)},
        [],
        {"blocks.norm": "h.{}.ln"},
    ),
    "an attention beside layers of its size": (
        Net(last=nn.Linear(E, E), attn=nn.MultiheadAttention(E, 2), first=nn.Linear(E, E)),
        ATTENTION | dense("Dense_0", "Dense_1"),
        ["attn", "first", "last"],
        OF_TORCH | {"Dense_0": "first", "Dense_1": "last"},
    ),
    "keys of another size": (
        Net(attn=nn.MultiheadAttention(E, 2, kdim=3, bias=False)),
        {"a.q.w": (E, E), "a.k.w": (3, E), "a.v.w": (E, E), "a.o.w": (E, E)},
        [],
        {f"a.{name[0]}": f"attn.{name}" for name in (*Q_K_V, "out")},
    ),
    **{
        f"an {kind.__name__}": (
            Net(words=kind(E, E), fc=nn.Linear(E, E, bias=False)),
            {"Embed_0.embedding": (E, E), "Dense_0.kernel": (E, E)},
            [],
            {"Embed_0": "words", "Dense_0": "fc"},
        )
        for kind in (nn.Embedding, nn.EmbeddingBag)
    },
    "a tied layer": (tied(), SCANNED | {"Embed_0.embedding": (7, E)}, USE, STACK | {"Embed_0": "wte"}),
    "two tied layers": (
        tied(),
        SCANNED | {"Embed_0.embedding": (7, E), "Dense_0.kernel": (E, 7)},
        USE,
        STACK | {"Embed_0": "wte", "Dense_0": "head"},
    ),
    "arrays of the model itself": (
        Net(fc=nn.Linear(3, 5), head=nn.ParameterDict({"bias": torch.zeros(2)})),
        {"kernel": (3, 5), "bias": (5,), "out.bias": (2,)},
        [],
        {"kernel": "fc.kernel", "bias": "fc.bias", "out": "head"},  # "" is no prefix of a name
    ),
    "bare parameters": (
        nn.ParameterDict({"wpe": torch.zeros(5, E), "cls": torch.zeros(1, E)}),
        {"position": (1, 5, E), "token": (1, 1, E)},
        [],
        {"position": "wpe", "token": "cls"},
    ),
    "a counter": (
        Net(bn=nn.BatchNorm1d(3)),
        {f"norm.{leaf}": (3,) for leaf in ("scale", "bias", "mean", "var")} | {"norm.num_batches_tracked": ()},
        [],
        {"norm": "bn"},
    ),
    **{f"a norm with {leaf}, {bias}": norms(leaf, bias) for leaf in ("scale", "weight") for bias in (True, False)},
    "an LSTM": (
        RECURRENT,
        PLAIN,
        ["encoder", "rnn", "decoder"],
        OF_CELL | {"embedding": "encoder.weight", "out": "decoder.weight", "bias": "decoder.bias"},
    ),
    "an LSTM with one bias": (
        Net(rnn=nn.LSTM(2, 3)),
        {name: x for name, x in CELL.items() if name != "cells.0.b_h"},
        [],
        {**WEIGHTS, "cells.0.b_x": summed("rnn.bias_ih_l0", "rnn.bias_hh_l0")},
    ),
    "an LSTM with one bias and two layers": (
        Net(rnn=nn.LSTM(3, 3, 2)),
        {f"cells.{n}.{name}": shape for n in range(2) for name, shape in (("weight_ih", (12, 3)), ("b", (12,)))}
        | {f"cells.{n}.weight_hh": (12, 3) for n in range(2)},
        [],
        {
            f"cells.{n}.{jax}": torch
            for n in range(2)
            for jax, torch in (
                ("weight_ih", f"rnn.weight_ih_l{n}"),
                ("weight_hh", f"rnn.weight_hh_l{n}"),
                ("b", summed(f"rnn.bias_ih_l{n}", f"rnn.bias_hh_l{n}")),
            )
        },
    ),
    "a stack of cells with one bias": (
        Net(cells=[nn.LSTMCell(2, 3) for _ in range(2)]),
        {"w_x": (2, 2, 12), "w_h": (2, 3, 12), "b": (2, 12)},
        [],
        {
            "w_x": "cells.{}.weight_ih",
            "w_h": "cells.{}.weight_hh",
            "b": summed("cells.{}.bias_ih", "cells.{}.bias_hh"),
        },
    ),
    "a GRU with one bias, and one of the candidate": (
        Net(rnn=nn.GRUCell(2, 3)),
        {"cells.0.w_x": (2, 9), "cells.0.w_h": (3, 9), "cells.0.b": (9,), "cells.0.b_n": (3,)},
        [],
        {
            "cells.0.w_x": "rnn.weight_ih",
            "cells.0.w_h": "rnn.weight_hh",
            "cells.0.b": summed("rnn.bias_ih", part("rnn.bias_hh", 0, of=(6, 3))),
            "cells.0.b_n": part("rnn.bias_hh", 1, of=(6, 3)),
        },
    ),
}


@pytest.mark.parametrize(("module", "jax", "use", "lines"), ONE.values(), ids=ONE)
def test_each_array_gets_a_line(module: nn.Module, jax: Shapes, use: list[str], lines: dict[str, Any]) -> None:
    assert tables(module, jax, use, [*CELL]) == [lines]


FUSED = Net(c_attn=nn.Linear(E, 3 * E), c_proj=nn.Linear(E, E))
BY_HEAD = Net(c_attn=nn.Linear(E, 3 * E))
BY_HEAD.num_heads = 2
SEVERAL: dict[str, tuple[nn.Module, Shapes, list[str], dict[str, Any], int]] = {
    "parts": (
        FUSED,
        dense("Dense_0", "Dense_1", "Dense_2", "Dense_3"),
        ["c_attn", "c_proj"],
        {"Dense_3": "c_proj", **parts("c_attn", "Dense_0", "Dense_1", "Dense_2")},
        6,
    ),
    "parts used last": (
        FUSED,
        dense("Dense_0", "Dense_1", "Dense_2", "Dense_3"),
        ["c_proj", "c_attn"],
        {"Dense_0": "c_proj", **parts("c_attn", "Dense_1", "Dense_2", "Dense_3")},
        6,
    ),
    "an attention": (
        FUSED,
        ATTENTION,
        ["c_attn", "c_proj"],
        {"mha.out": "c_proj", **parts("c_attn", *(f"mha.{name}" for name in Q_K_V))},
        6,
    ),
    "parts within a stack": (
        Net(h=[Net(c_attn=nn.Linear(E, 3 * E)) for _ in range(2)]),
        stacked(dense("blocks.q", "blocks.k", "blocks.v", shape=(E, 2, 2), bias=2), 2),
        [],
        parts("h.{}.c_attn", "blocks.q", "blocks.k", "blocks.v"),
        6,
    ),
    "one layer": (
        Net(q=nn.Linear(E, E), k=nn.Linear(E, E), v=nn.Linear(E, E)),
        dense("qkv", shape=(E, 3, 2, 2), bias=3),
        ["q", "k", "v"],
        {"qkv": fused("q", "k", "v")},
        6,
    ),
    "torch's attention in one layer": (
        Net(attn=nn.MultiheadAttention(E, 2)),
        dense("qkv", shape=(E, 3 * E)) | dense("out"),
        ["attn"],
        {"qkv": fused("attn.query", "attn.key", "attn.value"), "out": "attn.out"},
        12,
    ),
    "by head": (BY_HEAD, dense("q", "k", "v"), [], parts("c_attn", "q", "k", "v"), 12),
}


@pytest.mark.parametrize(("module", "jax", "use", "first", "count"), SEVERAL.values(), ids=SEVERAL)
def test_parts_of_a_layer_are_found_in_each_order(
    module: nn.Module, jax: Shapes, use: list[str], first: dict[str, Any], count: int
) -> None:
    found = tables(module, jax, use)
    assert found[0] == first
    assert len({str(table) for table in found}) == len(found) == count
    swapped = {name: part("c_attn", n, of=3, heads=2) for n, name in ((1, "q"), (0, "k"), (2, "v"))}
    assert (swapped in found) == (module is BY_HEAD)


NONE: dict[str, tuple[nn.Module, Shapes, str]] = {
    "another number of layers": (Net(h=stack(2)), SCANNED, "jax's Blocks_0.Norm_0, Blocks_0.Dense_0, "),
    "parts of several branches": (
        Net(c_attn=nn.Linear(E, 3 * E)),
        dense("a.q", "b.k", "c.v"),
        "jax's a.q, b.k, c.v and torch's c_attn: they differ in size or number",
    ),
    "other arrays": (
        RECURRENT,
        {name: x for name, x in PLAIN.items() if name not in ("cells.0.b_h", "cells.0.b_x")},
        "jax's (model), cells.0.w_x, ",
    ),
}


@pytest.mark.parametrize(("module", "jax", "why"), NONE.values(), ids=NONE)
def test_what_has_no_counterpart_is_named(module: nn.Module, jax: Shapes, why: str) -> None:
    with pytest.raises(NamesError) as caught:
        Converter(module, jax)
    found = caught.value.propose()
    assert not found.is_complete and found.why.startswith(f"no table is proposed for {why}")


LAYERS: Shapes = {"Dense_0.kernel": (3, E), "Norm_0.scale": (E,), "Norm_0.bias": (E,), **dense("Dense_1", shape=(E, 2))}
LAYERS_TABLE = {"Dense_0": "fc", "Norm_0": "norm", "Dense_1": "out"}
KERNELS = {name: shape for name, shape in ATTENTION.items() if name.endswith("kernel")}


def layers(bias: bool) -> Net:
    return Net(fc=nn.Linear(3, E, bias=bias), norm=nn.LayerNorm(E), out=nn.Linear(E, 2))


# Torch's module, jax's arrays, the only lines, and each bias of one side with what is said of it.
LONELY: dict[str, tuple[nn.Module, Shapes, dict[str, Any], dict[str, str]]] = {
    "torch alone": (
        layers(bias=True),
        LAYERS,
        LAYERS_TABLE,
        {"fc.bias": "jax: give jax's Dense_0 a bias (use_bias=True), or torch's fc none (bias=False)"},
    ),
    "jax alone": (
        layers(bias=False),
        {**LAYERS, "Dense_0.bias": (E,)},
        LAYERS_TABLE,
        {"Dense_0.bias": "there: give torch's fc a bias (bias=True), or jax's Dense_0 none (use_bias=False)"},
    ),
    "a plain tree": (
        Net(fc=nn.Linear(3, E), out=nn.Linear(E, 2)),
        {"w1": (3, E), "w2": (E, 2), "b2": (2,)},
        {"w1": "fc.weight", "w2": "out.weight", "b2": "out.bias"},
        {"fc.bias": "jax: give jax's w1 a bias (use_bias=True), or torch's fc none (bias=False)"},
    ),
    "a stack": (
        Net(h=[nn.Linear(3, E) for _ in range(2)]),
        {"blocks.kernel": (2, 3, E)},
        {"blocks": "h.{}"},
        {
            f"h.{n}.bias": f"jax: give jax's blocks a bias (use_bias=True), or torch's h.{n} none (bias=False)"
            for n in range(2)
        },
    ),
    "an attention": (
        Net(attn=nn.MultiheadAttention(E, 2)),
        KERNELS,
        {"mha": "attn"},
        {
            "attn.in_proj_bias": "jax: give jax's mha.key, mha.query, mha.value a bias (use_bias=True), or torch's "
            "attn none (bias=False)",
            "attn.out_proj.bias": "jax: give jax's mha.out a bias (use_bias=True), or torch's attn.out_proj none "
            "(bias=False)",
        },
    ),
}


@pytest.mark.parametrize(("module", "jax", "lines", "says"), LONELY.values(), ids=LONELY)
def test_a_bias_of_one_side_is_named_and_all_else_pairs_off(
    module: nn.Module, jax: Shapes, lines: dict[str, Any], says: dict[str, str]
) -> None:
    with pytest.raises(NamesError) as caught:
        Converter(module, jax)
    found = caught.value.propose()
    assert (found.certain({}), found.is_complete, found.alone) == (lines, False, (*says,))
    with pytest.raises(NamesError) as caught:
        Converter(module, jax, lines)
    for told in (found.why, str(caught.value)):
        assert [*says] == re.findall(r"(?:torch|jax)'s (\S+) \(\d+,\) has no twin", told)
        assert all(what in told for what in says.values())


STATISTICS: Shapes = {"bn.mean": (E,), "bn.var": (E,)}


@pytest.mark.parametrize("names", [{}, {"a": "fc", "bn": "norm"}], ids=["no names", "names"])
@pytest.mark.parametrize(
    ("is_tracking", "buffers", "alone"),
    [(True, {}, ("norm.running_mean", "norm.running_var")), (False, STATISTICS, (*STATISTICS,))],
    ids=["torch alone", "jax alone"],
)
def test_statistics_of_one_side_are_named(
    is_tracking: bool, buffers: Shapes, alone: tuple[str, ...], names: dict[str, str]
) -> None:
    module = Net(fc=nn.Linear(3, E), norm=nn.BatchNorm1d(E, track_running_stats=is_tracking))
    jax = dense("a", shape=(3, E)) | {"bn.scale": (E,), "bn.bias": (E,)} | buffers
    with pytest.raises(NamesError) as caught:
        Converter(module, jax, names)
    assert caught.value.propose().alone == alone
    found = caught.value.propose(constants=alone)
    assert found.is_complete and not found.alone
    Converter(module, jax, found.certain(names), no_twin=alone)


def test_kinds_of_which_one_side_has_more_are_left_out() -> None:
    module = Net(attn=nn.MultiheadAttention(E, 2), norm=nn.LayerNorm(E), fc=nn.Linear(E, 3))
    with pytest.raises(NamesError) as caught:
        Converter(module, ATTENTION | {"Norm_0.scale": (E,), "Norm_0.bias": (E,)})
    assert str(caught.value).endswith("; perhaps names = {'mha': 'attn', 'Norm_0': 'norm'}")


def test_a_branch_gets_no_line_that_would_move_a_layer_whose_names_agree() -> None:
    module = Net(a=Net(x=nn.Linear(2, 3)), b=Net(y=nn.Linear(3, 4)))
    with pytest.raises(NamesError, match=r"perhaps names = \{'a\.y': 'b\.y'\}$"):
        Converter(module, dense("a.x", shape=(2, 3)) | dense("a.y", shape=(3, 4)))


@pytest.mark.parametrize(("name", "shape"), [("weight_ih", (9, 3)), ("kernel", (3, 9)), ("w", (3, 9))])
def test_the_layout_of_a_recurrent_layers_matrices_is_read_off_their_shapes(name: str, shape: tuple[int, int]) -> None:
    module = nn.GRU(3, 3, bias=False)
    jax = {f"{name}_x": shape, f"{name}_h": shape}
    names = {f"{name}_x": "weight_ih_l0", f"{name}_h": "weight_hh_l0"}
    arrays = Converter(module, jax, names).to_jax({name: x.numpy() for name, x in module.state_dict().items()})
    expected = module.weight_ih_l0.detach().numpy()
    np.testing.assert_array_equal(arrays[f"{name}_x"], expected if shape == expected.shape else expected.T)


def test_of_a_gru_without_the_candidates_second_bias_the_rest_is_paired() -> None:
    with pytest.raises(NamesError) as caught:
        Converter(Net(rnn=nn.GRU(2, 3)), {"dense_i.kernel": (2, 9), "dense_i.bias": (9,), "dense_h.kernel": (3, 9)})
    found = caught.value.propose()
    assert found.lines == {
        "dense_i.kernel": "rnn.weight_ih_l0",
        "dense_h.kernel": "rnn.weight_hh_l0",
        "dense_i.bias": summed("rnn.bias_ih_l0", part("rnn.bias_hh_l0", 0, of=(6, 3))),
    }
    assert found.why == "torch's rnn.bias_hh_l0 (9,) has no twin in jax for its outputs 6:9" and not found.is_complete
