"""Hash a JAX half: initial arrays, and loss, derivative, optimizer and step as traced programs."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import linen, nnx
from jax import numpy as jnp

from jaxddp.state import TrainState

from .halves import Unprovable, batch_of, batches_digest, called
from .jaxprs import array_digest, hashed, program_digest

FIELDS = frozenset({"jax_model", "jax_loss", "jax_step", "jax_batch", "jax_optimizer"})  # those that are traced
AXIS = "replica"


@dataclass(frozen=True)
class PureModel:
    """A model as a pure function of its parameters and the rest of its state.

    Attributes:
        params, rest: trees of arrays.
        start: tree of all that the model starts with.
        merge: (params, rest) -> the model as the loss takes it.
        state: model -> (params, rest), after a call.
    """

    params: Any
    rest: Any
    start: Any
    merge: Callable[[Any, Any], Any]
    state: Callable[[Any], Any] = lambda model: ()


def _pure_model(names: Mapping[str, Any], batch: Mapping[str, Any]) -> PureModel:
    """Return the model of a half; a Linen model draws its parameters for this batch."""
    model = called(names["jax_model"], names)
    if isinstance(model, linen.Module):
        return _of_linen(model, names, batch)
    is_nnx = any(isinstance(leaf, nnx.Module) for leaf in jax.tree.leaves(model, is_leaf=_is_nnx))
    return _of_nnx(model) if is_nnx else _of_tree(model)


def _of_linen(model: Any, names: Mapping[str, Any], batch: Mapping[str, Any]) -> PureModel:
    variables: dict[str, Any] = {}

    def initialize(*arguments: Any, **keywords: Any) -> Any:
        output, drawn = model.init_with_output(jax.random.key(0), *arguments, **keywords)
        variables.update(drawn)
        return output

    if "jax_loss" not in names:
        raise Unprovable("a Linen model without a loss")
    names["jax_loss"](initialize, batch)
    if variables.keys() != {"params"}:
        raise Unprovable(f"a Linen model with {', '.join(variables)}")
    params = variables["params"]
    return PureModel(params, (), params, lambda params, _: partial(model.apply, {"params": params}))


def _of_nnx(model: Any) -> PureModel:
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def merge(pure: Any, rest: Any) -> Any:
        values = jax.tree.map(lambda x: x, params)  # a copy
        nnx.replace_by_pure_dict(values, pure)
        return nnx.merge(graph, values, rest, copy=True)

    pure = nnx.to_pure_dict(params)
    return PureModel(pure, rest, (pure, rest), merge, lambda model: nnx.split(model, nnx.Param, ...)[1:])


def _is_nnx(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Module)


def _of_tree(model: Any) -> PureModel:
    """Return the model whose parameters are the floating-point arrays of a tree."""
    leaves, structure = jax.tree.flatten(model)
    places = [number for number, leaf in enumerate(leaves) if _is_floating(leaf)]

    def merge(params: Any, _: Any) -> Any:
        given = dict(zip(places, params, strict=True))
        return jax.tree.unflatten(structure, [given.get(number, leaf) for number, leaf in enumerate(leaves)])

    return PureModel([leaves[number] for number in places], (), model, merge)


def _is_floating(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def jax_program(names: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each part of a JAX half; halves with equal digests are one program.

    The loss and the step are traced for two sizes of a batch, the step for two numbers of replicas.

    Raises:
        Unprovable: the half has a part that is not traced here.
    """
    if unknown := {name for name in names if name.startswith("jax_")} - FIELDS:
        raise Unprovable(f"a port with {', '.join(sorted(unknown))}")
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):  # as the check
        return {"batches": batches_digest(names, "jax"), **_of_sizes(names)}


def _of_sizes(names: Mapping[str, Any]) -> dict[str, str]:
    digests: dict[str, str] = {}
    batch = batch_of(names, "jax")
    size = min(map(len, batch.values()))
    for replicas, examples in ((2, size), (3, size - 1)):
        cut = {name: array[:examples] for name, array in batch.items()}
        digests |= {f"{part} x{replicas}": digest for part, digest in _traced(names, cut, replicas).items()}
    return digests


def _traced(names: Mapping[str, Any], batch: Mapping[str, Any], replicas: int) -> dict[str, str]:
    arrays = {name: jnp.asarray(array) for name, array in batch.items()}
    model, optimizer = _pure_model(names, arrays), names.get("jax_optimizer")
    digests = {"start": tree_digest(model.start)}
    if "jax_loss" in names:
        digests["loss"] = program_digest(_loss_and_pullback(names, model), model.params, model.rest, arrays)
    if optimizer is not None and not inspect.isfunction(optimizer):
        digests["optimizer"] = _optimizer_digest(optimizer, _tree_of(names, model))
    if "jax_step" in names:
        digests["step"] = _step_digest(names, model, arrays, replicas)
    return digests


