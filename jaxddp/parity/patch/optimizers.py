"""Edits of the statement that makes an optimizer, after the code of a fix."""

import ast
import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence

from jaxddp.parity.findings import Cause
from jaxddp.parity.patch import edits
from jaxddp.parity.user_code.file_text import Edit, FileText, calls, last_name

MODULES = ("jax", "jaxddp.nn.layers", "jaxddp.optim", "jaxddp.schedules", "optax")  # that an edit may need
RATES = ("lr", "schedule")  # names of the learning rate in the code of a fix
RATE = "learning_rate"
WITH_RATE = frozenset(
    "sgd adam adamw nadam nadamw radam adamax adadelta adagrad adafactor amsgrad rmsprop rprop lion lamb muon"  # noqa: SIM905
    " noisy_sgd yogi adabelief scale_by_learning_rate asgd".split()
)
# Torch's schedulers -> functions of jaxddp.schedules, which take the same arguments.
SCHEDULES = {
    **{"CosineAnnealingLR": "cosine", "CosineAnnealingWarmRestarts": "cosine_restarts", "StepLR": "step"},
    **{"MultiStepLR": "multi_step", "ConstantLR": "constant_factor", "LinearLR": "linear"},
    **{"ExponentialLR": "exponential", "PolynomialLR": "polynomial", "OneCycleLR": "one_cycle"},
}
MASKS = (
    "lambda params: jax.tree.map(lambda p: p.ndim > 1, params)",
    "lambda params: jax.tree_util.tree_map_with_path(lambda path, p: 'kernel' in jax.tree_util.keystr(path), params)",
)


def makes_optimizer(statement: ast.stmt) -> bool:
    """Return whether a statement calls a function that makes an optimizer."""
    return any(last_name(call.func) in WITH_RATE for call in calls(statement))


def calls_in(fix: str) -> Iterator[ast.Call]:
    """Yield the calls that the text of a fix has as code, the outer ones first.

    >>> [ast.unparse(call) for call in calls_in("use jax.nn.gelu(x, approximate=False) for torch's default")]
    ['jax.nn.gelu(x, approximate=False)']
    """
    for found in re.finditer(r"[A-Za-z_][\w.]*\(", fix):
        for end in re.compile(r"\)").finditer(fix, found.end()):
            with contextlib.suppress(SyntaxError):
                yield ast.parse(fix[found.start() : end.end()], mode="eval").body  # type: ignore[misc]
                break


def optimizer_edits(
    source: FileText, near: Sequence[ast.stmt], cause: Cause, torch: FileText | None
) -> Iterator[Edit | Sequence[Edit]]:
    """Yield edits of an optimizer and its schedule.

    Args:
        source: the JAX file.
        near: statements that make the optimizer, the first one's own first.
        cause: cause of the difference.
        torch: the torch file; None: unknown.
    """
    fixes = [call for fix in cause.fixes for call in itertools.islice(calls_in(fix), 1)]
    for statement in near:
        yield from _of_code(source, statement, fixes)
    for statement in near:
        yield from edits.operators(source, statement)
        yield from edits.without_constant(source, statement)
        yield from edits.entries(source, statement)
    for code in _schedules(torch) if torch is not None else ():
        yield from _with_schedule(source, near, code)
    for statement in near:
        yield from _of_chain(source, statement)
        yield from edits.flags(source, statement)
    yield from _replaced(source, near, fixes)


def _of_code(source: FileText, statement: ast.stmt, fixes: Sequence[ast.Call]) -> Iterator[Edit]:
    """Yield the options of the fix's code in the calls of the same names; all at once, and one by one."""
    wanted = [call for fix in fixes for call in ast.walk(fix) if isinstance(call, ast.Call)]
    for call in calls(statement):
        for code in wanted:
            if last_name(call.func) != last_name(code.func):
                continue
            text = source.segment(call)
            for keyword in code.keywords:
                for value in _values(ast.unparse(keyword.value)):
                    yield call, edits.with_option(source, call, str(keyword.arg), value)
            for keyword in code.keywords:
                parsed = FileText(text)
                again = parsed.tree.body[0].value  # type: ignore[attr-defined]
                text = edits.with_option(parsed, again, str(keyword.arg), next(_values(ast.unparse(keyword.value))))
            yield call, text
            if (
                not code.keywords
                and len(code.args) == 1
                and len(call.args) == 1
                and isinstance(code.args[0], ast.Constant)
            ):
                yield call.args[0], ast.unparse(code.args[0])


