"""Rules of `names`: each maps torch's tensors to the jax arrays that compute the same, and back."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from jax import numpy as jnp
from torch import nn
from transformers.pytorch_utils import Conv1D

from jaxddp.errors import InputError
from jaxddp.nn.functional import Functional
from jaxddp.parity.convert import Converter
from jaxddp.parity.port import Names, Rule, flattened, fused, part, summed, transposed
from jaxddp.parity.sums import folded

Shapes = dict[str, tuple[int, ...]]
E, H, D = 6, 2, 3  # inputs, heads, size of a head


def tensors_of(module: nn.Module) -> dict[str, np.ndarray]:
    """Return distinct values under the names of a state_dict."""
    return {
        name: (1000 * number + np.arange(tensor.numel())).reshape(tensor.shape).astype(float)
        for number, (name, tensor) in enumerate(module.state_dict().items())
    }


def converted(module: nn.Module, shapes: Shapes, names: Names) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Convert to jax and back, which changes nothing; return torch's tensors and jax's arrays."""
    converter, tensors = Converter(module, shapes, names), tensors_of(module)
    arrays = converter.to_jax(tensors)
    assert {name: x.shape for name, x in arrays.items()} == shapes
    with jax.enable_x64(True):
        in_program = jax.jit(partial(converter.to_torch, library=jnp))(arrays)
    for back in (converter.to_torch(arrays), in_program):
        assert back.keys() == tensors.keys()
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(back[name], tensor, name)
    return tensors, arrays


def linear(*shape: int) -> Shapes:
    return {"kernel": shape, "bias": shape[1:]}


def layers(**of: Shapes) -> Shapes:
    return {f"{layer}.{leaf}": shape for layer, shapes in of.items() for leaf, shape in shapes.items()}


class Layers(nn.Module):
    """Layers by name, those with several in a list."""

    def __init__(self, **layers: Any):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, nn.ModuleList(layer) if isinstance(layer, list) else layer)


def qkv(**options: Any) -> nn.Module:
    return Layers(**{name: nn.Linear(E, H * D, **options) for name in "qkv"})


def test_a_stack_holds_a_layer_in_each_row() -> None:
    module = Layers(h=[nn.Linear(3, 2) for _ in range(4)])
    tensors, arrays = converted(module, layers(blocks={"kernel": (4, 3, 2), "bias": (4, 2)}), {"blocks": "h.{}"})
    for n in range(4):
        np.testing.assert_array_equal(arrays["blocks.kernel"][n], tensors[f"h.{n}.weight"].T)
        np.testing.assert_array_equal(arrays["blocks.bias"][n], tensors[f"h.{n}.bias"])


def test_stacks_may_be_nested() -> None:
    module = Layers(stages=[Layers(layers=[nn.LayerNorm(2) for _ in range(3)]) for _ in range(2)])
    shapes = {"norm.scale": (2, 3, 2), "norm.bias": (2, 3, 2)}
    tensors, arrays = converted(module, shapes, {"norm": "stages.{}.layers.{}"})
    np.testing.assert_array_equal(arrays["norm.scale"][1, 2], tensors["stages.1.layers.2.weight"])


def test_torchs_layers_of_a_stack_may_count_from_one() -> None:
    module = Layers(q1=nn.Linear(3, 2), q2=nn.Linear(3, 2))
    shapes = {"kernel": (2, 3, 2), "bias": (2, 2)}
    tensors, arrays = converted(module, shapes, {"kernel": "q{}.weight", "bias": "q{}.bias"})
    np.testing.assert_array_equal(arrays["kernel"][1], tensors["q2.weight"].T)
    with pytest.raises(InputError, match=r"holds 3 layers, torch has 2 q\{\}"):
        converted(module, {"kernel": (3, 3, 2), "bias": (3, 2)}, {"kernel": "q{}.weight", "bias": "q{}.bias"})


