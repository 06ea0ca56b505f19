"""What the catalogue says about a fault."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A kind of mistake.

    Attributes:
        title: what the JAX side does.
        fix: what it should do instead.
        thread: a public report of the fault, as owner/repository#number; "" if there is none.
    """

    title: str
    fix: str
    thread: str = ""