def _tree_of(names: Mapping[str, Any], model: PureModel) -> Any:
    """Return the parameters as the optimizer takes them: those of a loss, or the tree of a step."""
    return model.params if "jax_loss" in names else model.start


def tree_digest(tree: Any) -> str:
    """Return the hash of a tree's paths and arrays."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return hashed(*((jax.tree_util.keystr(path), _leaf_digest(leaf)) for path, leaf in paths))


def _leaf_digest(leaf: Any) -> str:
    return array_digest(leaf) if hasattr(leaf, "dtype") else repr(leaf).partition(" at 0x")[0]


def _loss_and_pullback(names: Mapping[str, Any], model: PureModel) -> Callable[..., Any]:
    """Return the function that computes a loss's outputs and its derivative with respect to each of them."""

    def outputs(params: Any, rest: Any, batch: Any) -> tuple[list[Any], Any]:
        merged = model.merge(params, rest)
        result = names["jax_loss"](merged, batch)
        floating = [leaf for leaf in jax.tree.leaves(result) if _is_floating(leaf)]
        return floating, (result, model.state(merged))

    def both(params: Any, rest: Any, batch: Any) -> Any:
        values, pullback, further = jax.vjp(lambda p: outputs(p, rest, batch), params, has_aux=True)
        return values, [pullback(_only(values, number)) for number in range(len(values))], further

    return both


def _only(values: list[Any], number: int) -> list[Any]:
    """Return a cotangent of one of the outputs, of which no two elements are equal, and zeros for the others."""
    return [
        jnp.linspace(1, 2, y.size, dtype=y.dtype).reshape(y.shape) if place == number else jnp.zeros_like(y)
        for place, y in enumerate(values)
    ]


def _optimizer_digest(optimizer: Any, params: Any) -> str:
    """Return the digest of an Optax chain, or of one for each part of the parameters."""
    if isinstance(optimizer, Mapping):
        return hashed(*((name, _optimizer_digest(chain, params[name])) for name, chain in optimizer.items()))
    state = optimizer.init(params)
    update = program_digest(optimizer.update, params, state, params)
    return hashed(program_digest(optimizer.init, params), update)


def _step_digest(names: Mapping[str, Any], model: PureModel, batch: Any, replicas: int) -> str:
    """Return the digest of a replica step, mapped over the replicas as an axis."""
    replica, state = (_nnx_step if inspect.isfunction(names["jax_optimizer"]) else _pure_step)(names, model)
    stacked = {name: jnp.stack([array] * replicas) for name, array in batch.items()}
    return program_digest(jax.vmap(replica, in_axes=(None, 0), axis_name=AXIS), state, stacked)


def _nnx_step(names: Mapping[str, Any], model: PureModel) -> tuple[Callable[..., Any], Any]:
    """Return a step that changes a module and an optimizer of nnx, as a function of their state, and the state."""
    module = model.merge(model.params, model.rest)
    graph, state = nnx.split((module, names["jax_optimizer"](module)))

    def replica(state: Any, batch: Any) -> Any:
        module, optimizer = nnx.merge(graph, state)
        return names["jax_step"](module, optimizer, batch), nnx.state((module, optimizer))

    return replica, state


def _pure_step(names: Mapping[str, Any], model: PureModel) -> tuple[Callable[..., Any], Any]:
    """Return a step of a TrainState, and the state."""
    optimizer, params = names["jax_optimizer"], _tree_of(names, model)
    if isinstance(optimizer, Mapping):
        opt_state = {name: chain.init(params[name]) for name, chain in optimizer.items()}
    else:
        opt_state = optimizer.init(params)
    given = (_mean_loss(names, model), optimizer) if "jax_loss" in names else (optimizer,)
    state = TrainState(jnp.zeros((), int), params, model.rest, opt_state)
    return lambda state, batch: names["jax_step"](*given, state, batch), state


def _mean_loss(names: Mapping[str, Any], model: PureModel) -> Callable[..., Any]:
    """Return the loss as a step takes it: (params, buffers, batch) -> (mean, buffers)."""

    def loss(params: Any, rest: Any, batch: Any) -> Any:
        merged = model.merge(params, rest)
        value = names["jax_loss"](merged, batch)
        return jnp.mean(value[0] if isinstance(value, tuple) else value), model.state(merged)

    return loss