def test_a_stack_may_hold_bare_parameters() -> None:
    module = Layers(w=nn.ParameterList(torch.zeros(2, 5) for _ in range(3)))
    tensors, arrays = converted(module, {"blocks.w": (3, 2, 5)}, {"blocks.w": "w.{}"})
    np.testing.assert_array_equal(arrays["blocks.w"][2], tensors["w.2"])


def test_layers_below_a_stack_may_have_lines_of_their_own() -> None:
    module = Layers(h=[Layers(ln=nn.LayerNorm(E), c_attn=nn.Linear(E, 3 * E)) for _ in range(2)])
    shapes = {"blocks.ln.scale": (2, E), "blocks.ln.bias": (2, E)}
    shapes |= layers(**{f"blocks.{name}": {"kernel": (2, E, H, D), "bias": (2, H, D)} for name in "qkv"})
    names = {"blocks": "h.{}", **{f"blocks.{name}": part("h.{}.c_attn", n, of=3) for n, name in enumerate("qkv")}}
    tensors, arrays = converted(module, shapes, names)
    np.testing.assert_array_equal(arrays["blocks.k.kernel"][1].reshape(E, E), tensors["h.1.c_attn.weight"][E : 2 * E].T)


def test_arrays_made_by_nnx_vmap_compute_what_torchs_layers_do() -> None:
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(2))).double()

    class Net(nnx.Module):
        def __init__(self) -> None:
            make = nnx.vmap(lambda key: nnx.Linear(3, 3, param_dtype=np.float64, rngs=nnx.Rngs(key)))
            self.blocks = make(jax.random.split(jax.random.key(0), 2))

    with jax.enable_x64(True):
        functional, x = Functional(Net()), np.random.default_rng(0).normal(size=(4, 3))
        shapes = {name: value.shape for name, value in functional.params.items()}
        arrays = Converter(module, shapes, {"blocks": "{}"}).to_jax(
            {name: tensor.numpy() for name, tensor in module.state_dict().items()}
        )
        model = functional.module({name: jax.numpy.asarray(array) for name, array in arrays.items()}, {})
        y = nnx.scan(lambda y, layer: (layer(y), None), in_axes=(nnx.Carry, 0))(jax.numpy.asarray(x), model.blocks)[0]
    with torch.no_grad():
        assert np.abs(np.asarray(y) - module(torch.from_numpy(x)).numpy()).max() < 1e-14  # measured: 2e-16


@pytest.mark.parametrize("out", [(18,), (3, 6), (3, H, D)])
def test_a_fused_layer_holds_the_outputs_of_several(out: tuple[int, ...]) -> None:
    tensors, arrays = converted(qkv(), layers(qkv=linear(E, *out)), {"qkv": fused("q", "k", "v")})
    kernel = np.concatenate([tensors[f"{name}.weight"].T for name in "qkv"], axis=1)
    np.testing.assert_array_equal(arrays["qkv.kernel"].reshape(E, -1), kernel)
    np.testing.assert_array_equal(arrays["qkv.bias"].ravel(), np.concatenate([tensors[f"{n}.bias"] for n in "qkv"]))


def test_a_fused_layer_may_hold_its_outputs_by_head() -> None:
    tensors, arrays = converted(qkv(), layers(qkv=linear(E, H, 3, D)), {"qkv": fused("q", "k", "v", heads=H)})
    for n, name in enumerate("qkv"):
        theirs = tensors[f"{name}.weight"].T.reshape(E, H, D)
        np.testing.assert_array_equal(arrays["qkv.kernel"][:, :, n], theirs)


def test_fused_layers_may_differ_in_size() -> None:
    module = Layers(q=nn.Linear(E, 6), k=nn.Linear(E, 2), v=nn.Linear(E, 2))
    tensors, arrays = converted(module, layers(qkv=linear(E, 10)), {"qkv": fused("q", "k", "v")})
    np.testing.assert_array_equal(arrays["qkv.kernel"][:, 6:8], tensors["k.weight"].T)


