"""How a port's update depends on the step: its optimizer, with the counts in its state set to any step.

The counts of an optimizer's state are its numbers that grow by one per update. Integers are int64 here, so that
schedules are computed in float64: of int32, optax computes them in float32.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from jaxddp.data.micro_batches import MicroBatches
from jaxddp.distributed.collectives import AXIS_NAME
from jaxddp.errors import InputError
from jaxddp.nn.model_tree import TreeMap
from jaxddp.parity.case_interface import AnyCase
from jaxddp.parity.jax_side.custom_step import CustomStep
from jaxddp.parity.jax_side.excerpt_program import QUICKLY
from jaxddp.parity.jax_side.multi_loss_step import MultiLossStep
from jaxddp.parity.jax_side.side import JaxSide
from jaxddp.parity.jax_side.widened import in_float64
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.rate_curves import UPDATES, made_gradients
from jaxddp.state import Params, TrainState

LONGEST = 64  # most steps between two updates of optax.MultiSteps
ROWS = 4096  # steps that are computed at once
# optax's states whose count drives nothing but a bias correction, which the run shows.
CORRECTING = (
    *("ScaleByAdamState", "ScaleByAmsgradState", "ScaleByBeliefState", "ScaleByLionState"),
    "ScaleByNovogradState",
)
OPTAX, JAXDDP = "optax.", "jaxddp.optim."


class Program(NamedTuple):
    """An optimizer as a function of its state.

    Attributes:
        init: returns the state before the first step; a large one is not held.
        step: (gradients, state, parameters) -> (updates by jax's names, the next state).
        gradients: number of a step -> its gradients.
        params: the parameters; None: the state holds them.
        differences: those of which updates are differences, rounded as they are; None: updates are none.
    """

    init: Callable[[], Any]
    step: Callable[[Any, Any, Any], tuple[Params, Any]]
    gradients: Callable[[int], Any]
    params: Any
    differences: Params | None = None


class Count(NamedTuple):
    """A count in a state.

    Attributes:
        place: its number among the state's leaves.
        owner: the class of the tuple that holds it.
        first: its value at the first update.
        is_integer: whether it is no floating-point number.
    """

    place: int
    owner: str
    first: int
    is_integer: bool


def programs_of(case: AnyCase, side: JaxSide, start: Arrays, trained: Sequence[str]) -> Iterator[Program]:
    """Yield the program of each optimizer of a case, on made gradients; of a `jax_step`, on the first batch.

    Args:
        case: model or port.
        side: its jax side.
        start: initial weights under torch's names.
        trained: the parameters that torch's optimizers hold.
    """
    params, buffers = side.from_torch(start)
    step = side.replica_step
    if isinstance(step, CustomStep):
        yield _of_custom_step(step, step.init(params, buffers), next(iter(case.batches())))
        return

    def gradients(number: int) -> Params:
        noise = made_gradients({name: start[name].shape for name in trained}, number)
        zeros = {name: np.zeros_like(x) for name, x in start.items() if name not in noise}
        return side.from_torch({**noise, **zeros}, adds=False)[0]

    if not isinstance(step, MultiLossStep):
        yield Program(
            partial(step.optimizer.init, params), partial(_updated, step.optimizer.update, dict), gradients, params
        )
        return
    step.init(params, buffers)  # makes the optimizers
    for tree, optimizer in step.optimizers:
        nested = tree.nest({name: params[name] for name in tree.paths})
        of_tree = partial(_of_tree, tree, gradients)
        yield Program(partial(optimizer.init, nested), partial(_updated, optimizer.update, tree.flat), of_tree, nested)


def _of_tree(tree: TreeMap, gradients: Callable[[int], Params], number: int) -> Any:
    of_all = gradients(number)
    return tree.nest({name: of_all[name] for name in tree.paths})


def _updated(
    update: Callable[..., Any], flat: Callable[[Any], Params], gradients: Any, state: Any, params: Any
) -> tuple[Params, Any]:
    updates, state = update(gradients, state, params)
    return flat(updates), state


def _of_custom_step(step: CustomStep, state: TrainState, batch: MicroBatches) -> Program:
    """Return the program of a whole step on the first replica's batch, from the same parameters each time."""
    of_first = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)

    def alone(state: TrainState) -> tuple[Params, TrainState]:
        after = step(state, of_first)[0]
        updates = {name: x - state.params[name] for name, x in after.params.items()}
        return updates, replace(after, params=state.params)

    def of_replica(gradients: None, state: TrainState, params: None) -> tuple[Params, TrainState]:
        results = jax.vmap(lambda _: alone(state), axis_name=AXIS_NAME)(jnp.zeros(1))
        return jax.tree.map(lambda x: x[0], results)

    return Program(lambda: state, of_replica, lambda _: None, None, state.params)


