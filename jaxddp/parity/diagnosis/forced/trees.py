"""Expressions of both programs as trees, and the one place at which two of them differ."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxddp.parity.deviation import Statement, Value

INFIX = {
    **dict.fromkeys(("add", "add_", "add_any"), "+"),
    **dict.fromkeys(("sub", "sub_"), "-"),
    **dict.fromkeys(("mul", "mul_"), "*"),
    **dict.fromkeys(("div", "div_", "true_divide"), "/"),
    **dict.fromkeys(("pow", "pow_", "integer_pow"), "**"),
    **dict.fromkeys(("matmul", "dot_general", "mm", "bmm"), "@"),
    **{"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="},
}
SWAPPED = {"rsub": "-", "__rsub__": "-", "__rdiv__": "/", "__rpow__": "**", "__rmul__": "*"}
WORDS = {"+": "add", "-": "sub", "*": "mul", "/": "div", "**": "pow", "@": "matmul"}
COMMUTATIVE = ("+", "*", "maximum", "minimum")
BOUNDS = {"max=": "minimum", "min=": "maximum"}  # an option of torch's clamp -> the function that it is then
NARROW = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # types of few bits, and their relative rounding
LONGEST, LONGEST_ADDED = 40, 160  # characters of an operand that a label says, and of what is added


@dataclass(frozen=True)
class Tree:
    """An operation and its operands, or a value, a number or an option without any.

    Attributes:
        function: the operation's name or sign; of others, their text.
        operands: the operands, in order.
        value: which value it is: two may have the same text; None: it is none.
        at: index of an operation's result in its program; None: unknown.
        shown: the expression as code, if its operands have another order; "": they have not.
    """

    function: str
    operands: tuple["Tree", ...] = ()
    value: int | None = None
    at: int | None = field(default=None, compare=False)
    shown: str = field(default="", compare=False)

    def __str__(self) -> str:
        if self.shown:
            return self.shown
        texts = [*map(str, self.operands)]
        if self.function in INFIX.values() and len(texts) == 2:
            return f"({texts[0]} {self.function} {texts[1]})"
        if self.function == "-" and texts:
            return f"-{texts[0]}"
        is_call = bool(texts) or (self.value is None and self.function.isidentifier())
        return f"{self.function}({', '.join(texts)})" if is_call else self.function


class Description(NamedTuple):
    """What an expression of the port has in place of the reference's.

    Attributes:
        fault: a name of `catalogue.EDITS`.
        what: the difference; None: it cannot be said in a line.
        values: the numbers or functions of both sides.
        at: the results of the operations that differ, see `Tree`.
    """

    fault: str
    what: Statement | None
    values: tuple[Value, ...] = ()
    at: tuple[int | None, int | None] = (None, None)


def operation(name: str, shown: str, operands: Sequence[Tree], at: int | None = None) -> Tree:
    """Return an operation as Python writes it; `shown`: its name, where it has no sign.

    >>> x = Tree("x", value=0)
    >>> str(operation("__rsub__", "", [x, Tree("1")])), str(operation("relu", "relu", [x]))
    ('(1 - x)', 'relu(x)')
    """
    if name in SWAPPED and len(operands) == 2:
        return Tree(SWAPPED[name], (operands[1], operands[0]), at=at)
    if name in INFIX and len(operands) == 2:
        return Tree(INFIX[name], tuple(operands), at=at)
    return Tree("-" if name == "neg" and len(operands) == 1 else shown, tuple(operands), at=at)


def difference(jax: Tree, torch: Tree, call: str = "") -> Description | None:
    """Return the only difference of two expressions; None: they are equal, or differ in more.

    Args:
        jax, torch: the expressions.
        call: name of the function that is given their values.

    >>> x, y = Tree("x", value=0), Tree("y", value=1)
    >>> twice = operation("mul", "", [Tree("2"), x])
    >>> others = x, operation("mul", "", [x, y]), operation("add", "", [Tree("2"), x])
    >>> [difference(one, twice).fault for one in others]
    ['call_left_out', 'other_operand', 'other_function']
    """
    jax, torch = _plain(jax), _plain(torch)
    if jax.function != torch.function or len(jax.operands) != len(torch.operands) or not jax.operands:
        found = _label(jax, torch, call) if jax != torch else None
        return found and found._replace(at=(jax.at, torch.at))
    apart = min(_pairings(jax, torch), key=len)
    if len(apart) == 1:
        found = difference(*apart[0], _word(torch))
        if found is None or found.fault == "call_added":  # torch's line is where it gives the value another name
            return found
        return found._replace(at=(_first(found.at[0], jax.at), _first(found.at[1], torch.at)))
    if apart and {*jax.operands} == {*torch.operands}:
        return Description("other_order", Statement("operands_reversed", call=_word(torch)), at=(jax.at, torch.at))
    return None


def narrowest(jax: Tree, torch: Tree) -> str:
    """Return the type with the fewest bits to which the port alone casts values; "": to none.

    >>> x = Tree("x", value=0)
    >>> cast = operation("mul", "", [Tree("bfloat16", (x,)), x])
    >>> narrowest(cast, x), narrowest(cast, cast), narrowest(x, x)
    ('bfloat16', '', '')
    """
    casts = NARROW.keys() & {*_functions(jax)} - {*_functions(torch)}
    return max(casts, key=NARROW.__getitem__, default="")


def _functions(tree: Tree) -> Iterator[str]:
    yield tree.function
    for operand in tree.operands:
        yield from _functions(operand)


def _first(index: int | None, other: int | None) -> int | None:
    return other if index is None else index


def _pairings(jax: Tree, torch: Tree) -> Iterator[list[tuple[Tree, Tree]]]:
    """Yield the operands that differ, also those of a sum or product in the other order."""
    for operands in (jax.operands, jax.operands[::-1])[: 1 + (jax.function in COMMUTATIVE)]:
        yield [(x, y) for x, y in zip(operands, torch.operands, strict=True) if x != y]


def _plain(tree: Tree) -> Tree:
    """Return an expression with squares as powers, bounds as minima, and the operands of sums in one order.

    >>> x = Tree("x", value=0)
    >>> _plain(Tree("clamp", (x, Tree("max=5")))) == _plain(Tree("minimum", (x, Tree("5"))))
    True
    """
    operands = tuple(map(_plain, tree.operands))
    if tree.function == "square":
        return Tree("**", (*operands, Tree("2")), at=tree.at, shown=f"{tree}")
    function = tree.function
    if function in ("clamp", "clip") and len(operands) == 2 and operands[1].function[:4] in BOUNDS:
        function, operands = BOUNDS[operands[1].function[:4]], (operands[0], Tree(operands[1].function[4:]))
    ordered = tuple(sorted(operands, key=str)) if function in COMMUTATIVE else operands
    return Tree(function, ordered, tree.value, tree.at, f"{tree}")


def _label(jax: Tree, torch: Tree, call: str) -> Description | None:
    if jax in torch.operands:
        return _left_out(torch, jax)
    if torch in jax.operands:
        return _added(jax, torch, call)
    if not jax.operands or not torch.operands:
        return _other_operand(jax, torch, call)
    if jax.operands == torch.operands or (jax.operands == torch.operands[::-1] and torch.function in COMMUTATIVE):
        names = _word(jax), _word(torch)
        what = Statement("other_function", jax=names[0], torch=names[1], of=" and ".join(_said(torch.operands)))
        return Description("other_function", what, (Value(*names),))
    return None


def _other_operand(jax: Tree, torch: Tree, call: str) -> Description | None:
    """Return the label of a number, a value or an operation's result in place of another one; None: of options."""
    mine, other = (f"{_word(x)}(...)" if x.operands else x.function for x in (jax, torch))
    if _is_number(mine) and _is_number(other):
        what = Statement("number_instead", jax=mine, torch=other, call=call)
        return Description("number", what, (Value(mine, other),))
    is_option = "=" in mine + other or not (jax.operands or torch.operands or jax.value is not torch.value)
    if is_option or mine == other or not call:
        return None
    return Description("other_operand", Statement("other_operand", jax=mine, torch=other, call=call))


