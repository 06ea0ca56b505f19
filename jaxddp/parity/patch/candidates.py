"""Candidates of a patch: texts of the JAX file in which what a cause names is edited, the likeliest first."""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

from jaxddp.parity.catalogue import is_of_optimizer
from jaxddp.parity.deviation import Value
from jaxddp.parity.findings import Cause
from jaxddp.parity.patch import edits
from jaxddp.parity.patch.optimizers import calls_in, imports, makes_optimizer, optimizer_edits
from jaxddp.parity.patch.transplant import Mirror
from jaxddp.parity.user_code.file_text import Edit, FileText, calls, last_name

FIRST = 2  # statements to which edits that a name suggests are made before those that mirror torch
NEAR = 12  # statements whose operators and orders are edited, from the quoted one on
STOP, MEAN = "jax.lax.stop_gradient({})", "jax.lax.pmean({}, 'replica')"


def candidates(text: str, line: int, cause: Cause, torch: tuple[str, int] | None = None) -> Iterator[str]:
    """Yield edited texts of a JAX file, each once.

    Args:
        text: the file.
        line: the line that the cause quotes.
        cause: its names, values and fixes.
        torch: text of the torch file and the line that is quoted of it; None: unknown.

    Raises:
        SyntaxError: the text is not Python.
    """
    source, seen = FileText(text), {text}
    for edit in _edits(source, line, cause, torch):
        group = [edit] if isinstance(edit, tuple) else edit
        edited = source.edited(*group)
        if edited not in seen and _is_python(edited):
            seen.add(edited)
            yield edited


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _edits(source: FileText, line: int, cause: Cause, torch: tuple[str, int] | None) -> Iterator[Edit | Sequence[Edit]]:
    near = source.near(line)
    if not near:
        return
    mirror = _mirror(source, torch)
    if mirror is not None and torch is not None:
        near[1:1] = [x for x in mirror.twin(torch[1]) if x not in near]
    values = [value for deviation in cause.deviations for value in deviation.values]
    for one in values:
        if _is_extra(one):
            yield from _of_factor(source, near[:FIRST], one)
            continue
        yield from _numbers(source, near[:FIRST], one)
        yield from _of_functions(source, near, one)
        yield from _of_options(source, near, one)
        yield from _numbers(source, near, one)
        yield from _at_once([*_numbers(source, source.statements, one)])
    if len(values) > 1:
        yield from _at_once([edit for one in values for edit in _numbers(source, near[:1], one)], least=1)
    yield from _of_names(source, near[:FIRST], cause)
    yield from _of_fixes(source, near, cause)
    if any(map(is_of_optimizer, cause.names)) or makes_optimizer(near[0]):
        makers = [x for x in source.statements if x not in near and makes_optimizer(x)]  # of a quoted schedule
        yield from optimizer_edits(source, [*near, *makers], cause, mirror.torch if mirror is not None else None)
    elif mirror is not None and torch is not None:
        yield from mirror.edits(line, torch[1])
    for one in values:
        yield from _of_factor(source, near, one) if _is_extra(one) else ()
    yield from _of_names(source, near[:NEAR], cause)
    if mirror is not None:
        yield from mirror.of_constants()
    for one in values:
        for statement in near:
            yield from edits.scaled(source, statement, one.jax, one.torch)
    for statement in near[:NEAR]:
        yield from edits.swapped(source, statement)
        yield from edits.operators(source, statement)
        yield from edits.parts(source, statement)
        yield from edits.flags(source, statement)


def _numbers(source: FileText, statements: Iterable[ast.stmt], value: Value) -> Iterator[Edit]:
    for statement in statements:
        yield from edits.numbers(source, statement, value.jax, value.torch)


def _at_once(every: Sequence[Edit], least: int = 2) -> Iterator[Sequence[Edit]]:
    """Yield edits as one, if there are so many at least and none is within another."""
    nodes = [node for node, _ in every]
    overlap = any(one is not other and one in ast.walk(other) for one in nodes for other in nodes)
    if len(every) >= least and not overlap:
        yield every


def _is_extra(value: Value) -> bool:
    """Return whether a value is a factor that the reference does not have."""
    return value.is_factor and value.torch == "1"


def _of_factor(source: FileText, near: Sequence[ast.stmt], factor: Value) -> Iterator[Edit]:
    """Yield what undoes a factor: a mean for a sum, the operation with a number left out, another number."""
    for statement in near:
        yield from edits.swapped(source, statement)
        yield from edits.factors(source, statement)
    for statement in near:
        yield from edits.scaled(source, statement, factor.jax, factor.torch)