@dataclass(frozen=True)
class Response:
    """Elements of an optimizer's update as a function of its counts.

    Attributes:
        counts: the counts of its state.
        leaves: the state's leaves, with every count at a late step.
        period: steps between two updates: 1, or those of optax.MultiSteps.
        shown: names of hyperparameters that the state shows once.
        run: (counts' values, (ROWS, counts)) -> elements (ROWS, elements), and hyperparameters (ROWS, shown).
        rounding: error of each element, (elements,).
    """

    counts: tuple[Count, ...]
    leaves: Sequence[Any]
    period: int
    shown: tuple[str, ...]
    run: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    rounding: np.ndarray

    @property
    def owners(self) -> tuple[str, ...]:
        """Classes that hold the counts, each once."""
        return tuple(dict.fromkeys(count.owner for count in self.counts))

    @staticmethod
    def corrects(owner: str) -> bool:
        """Return whether the count of a class drives nothing but bias corrections, and torch's own momenta."""
        module, _, name = owner.rpartition(".")
        return (module.startswith(OPTAX) and name in CORRECTING) or module.startswith(JAXDDP)

    def steps(self, count: int) -> np.ndarray:
        """Return the steps below `count` at which the optimizer makes an update."""
        return np.arange(self.period - 1, count, self.period)

    def updates(self, steps: np.ndarray, owners: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the updates (n, elements) and the hyperparameters (n, shown) at some steps at which it updates.

        Args:
            steps: (n,).
            owners: classes whose counts are set to the step; the others are held.
        """
        held = [int(np.asarray(self.leaves[count.place]).reshape(())) for count in self.counts]
        made = steps // self.period
        columns = [
            made + count.first if count.owner in owners else np.full(len(steps), value)
            for count, value in zip(self.counts, held, strict=True)
        ]
        rows = np.stack(columns, axis=1).astype(np.int64) if columns else np.zeros((len(steps), 0), np.int64)
        padded = np.concatenate([rows, np.repeat(rows[-1:], -len(rows) % ROWS, axis=0)])
        parts = [self.run(part) for part in np.split(padded, len(padded) // ROWS)]
        updates, numbers = (np.concatenate(of_kind)[: len(steps)] for of_kind in zip(*parts, strict=True))
        return updates, numbers


def counts_nothing(state: Any) -> bool:
    """Return whether a state is optax's, and its integers are only those of bias corrections.

    >>> import optax
    >>> [counts_nothing(optimizer.init({})) for optimizer in (optax.adam(0.1), optax.adam(lambda count: 0.1))]
    [True, False]
    """
    leaves = [*zip(jax.tree.leaves(state), _owners(state), strict=True)]
    numbers = [owner for x, owner in leaves if np.size(x) == 1 and jnp.issubdtype(jnp.result_type(x), jnp.integer)]
    known = all(owner.startswith(OPTAX) for _, owner in leaves)
    return known and all(owner.rpartition(".")[2] in CORRECTING for owner in numbers)


def response_of(program: Program, elements: Mapping[str, np.ndarray]) -> Response:
    """Return the response of an optimizer.

    Args:
        program: the optimizer.
        elements: name of a parameter in jax -> flat places of the elements to look at.

    Raises:
        InputError: optax.MultiSteps makes no update in `LONGEST` steps.
    """
    state, period, counts = _advanced(program)
    leaves, structure = jax.tree.flatten(state)
    gradients = program.gradients(UPDATES * period - 1)
    shown = tuple(_hyperparameters(jax.eval_shape(program.step, gradients, state, program.params)[1]))

    def elements_at(row: Any, leaves: Sequence[Any], gradients: Any, params: Any) -> tuple[Any, Any]:
        changed = list(leaves)
        for count, value in zip(counts, row, strict=True):
            of_kind = value if count.is_integer else value.astype(float)
            changed[count.place] = of_kind.reshape(jnp.shape(changed[count.place]))
        updates, after = program.step(gradients, jax.tree.unflatten(structure, changed), params)
        chosen = [updates[name].reshape(-1)[places] for name, places in elements.items()]
        numbers = _hyperparameters(after)
        return jnp.concatenate(chosen), jnp.asarray([numbers[name] for name in shown], float)

    # As constants, large parameters would be compiled into the program.
    compiled = _compiled(elements_at, len(counts), leaves, gradients, program.params)

    def run(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        updates, numbers = compiled(jnp.asarray(rows), leaves, gradients, program.params)
        return np.asarray(updates, float), np.asarray(numbers, float)

    return Response(counts, leaves, period, shown, run, _rounding(program.differences, elements))


def _rounding(params: Params | None, elements: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return how far the updates of some elements are rounded as differences of parameters; None: they are none."""
    if params is None:
        return np.zeros(sum(map(len, elements.values())))
    sizes = [np.abs(np.asarray(params[name]).reshape(-1)[places]) for name, places in elements.items()]
    return np.finfo(float).eps * np.concatenate(sizes)


def _advanced(program: Program) -> tuple[Any, int, tuple[Count, ...]]:
    """Return the state before the `UPDATES`-th update, the steps between two updates, and the counts."""
    advance = jax.jit(lambda *args: program.step(*args)[1], compiler_options=QUICKLY)
    state = program.init()
    place, numbers, period = _mini_step(state), [_numbers(state)], 0
    while not period or len(numbers) < UPDATES * period:
        if len(numbers) > LONGEST and not period:
            raise InputError(f"jax_optimizer: optax.MultiSteps makes no update in {LONGEST} steps")
        state = advance(program.gradients(len(numbers) - 1), state, program.params)
        numbers.append(_numbers(state))
        if not period and (place is None or numbers[-1][place] == numbers[0][place]):
            period = len(numbers) - 1
    owners, kinds = [*_owners(state)], [jnp.result_type(x) for x in jax.tree.leaves(state)]
    at_updates = zip(*(of_leaves.items() for of_leaves in numbers[period - 1 :: period][:UPDATES]), strict=True)
    counts = [
        Count(
            of_leaf[0][0], owners[of_leaf[0][0]], int(of_leaf[0][1]), jnp.issubdtype(kinds[of_leaf[0][0]], jnp.integer)
        )
        for of_leaf in at_updates
        if all(later - earlier == 1 for (_, earlier), (_, later) in pairwise(of_leaf))
    ]
    return state, period, tuple(counts)


def _numbers(state: Any) -> dict[int, float]:
    """Return the leaves that are a single number, by their places."""
    numbers = {}
    for place, leaf in enumerate(jax.tree.leaves(state)):
        if np.size(leaf) == 1 and jnp.issubdtype(jnp.result_type(leaf), jnp.number):
            numbers[place] = float(np.asarray(leaf).reshape(()))
    return numbers


def _compiled(function: Callable[..., Any], counts: int, *held: Any) -> Callable[..., Any]:
    """Compile a function of counts for many of their values; casts of optax to float32 are lifted where jax allows."""
    rows = jnp.zeros((ROWS, counts), jnp.int64)
    mapped = jax.vmap(function, (0, *(None for _ in held)))
    try:
        with in_float64((), True, ("optax.",)):
            return jax.jit(mapped).lower(rows, *held).compile(QUICKLY)
    except Exception:  # it may refuse mixed dtypes
        return jax.jit(lambda *args: mapped(*args)).lower(rows, *held).compile(QUICKLY)


def _owners(node: Any, owner: str = "") -> Iterator[str]:
    """Yield for each leaf of a state the full name of the innermost class that holds it."""
    children, kind = jax.tree_util.default_registry.flatten_one_level(node) or (None, None), type(node)
    if children[0] is None:
        yield owner
        return
    own = not isinstance(node, dict | list) and kind is not tuple
    for child in children[0]:
        yield from _owners(child, f"{kind.__module__}.{kind.__qualname__}" if own else owner)


def _mini_step(state: Any) -> int | None:
    """Return the place of the micro-step of optax.MultiSteps among the leaves; None: there is none."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    names = [getattr(path[-1], "name", "") if path else "" for path in paths]
    return names.index("mini_step") if "mini_step" in names else None


def _hyperparameters(state: Any) -> dict[str, Any]:
    """Return the hyperparameters that optax.inject_hyperparams shows in a state, but for names that it has twice."""
    shown: dict[str, list[Any]] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        names = [getattr(key, "name", getattr(key, "key", None)) for key in path]
        if "hyperparams" in names and np.shape(leaf) == ():
            shown.setdefault(str(names[-1]), []).append(leaf)
    return {name: values[0] for name, values in shown.items() if len(values) == 1}
