"""Readings of two models: stacks and fused layers are found by sizes and order of use."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jaxddp.parity.convert import Converter, NamesError
from jaxddp.parity.port import fused, part

E = 4
Shapes = dict[str, tuple[int, ...]]


class Block(nn.Module):
    """Layers that are defined in another order than they are used in."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(E, E)
        self.up = nn.Linear(E, E)
        self.norm = nn.LayerNorm(E)


class Net(nn.Module):
    def __init__(self, count: int = 3, **layers: nn.Module):
        super().__init__()
        self.h = nn.ModuleList([Block() for _ in range(count)])
        for name, layer in layers.items():
            setattr(self, name, layer)


USE = [f"h.{n}.{name}" for n in range(3) for name in ("norm", "up", "down")]


def dense(name: str, *shape: int, stack: tuple[int, ...] = ()) -> Shapes:
    return {f"{name}.kernel": (*stack, *shape), f"{name}.bias": (*stack, shape[-1])}


SCANNED = {
    "Blocks_0.Norm_0.scale": (3, E),
    "Blocks_0.Norm_0.bias": (3, E),
    **dense("Blocks_0.Dense_0", E, E, stack=(3,)),
    **dense("Blocks_0.Dense_1", E, E, stack=(3,)),
}
STACK = {"Blocks_0.Norm_0": "h.{}.norm", "Blocks_0.Dense_0": "h.{}.up", "Blocks_0.Dense_1": "h.{}.down"}