def _values(code: str) -> Iterator[str]:
    yield from MASKS if code == "mask" else (code,)


def _of_chain(source: FileText, statement: ast.stmt) -> Iterator[Edit]:
    """Yield a chain with one transformation left out, and with two neighbours exchanged."""
    for call in calls(statement):
        if last_name(call.func) == "chain" and len(call.args) > 1:
            parts = [source.segment(x) for x in call.args]
            name = source.segment(call.func)
            for k in range(len(parts)):
                yield call, f"{name}({', '.join(parts[:k] + parts[k + 1 :])})"
            for k in range(len(parts) - 1):
                yield call, f"{name}({', '.join([*parts[:k], parts[k + 1], parts[k], *parts[k + 2 :]])})"


def _schedules(torch: FileText) -> Iterator[str]:
    """Yield code of the schedules of jaxddp that are those of a torch file, with its numbers."""
    every = [call for statement in torch.statements for call in calls(statement)]
    rates = [x.value for call in every for x in call.keywords if x.arg == "lr"]
    numbers = {name: f"{value:g}" for name, value in torch.constants.items()}
    for call in every:
        name = SCHEDULES.get(last_name(call.func))
        for rate in dict.fromkeys(map(torch.segment, rates if name else ())):
            given = ", ".join([rate, *map(torch.segment, (*call.args[1:], *call.keywords))])
            yield f"jaxddp.schedules.{name}({given})"
            yield FileText(f"jaxddp.schedules.{name}({given})").filled(numbers)


def _with_schedule(source: FileText, near: Sequence[ast.stmt], code: str) -> Iterator[Sequence[Edit]]:
    """Yield a schedule in place of the learning rate of each optimizer."""
    for statement in near:
        for call in calls(statement):
            if last_name(call.func) in WITH_RATE:
                given = [x.value for x in call.keywords if x.arg == RATE] or call.args[:1]
                yield from ([(rate, code), *imports(source, code)] for rate in given)


def _replaced(source: FileText, near: Sequence[ast.stmt], fixes: Sequence[ast.Call]) -> Iterator[Edit | Sequence[Edit]]:
    """Yield the code of the fix in place of the optimizer, with the file's learning rate."""
    for statement in near:
        rates = [_rate(source, call) for call in calls(statement) if last_name(call.func) in WITH_RATE]
        made = [x for x in calls(statement) if last_name(x.func) in WITH_RATE or last_name(x.func) == "chain"]
        if not made or not any(rates):
            continue
        for fix, rate, mask in itertools.product(fixes, filter(None, dict.fromkeys(rates)), MASKS):
            code = FileText(ast.unparse(fix)).filled({**dict.fromkeys(RATES, rate), "mask": mask})
            for place in made:
                yield [(place, code), *imports(source, code)]


def _rate(source: FileText, call: ast.Call) -> str:
    """Return the text of a call's learning rate; "" if it has none."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == RATE] or call.args[:1]
    return source.segment(given[0]) if given else ""


def imports(source: FileText, code: str) -> list[Edit]:
    """Return edits that import the modules that code needs and the file lacks."""
    known = {x.asname or x.name for node in ast.walk(source.tree) if isinstance(node, ast.Import) for x in node.names}
    lacking = [x for x in MODULES if f"{x}." in code and x not in known]
    others = [x for x in source.tree.body if getattr(x, "module", "") != "__future__"]
    first = [x for x in others if isinstance(x, ast.Import | ast.ImportFrom)][:1] or others[1:2]
    if not lacking or not first:
        return []
    mark = ast.Pass(lineno=first[0].lineno, col_offset=0, end_lineno=first[0].lineno, end_col_offset=0)
    return [(mark, "".join(f"import {name}\n" for name in lacking))]