def _mirror(source: FileText, torch: tuple[str, int] | None) -> Mirror | None:
    if torch is None:
        return None
    try:
        return Mirror(source, FileText(torch[0]))
    except SyntaxError:
        return None


def _of_options(source: FileText, near: Sequence[ast.stmt], given: Value) -> Iterator[Edit | Sequence[Edit]]:
    """Yield the option that the cause names, with the reference's value, in one call, and in all calls of its name."""
    call = edits.jax_name(given.call)
    for name in edits.OPTIONS.get(given.key, (given.key,)) if call and given.key else ():
        for value in _values(given, name):
            of_all = [[*edits.option(source, x, call, name, value)] for x in near]
            yield from (edit for of_one in of_all for edit in of_one)
            for statement in near:
                for other in calls(statement):
                    if any(keyword.arg == name for keyword in other.keywords):
                        yield other, edits.with_option(source, other, name, value)
            yield from _at_once([one for x in source.statements for one in edits.option(source, x, call, name, value)])


def _values(given: Value, name: str) -> Iterator[str]:
    yield edits.PADDINGS.get(given.torch, given.torch) if name == "padding" else given.torch
    number = edits.number_in(given.torch)
    if name in ("momentum", "rate") and number is not None:  # what one library keeps, another one replaces
        yield f"{1 - number:.10g}"


def _of_functions(source: FileText, near: Sequence[ast.stmt], names: Value) -> Iterator[Edit]:
    for statement in near if names.torch.isidentifier() else ():
        yield from edits.function(source, statement, edits.jax_name(names.jax), edits.jax_name(names.torch))
    for statement in near:
        yield from edits.operator(source, statement, names.jax, names.torch)
        yield from edits.strings(source, statement, names.jax, names.torch)


def _of_fixes(source: FileText, near: Sequence[ast.stmt], cause: Cause) -> Iterator[Edit | Sequence[Edit]]:
    """Yield the options and functions of the fix's code, in calls of the same name."""
    for fix in cause.fixes:
        code = [*calls_in(fix)]
        pairs = [
            (last_name(one.func), keyword.arg, ast.unparse(keyword.value)) for one in code for keyword in one.keywords
        ]
        pairs += [(last_name(one.func), name, value) for one in code for name, value in options_of(fix)]
        for name, option, value in dict.fromkeys(pair for pair in pairs if pair[1]):
            every = [edit for x in source.statements for edit in edits.option(source, x, name, str(option), value)]
            yield from (edit for x in near for edit in edits.option(source, x, name, str(option), value))
            yield from every
            yield from _at_once(every)
        for one in code:
            yield from _of_other_modules(source, ast.unparse(one.func))
        for option, value in options_of(fix):
            for statement in near:
                for call in calls(statement):
                    if any(keyword.arg == option for keyword in call.keywords):
                        yield call, edits.with_option(source, call, option, value)


def options_of(fix: str) -> Iterator[tuple[str, str]]:
    """Yield the options that a fix names outside of a call.

    >>> [*options_of("use momentum=0.9 in nnx.BatchNorm")]
    [('momentum', '0.9')]
    """
    yield from re.findall(r"(?<![\w.])([a-z]\w*)=((?:\(\(.*?\)\))|[\w.\-]+)", fix)


def _of_other_modules(source: FileText, function: str) -> Iterator[Sequence[Edit]]:
    """Yield a function of jaxddp in place of one of the same name, with its arguments and without its options."""
    module, _, name = function.rpartition(".")
    for call in (call for x in source.statements if module.startswith("jaxddp") for call in calls(x)):
        if last_name(call.func) == name and source.segment(call.func) != function:
            arguments = ", ".join(map(source.segment, call.args))
            yield [(call, f"{function}({arguments})"), *imports(source, function)]


def _of_names(source: FileText, near: Sequence[ast.stmt], cause: Cause) -> Iterator[Edit]:
    """Yield what the names of a cause suggest: a call left out or put around, another axis or order."""
    names = set(cause.names)
    for statement in near if "gradient_stopped" in names else ():
        yield from edits.left_out(source, statement, ("stop_gradient",))
    for statement in near if "gradient_not_stopped" in names else ():
        yield from edits.wrapped(source, statement, STOP)
    for statement in near if "no_sync" in names else ():
        yield from edits.wrapped(source, statement, MEAN)
    for statement in near if "call_added" in names else ():
        yield from edits.left_out(source, statement)
    for statement in near if "other_axis" in names else ():
        yield from edits.axes(source, statement)
    for statement in near if names & {"other_order", "other_operand"} else ():
        yield from edits.orders(source, statement)
