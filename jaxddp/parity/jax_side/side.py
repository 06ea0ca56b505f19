"""Replica step of jaxddp or of a port, with the maps between its arrays and torch's tensors."""

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jaxddp import models, optim
from jaxddp.config import TrainConfig
from jaxddp.data.datasets import Dataset
from jaxddp.data.micro_batches import MicroBatches
from jaxddp.errors import InputError
from jaxddp.nn import torch_weights
from jaxddp.nn.any_model import AnyFunctional, functional_of, transformation_of
from jaxddp.nn.functional import Functional, LocalLoss, cast
from jaxddp.nn.losses import Batch, Losses, as_losses, cross_entropy
from jaxddp.nn.model_tree import seeing
from jaxddp.nn.plain import PlainFunctional
from jaxddp.optim.groups import Grouped
from jaxddp.parity.convert import Converter, under_all_names
from jaxddp.parity.jax_side.custom_step import CustomStep, ModelTrees
from jaxddp.parity.jax_side.multi_loss_step import MultiLossStep, multi_loss_step
from jaxddp.parity.jax_side.unequal_batches import of_own_batch
from jaxddp.parity.jax_side.widened import Context, can_run, in_float64, wide_optimizer, within
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.port import Port
from jaxddp.parity.records import Tensors
from jaxddp.program import bound
from jaxddp.state import Buffers, Params, TrainState
from jaxddp.step.options import options
from jaxddp.step.replica_step import ReplicaStep


@dataclass(frozen=True)
class JaxSide:
    """A replica step, and the maps between its arrays and torch's tensors.

    Attributes:
        replica_step: the step, with its optimizer.
        to_torch: maps jax arrays, or their gradients, to torch's names and layouts; with `jax.numpy` as its second
            argument, within a program.
        from_torch: maps torch's tensors to parameters and buffers; gradients with `adds=False`, see `Converter.to_jax`.
        given: stage of the reference whose gradients the optimizer is given in a forced run.
        start: (params, rank) -> the parameters that a replica starts from; None: all start from the same.
        restore: state -> state, saving and loading, called after `restore_at` steps; None: never.
        restore_at: number of steps before `restore`.
        lifting: context that lifts casts in the loss; see `jaxddp.parity.jax_side.widened`.
        alone: buffers without a twin in torch, such as a state's counters; a forced run carries them from step to step.
        functional: pure side of a port's model.
    """

    replica_step: ReplicaStep | CustomStep | MultiLossStep
    to_torch: Callable[..., dict[str, Any]]
    from_torch: Callable[..., tuple[Params, Buffers]]
    given: str = "clipped_gradients"
    start: Callable[[Params, int], Mapping[str, Any]] | None = None
    restore: Callable[[TrainState], TrainState] | None = None
    restore_at: int | None = None
    lifting: Context = nullcontext
    alone: Collection[str] = ()
    functional: AnyFunctional | None = None


def side_of_config(config: TrainConfig, dataset: Dataset, steps: int) -> JaxSide:
    """Build the jax side of a built-in model, as `jaxddp.train` builds it.

    Args:
        config: model, optimizer and every option of the step.
        dataset: training examples.
        steps: optimizer steps of the run; schedules need their number.
    """
    model = models.build(config, dataset)
    functional = Functional(model)
    step = ReplicaStep(
        functional.local_loss(cross_entropy, train=True, masks=config.dropout_masks, amp=config.amp),
        optim.from_config(config, steps),
        **options(config, functional),
    )
    like = cast(functional.params, config.dtype), cast(functional.buffers, config.dtype)

    def to_torch(arrays: Mapping[str, Any], library: Any = np) -> dict[str, Any]:
        assert library is np, "the step of a built-in model returns full tensors"
        return torch_weights.to_torch(arrays)

    return JaxSide(step, to_torch, lambda tensors, adds=True: torch_weights.from_torch(tensors, *like))


