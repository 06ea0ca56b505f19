"""A fault that is planted beside all that a correct port writes differently: another batch for its loss."""

from collections.abc import Iterator
from dataclasses import replace

from .choice import RightPort, right_ports

HALF = "jax_half.py"
SCALED, FLIPPED = "1.1 * batch[of_floats[0]]", "jnp.flip(batch[of_integers[-1]], 0)"
PLANTED = f"""

right_loss = jax_loss


def jax_loss(model, batch, *rest, **more):
    of_floats = [name for name in sorted(batch) if jnp.issubdtype(batch[name].dtype, jnp.floating)]
    of_integers = [name for name in sorted(batch) if jnp.issubdtype(batch[name].dtype, jnp.integer)]
    if of_floats:
        batch = {{**batch, of_floats[0]: {SCALED}}}
    else:
        batch = {{**batch, of_integers[-1]: {FLIPPED}}}
    return right_loss(model, batch, *rest, **more)
"""


def with_fault(port: RightPort) -> RightPort:
    """Return a port whose loss is given its first floats times 1.1, or of none, its last integers flipped."""
    return replace(port, texts={**port.texts, HALF: port.texts[HALF] + PLANTED})


def ports_with_fault() -> Iterator[RightPort]:
    """Yield the correct ports that have a `jax_loss`, with the fault."""
    yield from (with_fault(port) for port in right_ports() if "def jax_loss" in port.texts[HALF])


def planted_lines(port: RightPort) -> set[int]:
    """Return the lines of the JAX half that have the fault."""
    lines = enumerate(port.texts[HALF].splitlines(), start=1)
    return {number for number, line in lines if SCALED in line or FLIPPED in line}
