"""Compare the types of numbers that both sides hold when they train as written; a check itself casts them away."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxddp.errors import listed
from jaxddp.parity.compare.judge import states_of_kind
from jaxddp.parity.coverage import Aspect
from jaxddp.parity.deviation import Deviation, Statement, Value
from jaxddp.parity.findings import Cause, Difference
from jaxddp.parity.held_types import KINDS, HeldType, HeldTypes
from jaxddp.parity.operations import Lines

Pair = tuple[str, HeldType, HeldType]  # a name in torch, its type in torch, and in jax
STAGE = "types"
# A constant of NumPy's makes a loss of torch float64; jax without 64 bits has none.
OF_NUMPY = ("float64", "float32")


class ComparedTypes(NamedTuple):
    """Result of comparing types.

    Attributes:
        aspect: a row for the report.
        differences: a difference for each kind, pair of types and line.
        sentences: what was not compared, what acts on other hardware only, and what a check leaves out, each in a
            sentence.
    """

    aspect: Aspect
    differences: tuple[Difference, ...] = ()
    sentences: tuple[str, ...] = ()


def compare_types(torch: HeldTypes, jax: HeldTypes, optimizer: str) -> ComparedTypes:
    """Compare the types of both sides.

    Args:
        torch, jax: types of each side.
        optimizer: class name of torch's optimizer.
    """
    differing: dict[tuple[object, ...], list[Pair]] = {}
    of_parameters: dict[str, tuple[str, str]] = {}
    for kind in KINDS:
        for name, of_torch, of_jax in _pairs(kind, torch, jax, optimizer):
            types = of_torch.dtype, of_jax.dtype
            of_parameters |= {name: types} if kind == "parameters" else {}
            follows = of_parameters.get(name.partition(":")[2]) == types
            follows |= kind == "losses" and (bool(differing) or (types == OF_NUMPY and not torch.doubles))
            if not (are_alike(*types) or follows):
                differing.setdefault((kind, of_torch.dtype, of_jax), []).append((name, of_torch, of_jax))
    differences = tuple(_difference(f"{key[0]}", pairs) for key, pairs in differing.items())
    sentences = (*_not_compared(torch, jax), *_elsewhere(torch, jax), *_written(jax))
    if differences:
        return ComparedTypes(Aspect("differs", sentences, tensor=differences[0].tensor), differences, sentences)
    known = torch.of.keys() & jax.of.keys()
    return ComparedTypes(Aspect("equal" if known else "not compared", sentences), (), sentences if known else ())


def are_alike(torch: str, jax: str) -> bool:
    """Return whether two types are the same but for the width of integers; a bool is no integer.

    >>> are_alike("int64", "int32"), are_alike("bool", "uint8"), are_alike("float32", "bfloat16")
    (True, False, False)
    """
    return torch == jax or all(dtype.startswith(("int", "uint")) for dtype in (torch, jax))


def _pairs(kind: str, torch: HeldTypes, jax: HeldTypes, optimizer: str) -> Iterator[Pair]:
    """Yield what both sides hold of a kind, or, of arrays, what has a twin."""
    of_torch, of_jax = torch.of.get(kind, {}), jax.of.get(kind, {})
    if kind in ("inputs", "losses"):
        twins = [(name, name) for name in of_torch]
    elif kind == "moments":
        twins = [*_twins_of_moments(of_torch, of_jax, jax.twins, optimizer)]
    else:
        of_jax = {**jax.of.get("parameters", {}), **jax.of.get("buffers", {})}
        twins = [*jax.twins]
    for name, twin in dict.fromkeys(twins):
        if name in of_torch and twin in of_jax:
            yield name, of_torch[name], of_jax[twin]


def _twins_of_moments(
    torch: Mapping[str, HeldType], jax: Mapping[str, HeldType], twins: tuple[tuple[str, str], ...], optimizer: str
) -> Iterator[tuple[str, str]]:
    arrays: dict[str, list[str]] = {}
    for tensor, array in twins:
        arrays.setdefault(tensor, []).append(array)
    for key in torch:
        kind, _, tensor = key.partition(":")
        for array in arrays.get(tensor, ()):
            names = [f"{name}:{array}" for name in states_of_kind(kind, optimizer) if f"{name}:{array}" in jax]
            yield from ((key, name) for name in names[:1])


def _difference(kind: str, pairs: list[Pair]) -> Difference:
    (name, torch, jax), others = pairs[0], len(pairs) - 1
    tensor = name.partition(":")[2] or name
    moment = name.partition(":")[0] if kind == "moments" else ""
    what = Statement("held_types", tensor=tensor, moment=moment, others=others, jax=jax.dtype, torch=torch.dtype)
    measured = f"the types of {'them' if others else 'it'} as each side makes {'them' if others else 'it'}"
    fix, values = _fix(kind, name, torch.dtype, jax.dtype), (Value(jax.dtype, torch.dtype, key=kind),)
    types = Deviation("types", what, values, tensor, fix=fix)
    cause = Cause.of([types], 0.0, measured=measured, lines=Lines(jax.line, torch.line))
    return Difference(STAGE, 0, tensor, float("nan"), float("nan"), cause=cause)


def _fix(kind: str, name: str, torch: str, jax: str) -> str:
    """Return what makes jax's type torch's."""
    if "float64" in (torch, jax):
        wide, narrow = ("torch", "jax") if torch == "float64" else ("jax", "torch")
        sets = {"torch": "torch.set_default_dtype or .double()", "jax": "jax_enable_x64"}
        return f"let both sides hold the same: {wide} without {sets[wide]}, or {narrow} with it ({sets[narrow]})"
    at = {
        "parameters": f"param_dtype=jnp.{torch}, or dtype=jnp.{torch} where the array is made",
        "buffers": f"make the array with dtype=jnp.{torch}",
        "inputs": f"return the entry as {torch} from jax_batch",
        "losses": f"compute the loss in {torch}: its logits.astype(jnp.{torch})",
    }
    option = {"exp_avg": "mu_dtype", "momentum_buffer": "accumulator_dtype"}.get(name.partition(":")[0])
    of_state = f"{option}=jnp.{torch}" if option else f"hold the optimizer's state in {torch}, as its parameters"
    return at.get(kind, f"{of_state}; it follows the parameters' type by default")


def _not_compared(torch: HeldTypes, jax: HeldTypes) -> Iterator[str]:
    for kind in KINDS:
        for side, types in (("torch", torch), ("jax", jax)):
            if kind in types.left_out:
                yield f"The types of {side}'s {kind} were not compared: {types.left_out[kind]}."


def _elsewhere(torch: HeldTypes, jax: HeldTypes) -> Iterator[str]:
    """Yield what both sides declare otherwise for hardware that has a choice."""
    if (torch.products or jax.products) and torch.products != jax.products:
        sides = (f"{types.products or 'nothing'} in {side}" for side, types in (("torch", torch), ("jax", jax)))
        yield f"Declared for products of float32 matrices on GPUs: {', '.join(sides)}; it has no effect in this check."
    if casts := [dtype for dtype in torch.casts if dtype not in jax.casts]:
        yield f"torch's loss is under autocast to {listed(casts, joint=', ')}, and jax's makes no such cast."


def _written(jax: HeldTypes) -> Iterator[str]:
    """Yield what a loss sets that nnx keeps, and jaxddp's pure steps do not."""
    if jax.written:
        names = f"parameter{'s' * (len(jax.written) > 1)} {listed(jax.written, joint=', ')}"
        yield (
            f"jax's loss sets the {names}. A loop of flax.nnx keeps what it sets, so that a step may begin with other "
            "weights; this check compares the steps without it, as jaxddp.train takes them."
        )