def side_of_port(port: Port, steps: int, dtype: str, casts: Collection[str] = (), wide: bool = False) -> JaxSide:
    """Build the jax side of a port.

    Args:
        port: the port.
        steps: optimizer steps of the run; schedules need their number.
        dtype: dtype of parameters and buffers.
        casts, wide: see `PortCase`.

    Raises:
        InputError: the model is not a jax model, or its arrays do not map to torch's.
    """
    with in_float64(["float32"]) if wide else nullcontext():
        model = port.jax_model()
        functional, local_loss = pure_loss(port, model)
    params, buffers = functional.params, functional.buffers

    def step_within(context: Context) -> ReplicaStep | CustomStep | MultiLossStep:
        if port.torch_step is None:
            return _step_of_port(port, model, functional, of_own_batch(within(context, local_loss)), steps, wide)
        assert port.jax_step is not None, "checked by Port"
        return multi_loss_step(functional, within(context, port.jax_step), port.jax_optimizer)

    lifting = _lifting(port, functional, step_within, casts) if dtype == "float64" else nullcontext
    module = port.torch_model()
    converter = Converter(module, functional.shapes, port.names, port.transpose_kernel, port.no_twin)
    if learning := [name for name in port.no_twin if name in params]:
        raise InputError(f"no_twin: jax's {learning[0]} is a parameter; must be a constant")
    twins = {piece.jax for piece in converter.pieces}
    without_twin = {name: value for name, value in buffers.items() if name not in twins}
    _check_kinds(port, dict(module.named_parameters(remove_duplicate=False)), converter, params)
    if port.restore_at is not None and not 0 < port.restore_at < steps:
        raise InputError(f"restore_at {port.restore_at}: must be within the run, 1 to {steps - 1} for {steps} steps")

    names = tuple(params)
    mapped = {piece.torch for piece in converter.pieces}
    shared = {name for name, first in converter.tied.items() if not {name, first} <= mapped}

    def to_torch(arrays: Mapping[str, Any], library: Any = np) -> dict[str, Any]:
        """Convert to torch's tensors, tied ones under their first name unless jax holds them as several arrays."""
        return {name: x for name, x in converter.to_torch(arrays, library).items() if name not in shared}

    def from_torch(tensors: Arrays, adds: bool = True) -> tuple[Params, Buffers]:
        converted = converter.to_jax(under_all_names(tensors, converter.tied), adds)
        arrays = {name: jnp.asarray(x) for name, x in converted.items()} | without_twin
        return cast({name: arrays[name] for name in names}, dtype), cast({n: arrays[n] for n in buffers}, dtype)

    step = step_within(lifting)
    functional.forget_values()
    trees = ModelTrees(functional.param_tree, functional.buffer_tree)
    return JaxSide(
        step,
        to_torch,
        from_torch,
        "gradients" if port.facts.clips_inside else "clipped_gradients",
        port.jax_start and partial(_started, port.jax_start, trees),
        port.jax_restore and partial(_restored, port.jax_restore, trees),
        port.restore_at,
        lifting,
        tuple(without_twin),
        functional,
    )


def _step_of_port(
    port: Port, model: Any, functional: AnyFunctional, local_loss: LocalLoss, steps: int, wide: bool
) -> ReplicaStep | CustomStep:
    config = port.optimizer_config
    if config is None:
        optimizer = transformation_of(port.jax_optimizer, model)
        optimizer = wide_optimizer(optimizer) if wide and hasattr(optimizer, "init") else optimizer
    else:
        optimizer = optim.from_config(config, port.total_steps or steps)
    groups: dict[str, Any] = {}
    if isinstance(optimizer, Grouped):
        optimizer, groups = optimizer.for_step(functional.params, ())
    # The port represents a loop of jax.grad and optax, where parameters that the loss does not reach have gradient 0.
    step = ReplicaStep(
        local_loss,
        seeing(functional.param_tree, optimizer),
        loss_normalization=port.loss_normalization,
        clip_grad_norm=port.clip_grad_norm,
        clip_grad_value=port.clip_grad_value,
        find_unused_parameters=None,
        **groups,
    )
    trees = ModelTrees(functional.param_tree, functional.buffer_tree)
    return step if port.jax_step is None else CustomStep(step, port.jax_step, optimizer, trees)


def _lifting(
    port: Port, functional: AnyFunctional, step_within: Callable[[Context], Any], casts: Collection[str]
) -> Context:
    """Return a context that computes the loss in float64 as far as jax can trace it so."""

    def function(step: Any, params: Params, buffers: Buffers, batch: Batch) -> Any:
        if isinstance(step, MultiLossStep):
            return step(step.init(params, buffers), MicroBatches(None, batch))
        return step.loss(params, buffers, batch)

    in_double = partial(jax.eval_shape, partial(cast, dtype="float64"))
    arguments = [*map(in_double, (functional.params, functional.buffers, port.first_batch("jax")))]
    for lifting in (partial(in_float64, casts, integers) for integers in (True, False)):
        if can_run(partial(function, step_within(lifting)), *arguments):
            return lifting
    return nullcontext


def _started(jax_start: Callable[[Any, int], Any], trees: ModelTrees, params: Params, rank: int) -> Params:
    return trees.params.flat(jax_start(trees.params.nest(params), rank))


def _restored(jax_restore: Callable[[Any], Any], trees: ModelTrees, state: TrainState) -> TrainState:
    return trees.flat(jax_restore(trees.nest(state)))


