"""What a JAX half is: its initial arrays, and its loss, derivative, optimizer and step as traced programs."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen, nnx
from jax import numpy as jnp

from jaxddp.state import TrainState

from .halves import Unprovable, batch_of, batches_digest, called
from .jaxprs import array_digest, hashed, program_digest

FIELDS = frozenset({"flax_model", "flax_loss", "flax_step", "flax_batch", "flax_optimizer"})  # those that are traced
AXIS = "replica"


class PureModel:
    """A model as a pure function of its parameters and the rest of its state.

    Args:
        names: names of the half.
        batch: a batch, from which a Linen model draws its parameters.

    Attributes:
        params, rest: trees of arrays.
        merge: (params, rest) -> the model as the loss takes it.
        state: model -> (params, rest), after a call.
    """

    def __init__(self, names: Mapping[str, Any], batch: Mapping[str, Any]):
        model = called(names["flax_model"], names)
        self.merge: Callable[[Any, Any], Any]
        self.state: Callable[[Any], Any]
        if isinstance(model, linen.Module):
            self._of_linen(model, names, batch)
        elif any(isinstance(leaf, nnx.Module) for leaf in jax.tree.leaves(model, is_leaf=_is_nnx)):
            graph, params, rest = nnx.split(model, nnx.Param, ...)
            self.params, self.rest = nnx.to_pure_dict(params), rest
            self.merge = lambda pure, rest: nnx.merge(graph, _with_values(params, pure), rest, copy=True)
            self.state = lambda model: nnx.split(model, nnx.Param, ...)[1:]
        else:
            self.params, static = _arrays(model)
            self.rest = ()
            self.merge = lambda params, _: static(params)
            self.state = lambda _: ()

    def _of_linen(self, model: Any, names: Mapping[str, Any], batch: Mapping[str, Any]) -> None:
        variables: dict[str, Any] = {}

        def initialize(*arguments: Any, **keywords: Any) -> Any:
            output, drawn = model.init_with_output(jax.random.key(0), *arguments, **keywords)
            variables.update(drawn)
            return output

        names["flax_loss"](initialize, batch)
        if variables.keys() != {"params"}:
            raise Unprovable(f"a Linen model with {', '.join(variables)}")
        self.params, self.rest = variables["params"], ()
        self.merge = lambda params, _: lambda *args, **keywords: model.apply({"params": params}, *args, **keywords)
        self.state = lambda _: ()


def _is_nnx(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Module)


def _with_values(state: Any, pure: Any) -> Any:
    """Return a state of nnx with the values of a pure dictionary."""
    copy = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(copy, pure)
    return copy


def _arrays(model: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """Return the floating-point arrays of a tree, and the function that puts others in their place."""
    leaves, structure = jax.tree.flatten(model)
    places = [number for number, leaf in enumerate(leaves) if _is_floating(leaf)]

    def static(arrays: Any) -> Any:
        given = dict(zip(places, arrays, strict=True))
        return jax.tree.unflatten(structure, [given.get(number, leaf) for number, leaf in enumerate(leaves)])

    return [leaves[number] for number in places], static


def _is_floating(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def jax_program(names: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each part of a JAX half; halves with equal digests are one program.

    The loss and the step are traced for two sizes of a batch, the step for two numbers of replicas.

    Raises:
        Unprovable: the half has a part that is not traced here.
    """
    if unknown := {name for name in names if name.startswith("flax_")} - FIELDS:
        raise Unprovable(f"a port with {', '.join(sorted(unknown))}")
    with jax.enable_x64(True):  # as the check
        return {"batches": batches_digest(names, "flax"), **_of_sizes(names)}


def _of_sizes(names: Mapping[str, Any]) -> dict[str, str]:
    digests: dict[str, str] = {}
    batch = batch_of(names, "flax")
    size = min(map(len, batch.values()))
    for replicas, examples in ((2, size), (3, size - 1)):
        cut = {name: array[:examples] for name, array in batch.items()}
        digests |= {f"{part} x{replicas}": digest for part, digest in _traced(names, cut, replicas).items()}
    return digests


def _traced(names: Mapping[str, Any], batch: Mapping[str, Any], replicas: int) -> dict[str, str]:
    arrays = {name: jnp.asarray(array) for name, array in batch.items()}
    model = PureModel(names, arrays) if "flax_loss" in names else None
    params = model.params if model else called(names["flax_model"], names)
    digests = {"start": tree_digest(params if model is None else (model.params, model.rest))}
    if model is not None:
        digests["loss"] = program_digest(_loss_and_pullback(names, model), model.params, model.rest, arrays)
    optimizer = names.get("flax_optimizer")
    if optimizer is not None and not inspect.isfunction(optimizer):
        digests["optimizer"] = _optimizer_digest(optimizer, params)
    if "flax_step" in names:
        digests["step"] = _step_digest(names, model, params, arrays, replicas)
    return digests


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
        result = names["flax_loss"](merged, batch)
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


def _step_digest(names: Mapping[str, Any], model: PureModel | None, params: Any, batch: Any, replicas: int) -> str:
    """Return the digest of a replica step, mapped over the replicas as an axis."""
    step, optimizer = names["flax_step"], names["flax_optimizer"]
    stacked = {name: jnp.stack([array] * replicas) for name, array in batch.items()}
    if inspect.isfunction(optimizer):
        pair = called(names["flax_model"], names)
        graph, state = nnx.split((pair, optimizer(pair)))

        def replica(state: Any, batch: Any) -> Any:
            model, optimizer = nnx.merge(graph, state)
            return step(model, optimizer, batch), nnx.state((model, optimizer))

    else:
        chains = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}
        states = {name: chain.init(params[name] if name else params) for name, chain in chains.items()}
        rest = {} if model is None else model.rest
        state = TrainState(jnp.zeros((), int), params, rest, states.get("", states))

        def replica(state: Any, batch: Any) -> Any:
            given = (optimizer,) if model is None else (_mean_loss(names, model), optimizer)
            return step(*given, state, batch)

    mapped = jax.vmap(replica, in_axes=(None, 0), axis_name=AXIS)
    return program_digest(mapped, state, stacked)


def _mean_loss(names: Mapping[str, Any], model: PureModel) -> Callable[..., Any]:
    """Return the loss as a step takes it: (params, buffers, batch) -> (mean, buffers)."""

    def loss(params: Any, rest: Any, batch: Any) -> Any:
        merged = model.merge(params, rest)
        value = names["flax_loss"](merged, batch)
        return jnp.mean(value[0] if isinstance(value, tuple) else value), model.state(merged)

    return loss