def tables(module: nn.Module, jax: Shapes, use: list[str], flax_use: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the tables that fit; each one converts."""
    with pytest.raises(NamesError) as caught:
        Converter(module, jax)
    found = [candidate.table for candidate in caught.value.candidates(flax_use or [], use)]
    for table in found:
        Converter(module, jax, table)
    return found


def test_numbered_layers_with_equal_arrays_are_a_stack() -> None:
    assert tables(Net(), SCANNED, USE) == [STACK]


def test_a_branch_of_a_stack_with_equal_names_is_one_line() -> None:
    jax = {name.replace("Norm_0", "norm").replace("Dense_0", "up"): shape for name, shape in SCANNED.items()}
    jax = {name.replace("Dense_1", "down"): shape for name, shape in jax.items()}
    assert tables(Net(), jax, USE) == [{"Blocks_0": "h.{}"}]


def test_layers_beside_a_stack_pair_off() -> None:
    module = Net(out=nn.Linear(E, 2))
    assert tables(module, SCANNED | dense("Dense_0", E, 2), USE) == [STACK | {"Dense_0": "out"}]


def test_a_stack_of_another_number_of_layers_is_none() -> None:
    assert tables(Net(count=2), SCANNED, USE) == []


def test_three_layers_that_are_as_large_as_one_are_its_parts_in_any_order() -> None:
    module = Net(0, c_attn=nn.Linear(E, 3 * E), c_proj=nn.Linear(E, E))
    jax = {**dense("Dense_0", E, E), **dense("Dense_1", E, E), **dense("Dense_2", E, E), **dense("Dense_3", E, E)}
    found = tables(module, jax, ["c_attn", "c_proj"])
    natural = {"Dense_3": "c_proj", **{f"Dense_{n}": part("c_attn", n, of=3) for n in range(3)}}
    assert found[0] == natural
    assert all(table["Dense_3"] == "c_proj" for table in found)
    assert len({str(table) for table in found}) == len(found) == 6
    # Used in another order, other layers are the parts.
    assert all(table["Dense_0"] == "c_proj" for table in tables(module, jax, ["c_proj", "c_attn"]))


def test_one_layer_that_is_as_large_as_three_is_these() -> None:
    module = Net(0, q=nn.Linear(E, E), k=nn.Linear(E, E), v=nn.Linear(E, E))
    found = tables(module, {"qkv.kernel": (E, 3, 2, 2), "qkv.bias": (3, 2, 2)}, ["q", "k", "v"])
    assert found[0] == {"qkv": fused("q", "k", "v")}


def test_the_number_of_heads_that_a_torch_module_says_is_read_in_any_order() -> None:
    module = Net(0, c_attn=nn.Linear(E, 3 * E))
    module.num_heads = 2
    found = tables(module, {**dense("q", E, E), **dense("k", E, E), **dense("v", E, E)}, ["c_attn"])
    assert len(found) == 12  # six orders, by head or not
    swapped = {"q": part("c_attn", 1, of=3, heads=2), "k": part("c_attn", 0, of=3, heads=2)}
    assert swapped | {"v": part("c_attn", 2, of=3, heads=2)} in found


def test_layers_of_different_branches_are_no_parts_of_one() -> None:
    module = Net(0, c_attn=nn.Linear(E, 3 * E))
    assert tables(module, {**dense("a.q", E, E), **dense("b.k", E, E), **dense("c.v", E, E)}, ["c_attn"]) == []


def test_parts_within_a_stack_are_found() -> None:
    module = nn.Module()
    module.h = nn.ModuleList([nn.ModuleDict({"c_attn": nn.Linear(E, 3 * E)}) for _ in range(2)])
    jax = {k: v for name in "qkv" for k, v in dense(f"blocks.{name}", E, 2, 2, stack=(2,)).items()}
    jax |= {f"blocks.{name}.bias": (2, 2, 2) for name in "qkv"}
    found = tables(module, jax, [])
    assert found[0] == {f"blocks.{name}": part("h.{}.c_attn", n, of=3) for n, name in enumerate("qkv")}


def test_bare_parameters_pair_off_by_shape() -> None:
    module = nn.Module()
    module.wpe, module.cls = nn.Parameter(torch.zeros(5, E)), nn.Parameter(torch.zeros(1, E))
    assert tables(module, {"position": (1, 5, E), "token": (1, 1, E)}, []) == [{"position": "wpe", "token": "cls"}]


def test_an_attention_of_flax_may_be_parts_of_a_torch_layer() -> None:
    module = Net(0, c_attn=nn.Linear(E, 3 * E), c_proj=nn.Linear(E, E))
    jax = {k: v for name in ("query", "key", "value") for k, v in dense(f"mha.{name}", E, 2, 2).items()}
    jax |= {f"mha.{name}.bias": (2, 2) for name in ("query", "key", "value")}
    jax |= {"mha.out.kernel": (2, 2, E), "mha.out.bias": (E,)}
    found = tables(module, jax, ["c_attn", "c_proj"])
    parts = {f"mha.{name}": part("c_attn", n, of=3) for n, name in enumerate(("query", "key", "value"))}
    assert found[0] == {"mha.out": "c_proj", **parts}


FIELDS = (7, 2, 5)
TABLES = {f"field_{n}.embedding": (size, E) for n, size in enumerate(FIELDS)}
ROWS = {f"field_{n}": part("table", n, of=FIELDS) for n in range(len(FIELDS))}


def test_a_table_of_all_fields_may_be_one_for_each_field() -> None:
    module = Net(table=nn.Embedding(sum(FIELDS), E), wide=nn.Embedding(sum(FIELDS), 1))
    wide = {f"wide_{n}.embedding": (size, 1) for n, size in enumerate(FIELDS)}
    one_by_one = {name: shape for pair in zip(TABLES.items(), wide.items(), strict=True) for name, shape in pair}
    rows = {f"wide_{n}": part("wide", n, of=FIELDS) for n in range(len(FIELDS))}
    assert tables(module, SCANNED | one_by_one, USE) == [STACK | rows | ROWS]


@pytest.mark.parametrize("fields", [FIELDS, (3, 3, 3, 3)])
def test_a_table_for_each_field_may_be_one_of_all(fields: tuple[int, ...]) -> None:
    module = Net(**{f"emb_{n}": nn.EmbeddingBag(size, E) for n, size in enumerate(fields)})
    found = tables(module, SCANNED | {"table.embedding": (sum(fields), E)}, USE)
    assert found == [STACK | {"table": fused(*(f"emb_{n}" for n in range(len(fields))))}]


def test_fields_that_are_used_out_of_their_order_have_two_readings() -> None:
    module = Net(table=nn.Embedding(sum(FIELDS), E))
    by_use = {f"field_{n}": part("table", place, of=(5, 7, 2)) for place, n in enumerate((2, 0, 1))}
    found = tables(module, SCANNED | TABLES, USE, ["field_2", "field_0", "field_1"])
    assert found == [STACK | by_use, STACK | ROWS]


def test_tables_are_read_beside_layers_in_parts() -> None:
    module = Net(0, table=nn.Embedding(sum(FIELDS), E), qkv=nn.Linear(E, 3 * E))
    found = tables(module, TABLES | {k: v for name in "qkv" for k, v in dense(name, E, E).items()}, ["table", "qkv"])
    assert {"q": part("qkv", 0, of=3), "k": part("qkv", 1, of=3), "v": part("qkv", 2, of=3)} | ROWS in found
    assert all(table.items() >= ROWS.items() for table in found)


@pytest.mark.parametrize("sizes", [(7, 2, 4), (7, 2, 5, 1), (7, 2)])
def test_tables_with_another_number_of_rows_are_no_parts(sizes: tuple[int, ...]) -> None:
    module = Net(table=nn.Embedding(sum(FIELDS), E))
    assert tables(module, SCANNED | {f"field_{n}.embedding": (size, E) for n, size in enumerate(sizes)}, USE) == []


def test_a_tied_tensor_needs_no_twin_of_its_own() -> None:
    module = Net(wte=nn.Embedding(7, E), head=nn.Linear(E, 7, bias=False))
    module.head.weight = module.wte.weight
    assert tables(module, SCANNED | {"Embed_0.embedding": (7, E)}, USE) == [STACK | {"Embed_0": "wte"}]
    both = SCANNED | {"Embed_0.embedding": (7, E), "Dense_0.kernel": (E, 7)}
    assert tables(module, both, USE) == [STACK | {"Embed_0": "wte", "Dense_0": "head"}]


def test_a_stack_of_torchs_attention_is_one_of_flaxs() -> None:
    module = nn.Module()
    module.layers = nn.ModuleList([nn.ModuleDict({"attn": nn.MultiheadAttention(E, 2)}) for _ in range(2)])
    jax = {f"blocks.mha.{name}.kernel": (2, E, 2, 2) for name in ("query", "key", "value")}
    jax |= {f"blocks.mha.{name}.bias": (2, 2, 2) for name in ("query", "key", "value")}
    jax |= {"blocks.mha.out.kernel": (2, 2, 2, E), "blocks.mha.out.bias": (2, E)}
    assert tables(module, jax, []) == [{"blocks.mha": "layers.{}.attn"}]


# Arrays of a plain function, in the order of their use; torch has an LSTM and a tied decoder.
CELL = {"cells.0.w_x": (2, 12), "cells.0.b_x": (12,), "cells.0.b_h": (12,), "cells.0.w_h": (3, 12)}
PLAIN = {"embedding": (7, 2), **CELL, "out": (3, 5), "bias": (5,)}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(7, 2)
        self.rnn = nn.LSTM(2, 3)
        self.decoder = nn.Linear(3, 5)


def test_arrays_without_layers_pair_off_one_by_one() -> None:
    module, use = Recurrent(), ["encoder", "rnn", "decoder"]
    in_another_order = dict(sorted(PLAIN.items()))
    (found,) = tables(module, in_another_order, use, [*PLAIN])
    assert found == {
        "embedding": "encoder.weight",
        "cells.0.w_x": "rnn.weight_ih_l0",
        "cells.0.b_x": "rnn.bias_ih_l0",
        "cells.0.b_h": "rnn.bias_hh_l0",
        "cells.0.w_h": "rnn.weight_hh_l0",
        "out": "decoder.weight",
        "bias": "decoder.bias",
    }
    arrays = Converter(module, PLAIN, found).to_jax({name: x.numpy() for name, x in module.state_dict().items()})
    np.testing.assert_array_equal(arrays["cells.0.w_h"], module.rnn.weight_hh_l0.detach().numpy().T)


def test_no_table_is_proposed_for_arrays_of_other_sizes() -> None:
    """As of a cell with one bias, where torch's has two: they train differently."""
    one_bias = {name: shape for name, shape in PLAIN.items() if name != "cells.0.b_h"}
    assert tables(Recurrent(), one_bias, []) == []


@pytest.mark.parametrize(("name", "shape"), [("weight_ih", (9, 3)), ("kernel", (3, 9)), ("w", (3, 9))])
def test_the_layout_of_a_recurrent_layers_matrices_is_read_off_their_shapes(name: str, shape: tuple[int, int]) -> None:
    module = nn.GRU(3, 3, bias=False)
    jax = {f"{name}_x": shape, f"{name}_h": shape}
    names = {f"{name}_x": "weight_ih_l0", f"{name}_h": "weight_hh_l0"}
    arrays = Converter(module, jax, names).to_jax({name: x.numpy() for name, x in module.state_dict().items()})
    expected = module.weight_ih_l0.detach().numpy()
    np.testing.assert_array_equal(arrays[f"{name}_x"], expected if shape == expected.shape else expected.T)
