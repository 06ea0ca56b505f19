"""Types of both sides as written: what counts as the same, and what is said of the rest."""

from dataclasses import replace

import pytest

from jaxddp.parity.compare.types import ComparedTypes, are_alike, compare_types
from jaxddp.parity.held_types import HeldType, HeldTypes
from jaxddp.parity.operations import SourceLine
from jaxddp.parity.report.sentences import sentences

TWINS = (("fc.weight", "fc.kernel"), ("fc.bias", "fc.bias"))
SINGLE = HeldType("float32")


def held(of_torch: bool, **of: dict[str, str]) -> HeldTypes:
    """Return the types of a Linear layer in float32 under Adam, with others for some names."""
    weight, moments = ("fc.weight", ("exp_avg", "exp_avg_sq")) if of_torch else ("fc.kernel", ("mu", "nu"))
    names = {"parameters": [weight, "fc.bias"], "losses": ["loss"]}
    names["moments"] = [f"{kind}:{name}" for kind in moments for name in names["parameters"]]
    types = {kind: dict.fromkeys(of_kind, SINGLE) for kind, of_kind in names.items()}
    for kind, of_names in of.items():
        types[kind] = types.get(kind, {}) | {name: HeldType(dtype) for name, dtype in of_names.items()}
    return HeldTypes(types, () if of_torch else TWINS)


def compared(optimizer: str = "Adam", **of_jax: dict[str, str]) -> ComparedTypes:
    return compare_types(held(True), held(False, **of_jax), optimizer)


def says(result: ComparedTypes) -> list[str]:
    return [sentences(difference.cause)[0] for difference in result.differences if difference.cause]


@pytest.mark.parametrize(
    ("torch", "jax", "alike"),
    [
        ("float32", "float32", True),
        ("int64", "int32", True),
        ("uint8", "int32", True),
        ("float32", "bfloat16", False),
        ("float16", "bfloat16", False),
        ("float64", "float32", False),
        ("bool", "int32", False),
        ("float32", "int32", False),
    ],
)
def test_integers_of_any_width_are_alike_and_nothing_else_is(torch: str, jax: str, alike: bool) -> None:
    assert are_alike(torch, jax) == alike


def test_equal_types_are_a_row_without_a_sentence() -> None:
    assert compared() == ComparedTypes(compared().aspect) and compared().aspect.verdict == "equal"


def test_parameters_of_one_type_are_one_difference_and_their_moments_follow() -> None:
    halves = dict.fromkeys(("fc.kernel", "fc.bias"), "bfloat16")
    moments = dict.fromkeys((f"{kind}:{name}" for kind in ("mu", "nu") for name in halves), "bfloat16")
    result = compared(parameters=halves, moments=moments, losses={"loss": "bfloat16"})
    assert says(result) == ["fc.weight and 1 other: bfloat16 in jax, float32 in torch"]
    assert result.differences[0].stage == "types" and result.differences[0].step == 0
    assert result.aspect.verdict == "differs" and result.aspect.tensor == "fc.weight"


def test_moments_and_the_loss_are_named_where_the_parameters_are_equal() -> None:
    of_mu = compared(moments={"mu:fc.kernel": "bfloat16", "mu:fc.bias": "bfloat16"})
    assert says(of_mu) == ["fc.weight (exp_avg) and 1 other: bfloat16 in jax, float32 in torch"]
    cause = of_mu.differences[0].cause
    assert cause is not None and cause.fixes[0].startswith("mu_dtype=jnp.float32")
    assert says(compared(losses={"loss": "bfloat16"})) == ["loss: bfloat16 in jax, float32 in torch"]


def test_a_momentum_is_compared_for_sgd_alone() -> None:
    torch, jax = (HeldTypes({"moments": {name: HeldType(dtype)}}, TWINS) for name, dtype in MOMENTA)
    assert says(compare_types(torch, jax, "SGD")) == ["fc.bias (momentum_buffer): float16 in jax, float32 in torch"]
    assert compare_types(torch, jax, "RMSprop").differences == ()


MOMENTA = (("momentum_buffer:fc.bias", "float32"), ("trace:fc.bias", "float16"))


def test_an_array_without_a_twin_and_an_input_of_one_side_are_not_compared() -> None:
    result = compared(parameters={"scale": "bfloat16"}, buffers={"table": "bfloat16"}, inputs={"x": "bfloat16"})
    assert result.differences == ()


def test_each_line_that_makes_parameters_of_another_type_is_named() -> None:
    lines = SourceLine("port.py", 7), SourceLine("port.py", 9)
    made = {name: HeldType("float16", line) for name, line in zip(("fc.kernel", "fc.bias"), lines, strict=True)}
    jax = replace(held(False), of={"parameters": made})
    quotes = [x.cause.jax for x in compare_types(held(True), jax, "Adam").differences if x.cause]
    assert [quote.place for quote in quotes if quote] == ["port.py:7", "port.py:9"]


def test_what_could_not_be_compared_and_what_acts_on_other_hardware_is_said() -> None:
    torch = replace(held(True), products="TensorFloat32", casts=("bfloat16",))
    jax = replace(held(False), left_out={"moments": "TypeError: no update"}, written=("a.kernel", "b.kernel"))
    assert compare_types(torch, jax, "Adam").sentences == (
        "The types of jax's moments were not compared: TypeError: no update.",
        "Declared for products of float32 matrices on GPUs: TensorFloat32 in torch, nothing in jax; it has no effect "
        "in this check.",
        "torch's loss is under autocast to bfloat16, and jax's makes no such cast.",
        "jax's loss sets the parameters a.kernel, b.kernel. A loop of flax.nnx keeps what it sets, so that a step may "
        "begin with other weights; this check compares the steps without it, as jaxddp.train takes them.",
    )
    alike = replace(held(False), products="TensorFloat32", casts=("bfloat16",))
    assert compare_types(torch, alike, "Adam").sentences == ()


def test_without_the_types_of_a_side_nothing_is_compared() -> None:
    assert compare_types(HeldTypes(), HeldTypes(), "Adam").aspect.verdict == "not compared"