@pytest.mark.parametrize("heads", [None, H])
@pytest.mark.parametrize("conv1d", [False, True])
def test_layers_are_parts_of_a_fused_one(heads: int | None, conv1d: bool) -> None:
    module = Layers(c_attn=Conv1D(3 * H * D, E) if conv1d else nn.Linear(E, 3 * H * D))
    names = {name: part("c_attn", n, of=3, heads=heads) for n, name in enumerate("qkv")}
    tensors, arrays = converted(module, layers(**{name: linear(E, H, D) for name in "qkv"}), names)
    kernel = tensors["c_attn.weight"] if conv1d else tensors["c_attn.weight"].T
    theirs = kernel.reshape(E, 3, H, D) if heads is None else kernel.reshape(E, H, 3, D).swapaxes(1, 2)
    for n, name in enumerate("qkv"):
        np.testing.assert_array_equal(arrays[f"{name}.kernel"], theirs[:, n])


def test_parts_may_differ_in_size() -> None:
    names = {name: part("qkv", n, of=(6, 2, 2)) for n, name in enumerate("qkv")}
    shapes = layers(q=linear(E, 6), k=linear(E, 2), v=linear(E, 2))
    tensors, arrays = converted(Layers(qkv=nn.Linear(E, 10)), shapes, names)
    np.testing.assert_array_equal(arrays["v.kernel"], tensors["qkv.weight"][8:].T)


def test_conv1d_is_not_transposed_though_square() -> None:
    tensors, arrays = converted(Layers(fc=Conv1D(E, E)), layers(fc=linear(E, E)), {})
    np.testing.assert_array_equal(arrays["fc.kernel"], tensors["fc.weight"])


def test_axes_of_any_array_may_be_transposed() -> None:
    module = nn.Module()
    module.position = nn.Parameter(torch.zeros(2, 5, 4))
    tensors, arrays = converted(module, {"pos": (5, 4, 2)}, {"pos": transposed("position", (1, 2, 0))})
    np.testing.assert_array_equal(arrays["pos"], tensors["position"].transpose(1, 2, 0))


def test_axes_of_size_one_need_no_rule() -> None:
    module = nn.Module()
    module.position = nn.Parameter(torch.zeros(1, 5, 4))
    converted(module, {"position": (5, 4)}, {})


@pytest.mark.parametrize("image", [(3, 2, 4), (3, 8), (2, 3, 2, 2)])
def test_a_flattened_image_has_its_channels_last_in_flax(image: tuple[int, ...]) -> None:
    names = {"fc": flattened("fc1", image)}
    tensors, arrays = converted(Layers(fc1=nn.Linear(24, 5)), layers(fc=linear(24, 5)), names)
    x = np.random.default_rng(0).integers(-9, 9, (7, *image)).astype(float)
    expected = x.reshape(7, -1) @ tensors["fc1.weight"].T
    np.testing.assert_array_equal(np.moveaxis(x, 1, -1).reshape(7, -1) @ arrays["fc.kernel"], expected)
    np.testing.assert_array_equal(arrays["fc.bias"], tensors["fc1.bias"])


def test_a_norm_of_a_flattened_image_is_in_its_order() -> None:
    shapes = {"bn.scale": (6,), "bn.bias": (6,), "bn.mean": (6,), "bn.var": (6,)}
    names = {"bn": flattened("bn", (3, 2))}
    module = Layers(bn=nn.BatchNorm1d(6, track_running_stats=True))
    del module.bn.num_batches_tracked
    tensors, arrays = converted(module, shapes, names)
    np.testing.assert_array_equal(arrays["bn.mean"], tensors["bn.running_mean"].reshape(3, 2).T.ravel())


def test_some_arrays_convert_without_the_others() -> None:
    names: Names = {"fc": flattened("fc1", (3, 2)), "blocks": "h.{}"}
    module = Layers(fc1=nn.Linear(6, 2), h=[nn.Linear(2, 2) for _ in range(2)])
    shapes = layers(fc=linear(6, 2), blocks={"kernel": (2, 2, 2), "bias": (2, 2)})
    moments = {"fc.kernel": np.arange(12.0).reshape(6, 2), "blocks.bias": np.arange(4.0).reshape(2, 2)}
    of_torch = Converter(module, shapes, names).to_torch(moments)
    assert sorted(of_torch) == ["fc1.weight", "h.0.bias", "h.1.bias"]
    assert of_torch["h.1.bias"].tolist() == [2, 3]


