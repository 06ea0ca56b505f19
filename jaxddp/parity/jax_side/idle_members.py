"""Watch the members of a port's optax chain, which may return the updates that they are given."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import get_opaque_trace_state

from jaxddp.parity.case_interface import Trajectory
from jaxddp.parity.idle_operations import Called, Calls, Kept
from jaxddp.parity.jax_side.excerpt_program import QUICKLY
from jaxddp.parity.jax_side.optimizer_line import observing
from jaxddp.parity.jax_side.recorded_runs import given_gradients
from jaxddp.parity.jax_side.side import JaxSide
from jaxddp.parity.operations import SourceLine

# Members of containers count by themselves; gradients of frozen parameters are 0 before they are set to 0.
CONTAINERS = ("chain", "named_chain", "identity", "with_extra_args_support", "set_to_zero")


def members_of_optimizer(side: JaxSide, reference: Trajectory) -> Iterator[Calls]:
    """Yield, for each step of the reference, the members of the optimizer and whether they changed its gradients."""
    step: Any = side.replica_step
    members: list[Called] = []
    params, buffers = side.from_torch(reference.start)
    opt_state = step.init(params, buffers).opt_state
    update: Any = jax.jit(with_members(step.optimizer.update, members), compiler_options=QUICKLY)
    for number in range(len(reference.records)):
        params, _ = side.from_torch(reference.before(number))
        gradients = given_gradients(reference, number, side)
        if not number:
            update.eval_shape(gradients, opt_state, params)  # notes the members
        if not members:
            return
        (_, opt_state), flags = update(gradients, opt_state, params)
        yield kept_by(members, flags)


def with_members(function: Callable[..., Any], members: list[Called]) -> Callable[..., Any]:
    """Return the function with a second result: for each member of a chain, whether it returns what it is given.

    Args:
        function: function that updates by transformations that a user's lines make.
        members: list that holds the members once the function is traced.
    """

    def watched(*arguments: Any) -> tuple[Any, list[Any]]:
        members.clear()
        flags: list[Any] = []
        outside = get_opaque_trace_state(convention="jaxddp")

        def observe(line: SourceLine, maker: str, before: Any, after: Any, state: Any) -> None:
            # A flag that is made inside of a condition cannot be returned.
            if maker in ("", *CONTAINERS) or get_opaque_trace_state(convention="jaxddp") != outside:
                return
            members.append(Called(maker, (), line))
            flags.append(_is_idle(before, after, state))

        with observing(observe):
            return function(*arguments), flags

    return watched


def _is_idle(before: Any, after: Any, state: Any) -> Any:
    """Return whether a transformation had no effect: it has changed nothing, or has found no update to refuse."""
    if (refused := getattr(state, "total_notfinite", None)) is not None:  # of apply_if_finite
        return refused == 0
    pairs = [*zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=False)]
    return jnp.all(jnp.stack([jnp.asarray(True), *(jnp.array_equal(x, y) for x, y in pairs)]))


def kept_by(members: Sequence[Called], flags: Sequence[Any]) -> Calls:
    """Return members and whether they have returned what they were given, on all replicas."""
    calls: Calls = {}
    for member, flag in zip(members, jax.device_get(list(flags)), strict=True):
        operands = frozenset({0} if np.all(flag) else ())
        calls[member] = Kept(calls.get(member, Kept(operands)).operands & operands)
    return calls