def _check_kinds(port: Port, learns: Mapping[str, Any], converter: Converter, params: Params) -> None:
    """Check that both frameworks train the same parameters, and that jaxddp's clipping would include no frozen one."""
    trained = {name for name, parameter in learns.items() if parameter.requires_grad}
    for piece in converter.pieces:
        if (piece.torch in learns) != (piece.jax in params):
            one, other = ("a parameter", "none") if piece.torch in learns else ("a buffer", "a parameter")
            raise InputError(f"names: torch's {piece.torch} is {one}, and jax's {piece.jax} is {other}")
        if piece.summand and piece.summand.first not in trained and piece.torch in trained:
            raise InputError(f"names: {piece.jax}: {piece.summand.first} is frozen; name {piece.torch} first")
    frozen = [piece.torch for piece in converter.pieces if not piece.summand and piece.torch in learns.keys() - trained]
    if frozen and port.clip_grad_norm is not None and port.jax_step is None:
        raise InputError(
            f"clip_grad_norm: torch's norm leaves out {frozen[0]}, which is frozen, and jaxddp's does not; "
            "clip in the optax chain and give torch_clip_grad_norm instead"
        )


def pure_loss(port: Port, model: Any) -> tuple[AnyFunctional, LocalLoss]:
    """Return the model's pure side, and the loss as a pure function of parameters, buffers and a batch."""
    functional = functional_of(model, port.jax_loss, partial(port.first_batch, "jax"), port.no_twin)
    if isinstance(functional, PlainFunctional):
        return functional, functional.local_loss(port.jax_loss)
    loss_fn = partial(losses_of_port, port)
    if not isinstance(functional, Functional):
        return functional, functional.local_loss(loss_fn)

    def local_loss(params: Params, buffers: Buffers, batch: Batch) -> Any:
        # The batch is bound to the loss, since an entry called "valid" is the port's here, not jaxddp's padding mask.
        return functional.local_loss(lambda model, _: loss_fn(model, batch), train=None)(params, buffers, {})

    return functional, local_loss


def losses_of_port(port: Port, model: Any, batch: Batch, key: jax.Array | None = None) -> Losses:
    """Compute the port's loss as `Losses`; `key`: for a loss that asks for one."""
    loss = port.jax_loss if key is None else bound(port.jax_loss, key=key)
    return as_losses(loss(model, batch), "jax_loss")


def optimizer_tensors(opt_state: Any, params: Params, to_torch: Callable[[Mapping[str, Any]], Tensors]) -> Tensors:
    """Collect an optimizer's per-parameter states under names such as "mu:fc.weight".

    Args:
        opt_state: state of any optax transformation, searched for dictionaries with parameters' names as keys.
        params: the parameters.
        to_torch: see `JaxSide`.

    >>> import optax
    >>> params = {"bias": jnp.zeros(2)}
    >>> [*optimizer_tensors(optax.adam(0.1).init(params), params, dict)]
    ['mu:bias', 'nu:bias']
    >>> from jaxddp import optim  # whose state holds rows and columns in tuples
    >>> optimizer_tensors(optim.adafactor(0.1).init({"kernel": jnp.zeros((2, 3))}), {"kernel": jnp.zeros((2, 3))}, dict)
    {}
    """

    kinds = states_of_parameters(opt_state, params)
    return {f"{kind}:{name}": x for kind, arrays in kinds.items() for name, x in to_torch(arrays).items()}


def states_of_parameters(opt_state: Any, params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Collect an optimizer's arrays that have the shapes of parameters: kind -> name -> array.

    Args:
        opt_state, params: see `optimizer_tensors`.
    """

    def per_parameter(node: Any) -> bool:
        return isinstance(node, dict) and bool(node) and node.keys() <= params.keys()

    kinds: dict[str, dict[str, Any]] = {}
    for path, node in jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=per_parameter)[0]:
        kind = getattr(path[-1], "name", "") if path else ""
        if kind and per_parameter(node):
            arrays = {name: x for name, x in node.items() if getattr(x, "shape", None) == params[name].shape}
            kinds.setdefault(kind, {}).update(arrays)
    return kinds


def hyperparameters(opt_state: Any) -> dict[str, float]:
    """Collect the hyperparameters that optax.inject_hyperparams shows in an optimizer's state; {} without it.

    A hyperparameter that has several values, such as the rates of groups, is left out.

    >>> import optax
    >>> hyperparameters(optax.inject_hyperparams(optax.sgd)(0.5).init({}))
    {'learning_rate': 0.5}
    """
    shown: dict[str, set[float]] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(opt_state)[0]:
        names = [getattr(key, "name", getattr(key, "key", None)) for key in path]
        if "hyperparams" in names and np.shape(leaf) == ():
            shown.setdefault(str(names[-1]), set()).add(float(leaf))
    return {name: values.pop() for name, values in shown.items() if len(values) == 1}
