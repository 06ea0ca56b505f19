"""Functions of the user's files in which operations are."""

from collections.abc import Iterable, Sequence

from jaxddp.parity.operations import SourceLine
from jaxddp.parity.user_code.stated import text_of


def common_function(chains: Sequence[Sequence[SourceLine]], users: Iterable[Sequence[SourceLine]] = ()) -> str:
    """Return the name of the function, called from one line, in which all of some lines are; "": it has none.

    Args:
        chains: for each operation, its line and those of the calls around it, the innermost first.
        users: the same for the operations that use their result, of which none is in that function.
    """
    outermost_first = [[*reversed(chain)] for chain in chains]
    depth = 0
    while outermost_first and all(
        len(chain) > depth + 1 and chain[depth] == outermost_first[0][depth] for chain in outermost_first
    ):
        depth += 1
    around = [*reversed(outermost_first[0][:depth])] if outermost_first else []
    if any(len(chain) > depth and [*chain[len(chain) - depth :]] == around for chain in users):
        return ""
    names = {_name_at(chain[depth]) for chain in outermost_first} if depth else set()
    name = names.pop() if len(names) == 1 else ""
    return "" if name.startswith("__") or name == "forward" else name


def _name_at(line: SourceLine) -> str:
    text = text_of(line)
    function = None if text is None else text.function_at(line.number)
    return "" if function is None else function.name