def test_a_tied_tensor_in_a_rule_returns_under_both_names() -> None:
    module = Layers(a=nn.Linear(6, 2, bias=False), b=nn.Linear(6, 2, bias=False))
    module.b.weight = module.a.weight
    arrays = Converter(module, {"fc.kernel": (6, 2)}, {"fc": flattened("b", (3, 2))})
    back = arrays.to_torch({"fc.kernel": np.arange(12.0).reshape(6, 2)})
    assert sorted(back) == ["a.weight", "b.weight"]


ONE = Layers(fc1=nn.Linear(12, 6), h=[nn.Linear(2, 2) for _ in range(3)], conv=nn.Conv2d(6, 2, 2))
ONE.scale = nn.Parameter(torch.ones(()))
FITS = layers(fc=linear(12, 6), blocks={"kernel": (3, 2, 2), "bias": (3, 2)})
STACK: Names = {"blocks": "h.{}"}
BAD: dict[str, tuple[Names, Shapes, str]] = {
    "another size": (
        {"fc": flattened("fc1", (3, 2, 3))},
        {},
        r'"fc": flattened\("fc1", \(3, 2, 3\)\): torch\'s fc1.weight \(6, 12\) has 12 inputs, 3 x 2 x 3 is another',
    ),
    "no torch layer": (
        {"fc": flattened("fc2", (3, 4))},
        {},
        r'"fc": flattened\("fc2", \(3, 4\)\): jax\'s fc.kernel \(12, 6\) has no twin in torch, fc2.weight is not',
    ),
    "no jax layer": ({"fd": flattened("fc1", (3, 4))}, {}, r'"fd": flattened\("fc1", \(3, 4\)\): jax has no fd'),
    "no jax stack": ({"fc": "fc1", "block": "h.{}"}, {}, r'"block": "h.\{\}": jax has no block'),
    "does not divide": (
        {"fc": part("fc1", 0, of=4)},
        {},
        r'"fc": part\("fc1", 0, of=4\): torch\'s fc1.weight has 6 outputs, which are not 4 parts$',
    ),
    "other sizes": (
        {"fc": part("fc1", 0, of=(3, 4))},
        {},
        r'"fc": part\("fc1", 0, of=\(3, 4\)\): torch\'s fc1.weight has 6 outputs, the parts have 7',
    ),
    "another shape": (
        {"fc": part("fc1", 0, of=2)},
        {},
        r"jax's fc.kernel \(12, 6\) cannot be torch's fc1.weight \(3, 12\)",
    ),
    "heads": (
        {"fc": fused("h.0", "h.1", "h.2", heads=4)},
        layers(fc=linear(2, 6)),
        r"torch's layers have 2, 2, 2 outputs; must be equal parts of 4 heads",
    ),
    "axes": (
        {"fc": transposed("fc1", (0, 1))},
        {},
        r'"fc": transposed\("fc1", \(0, 1\)\): jax\'s fc.kernel \(12, 6\) cannot be torch\'s fc1.weight \(6, 12\)',
    ),
    "no image": (
        {"blocks": "h.{}", "fc": flattened("conv", (2, 3))},
        {"fc.kernel": (2, 2, 6, 2), "fc.bias": (2,)},
        r"torch's conv.weight \(2, 6, 2, 2\) has no flattened image as its input",
    ),
    "number of axes": (
        {"fc": transposed("fc1", (1, 0, 2))},
        {},
        r"jax's fc.kernel \(12, 6\) cannot be torch's fc1.weight \(6, 12\)",
    ),
    "a number": (
        {"fc": "fc1", "scale": part("scale", 0, of=2)},
        {"scale": ()},
        r"torch's scale is a number and has no outputs",
    ),
    "other inputs": (
        {"fc": fused("fc1", "h.0")},
        {},
        r"fc1.weight, h.0.weight have different inputs, \(12,\) and \(2,\)",
    ),
    "too many layers": (
        {"fc": "fc1"},
        {"blocks.kernel": (2, 2, 2), "blocks.bias": (2, 2)},
        r'"blocks": "h.\{\}": jax\'s blocks.kernel \(2, 2, 2\) holds 2 layers, torch has 3 h.\{\}',
    ),
}