def _left_out(longer: Tree, shorter: Tree) -> Description | None:
    """Return the label of an operation that torch alone makes, or of an operand; None: it has several further ones."""
    by, of = _further(longer, shorter)
    if by is None:
        return None
    if _keeps(longer, shorter):
        return Description("call_left_out", Statement("call_left_out", call=_word(longer), by=by, of=of))
    what = Statement("operand_left_out", operands=(by,), call=_word(longer), by="")
    return Description("operand_left_out", what) if by else None


def _added(longer: Tree, shorter: Tree, call: str) -> Description | None:
    """Return the label of an operation that the port alone makes; None: it is long."""
    jax, torch = _said([longer], LONGEST_ADDED), _said([shorter], LONGEST_ADDED)
    if not jax or not torch:
        return None
    what = Statement("expressions", jax=jax[0], torch=torch[0], call=call, module="", by="added")
    return Description("call_added", what)


def _keeps(longer: Tree, shorter: Tree) -> bool:
    """Return whether an operation changes one value by others, as x / y does x, and not y."""
    return longer.operands[0] == shorter or longer.function in COMMUTATIVE


def _further(longer: Tree, shorter: Tree) -> tuple[str | None, str]:
    """Return the other operand of an operation, and one of them, as code; None: it has several others."""
    others = list(longer.operands)
    others.remove(shorter)
    return (None if len(others) > 1 else "".join(_said(others))), "".join(_said([shorter]))


def _said(operands: Sequence[Tree], longest: int = LONGEST) -> list[str]:
    """Return operands as code, without those that are long."""
    texts = (str(x) for x in operands)
    return [text[1:-1] if text.startswith("(") else text for text in texts if len(text) <= longest]


def _word(tree: Tree) -> str:
    return "neg" if tree.function == "-" and len(tree.operands) == 1 else WORDS.get(tree.function, tree.function)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
