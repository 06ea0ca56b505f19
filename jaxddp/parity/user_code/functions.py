"""Functions of the user's files in which operations are."""

from collections.abc import Sequence

from jaxddp.parity.operations import SourceLine
from jaxddp.parity.user_code.stated import text_of


def common_function(chains: Sequence[Sequence[SourceLine]]) -> str:
    """Return the name of the function, called from one line, in which all of some lines are; "": it has none.

    Args:
        chains: for each operation, its line and those of the calls around it, the innermost first.
    """
    outermost_first = [[*reversed(chain)] for chain in chains]
    depth = 0
    while outermost_first and all(
        len(chain) > depth + 1 and chain[depth] == outermost_first[0][depth] for chain in outermost_first
    ):
        depth += 1
    names = {_name_at(chain[depth]) for chain in outermost_first} if depth else set()
    name = names.pop() if len(names) == 1 else ""
    return "" if name.startswith("__") or name == "forward" else name


def _name_at(line: SourceLine) -> str:
    text = text_of(line)
    function = None if text is None else text.function_at(line.number)
    return "" if function is None else function.name