@pytest.mark.parametrize(("names", "shapes", "message"), BAD.values(), ids=BAD)
def test_a_rule_that_does_not_fit_is_named_in_one_line(names: Names, shapes: Shapes, message: str) -> None:
    with pytest.raises(InputError, match=f"names: .*{message}") as caught:
        Converter(ONE, FITS | shapes, {**STACK, **names} if "block" not in names else names)
    assert "\n" not in str(caught.value)


# jax's arrays, the table, and what each is of torch's biases a and b, (12,), of a GRU.
SUMS: dict[str, tuple[Shapes, Names, Any]] = {
    "a sum": (
        {"b": (12,)},
        {"b": summed("bias_ih_l0", "bias_hh_l0")},
        lambda a, b: {"b": a + b},
    ),
    "a sum in another shape": (
        {"b": (3, 4)},
        {"b": summed("bias_ih_l0", "bias_hh_l0")},
        lambda a, b: {"b": (a + b).reshape(3, 4)},
    ),
    "a shorter summand": (
        {"b": (12,), "b_n": (4,)},
        {"b": summed("bias_ih_l0", part("bias_hh_l0", 0, of=(8, 4))), "b_n": part("bias_hh_l0", 2, of=3)},
        lambda a, b: {"b": np.r_[a[:8] + b[:8], a[8:]], "b_n": b[8:]},
    ),
    "sums of parts": (
        {"r": (4,), "z": (4,), "i_n": (4,), "h_n": (4,)},
        {
            **{f"{side}_n": part(f"bias_{side}h_l0", 2, of=3) for side in "ih"},
            **{gate: summed(*(part(f"bias_{side}h_l0", k, of=3) for side in "ih")) for k, gate in enumerate("rz")},
        },
        lambda a, b: {"r": a[:4] + b[:4], "z": a[4:8] + b[4:8], "i_n": a[8:], "h_n": b[8:]},
    ),
}


@pytest.mark.parametrize(("shapes", "names", "expected"), SUMS.values(), ids=SUMS)
def test_a_vector_may_be_a_sum_of_torchs(shapes: Shapes, names: Names, expected: Any) -> None:
    module = nn.GRU(2, 4)
    weights = {f"weight_{side}h_l0": f"weight_{side}h_l0" for side in "ih"}
    converter = Converter(module, {**shapes, "weight_ih_l0": (12, 2), "weight_hh_l0": (12, 4)}, {**weights, **names})
    tensors = tensors_of(module)
    a, b = tensors["bias_ih_l0"], tensors["bias_hh_l0"]
    arrays = converter.to_jax(tensors)
    for name, x in expected(a, b).items():
        np.testing.assert_array_equal(arrays[name], x, name)
    summands = [piece.summand for piece in converter.pieces if piece.summand]
    alike = folded("params", tensors, summands)
    with jax.enable_x64(True):
        in_program = jax.jit(partial(converter.to_torch, library=jnp))(arrays)
    for back in (converter.to_torch(arrays), in_program):
        for name, tensor in alike.items():
            np.testing.assert_array_equal(back[name], tensor, name)
    for name, x in converter.to_jax(converter.to_torch(arrays)).items():  # these weights compute the same
        np.testing.assert_array_equal(x, arrays[name], name)
    gradients, alone = converter.to_jax(tensors, adds=False), np.where(np.arange(12) < 8, 0, b)
    for name, x in expected(a, alone if len(shapes) > 1 else 0 * b).items():
        np.testing.assert_array_equal(gradients[name], x, name)


BAD_SUMS = {
    "matrices": (summed("weight_ih_l0", "weight_hh_l0"), "all must be vectors of at most 131072 elements"),
    "the shorter first": (
        summed(part("bias_hh_l0", 0, of=(8, 4)), "bias_ih_l0"),
        r"jax's b \(12,\) cannot be torch's bias_hh_l0 \(8,\)",
    ),
    "a longer one added": (
        summed(part("bias_hh_l0", 0, of=(8, 4)), "bias_ih_l0"),
        r"the first, bias_hh_l0\[0:8\], must be the longest",
    ),
    "no such tensor": (summed("bias_ih_l0", "bias_hh"), r"jax's b \(12,\) has no twin in torch, bias_hh is not there"),
}


@pytest.mark.parametrize(("rule", "message"), BAD_SUMS.values(), ids=BAD_SUMS)
def test_a_sum_that_does_not_fit_is_named_in_one_line(rule: Rule, message: str) -> None:
    size = 8 if "longest" in message else 12
    with pytest.raises(InputError, match=f'names: "b": summed.*{message}$'):
        Converter(nn.GRU(2, 4), {"b": (size,), "weight_ih_l0": (12, 2), "weight_hh_l0": (12, 4)}, {"b": rule})


def test_outputs_that_no_part_maps_are_listed() -> None:
    names = {"a": part("fc", 0, of=3), "b": part("fc", 2, of=3)}
    with pytest.raises(InputError, match=r"torch's fc.weight \(6, 4\) has no twin in jax for its outputs 2:4;"):
        Converter(Layers(fc=nn.Linear(4, 6)), layers(a=linear(4, 2), b=linear(4, 2)), names)


def test_rows_of_a_table_that_no_part_maps_are_listed() -> None:
    names = {"a": part("table", 0, of=(2, 3, 1)), "b": part("table", 2, of=(2, 3, 1))}
    flax = {"a.embedding": (2, 4), "b.embedding": (1, 4)}
    with pytest.raises(InputError, match=r"torch's table.weight \(6, 4\) has no twin in jax for its rows 2:5$"):
        Converter(Layers(table=nn.Embedding(6, 4)), flax, names)
    with pytest.raises(InputError, match=r"torch's table.weight has 6 rows, the parts have 7$"):
        Converter(Layers(table=nn.Embedding(6, 4)), flax, {"a": part("table", 0, of=(2, 5))})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fused("q"), r'names: fused\("q"\): must name at least 2 layers'),
        (lambda: fused("h.{}.q", "k"), r"all layers must have as many \{\}"),
        (lambda: part("c", 3, of=3), r'names: part\("c", 3, of=3\): must be one of the parts 0 to 2'),
        (lambda: part("c", 0, of=1), "of must be at least 2 parts"),
        (lambda: part("c", 0, of=(2, 2), heads=2), "heads needs equal parts, of=2"),
        (lambda: part("c", 0, of=3, heads=0), "heads must be at least 1"),
        (lambda: transposed("p", (0, 2)), r'names: transposed\("p", \(0, 2\)\): axes must be a permutation of 0 to 1'),
        (lambda: summed("b"), r'names: summed\("b"\): must be at least 2 names, or parts'),
        (lambda: summed("b", fused("a", "c")), "must be at least 2 names, or parts"),
        (lambda: flattened("fc", (3,)), r'names: flattened\("fc", \(3,\)\): must be the shape of an image in torch'),
    ],
)
def test_a_rule_that_cannot_be_is_refused_at_once(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


RULES = [
    fused("q", "k"),
    fused("q", "k", heads=2),
    part("c", 1, of=3, heads=4),
    part("c", 1, of=(2, 4)),
    transposed("p", (1, 0)),
    flattened("fc", (3, 2)),
    summed("a", "b", "c"),
    summed(part("a", 0, of=3, heads=2), part("b", 0, of=(2, 4))),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_text_of_a_rule_is_its_source(rule: Rule) -> None:
    known = {rule.__name__: rule for rule in (fused, part, summed, transposed, flattened)}
    assert eval(repr(rule), known) == rule
