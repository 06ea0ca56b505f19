"""What a cause is, is data: its sentence is made in jaxddp/parity/report, and nothing makes data of it again."""

import ast
import inspect
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

import jaxddp.parity
from jaxddp.parity.report.sentences import COMMON, SENTENCES

PARITY = Path(jaxddp.parity.__file__).parent
LAYING_OUT = ("report", "convert")  # folders that lay words out, or have other words: those of names of arrays
WORDS = ("says", "what")
TEXT = {"split", "rsplit", "splitlines", "partition", "rpartition", "startswith", "endswith"}
TEXT |= {"removeprefix", "removesuffix", "strip", "lstrip", "rstrip", "find", "index", "count", "replace"}
PATTERN = {"match", "search", "fullmatch", "findall", "finditer", "sub", "subn", "split"}
# Modules that write reports, and their folder.
WRITERS = {"__init__.py", "checking.py", "command.py", "reporting.py", "recordings/compare.py", "recordings/command.py"}
# Classes and functions that are given statements, or what a sentence is filled in with.
GIVEN = {"Statement", "but", "Deviation", "Change", "Hypothesis", "OptimizerEdit", "LocatedFault", "discrete"}
GIVEN |= {"multiplied", "_edit", "_change", "_known", "_kernel", "_epsilon", "_tried", "scaled", "fault"}
Assigned = Mapping[str, Sequence[ast.expr]]  # variable -> what it is assigned
TEXTS = {"measured", "fix", "detail", "stage"}  # what such a call may be given in words


def parsed_words(tree: ast.AST) -> Iterator[str]:
    """Yield the code that takes words apart."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=attr) if attr in TEXT and is_words(value):
                yield ast.unparse(node)
            case ast.Call(func=ast.Attribute(attr=attr), args=args) if attr in PATTERN and any(map(is_words, args)):
                yield ast.unparse(node)
            case ast.Compare(ops=ops, comparators=right):
                pairs = zip(ops, right, strict=True)
                if any(isinstance(op, ast.In | ast.NotIn) and is_words(one) for op, one in pairs):
                    yield ast.unparse(node)


def is_words(node: ast.expr) -> bool:
    return getattr(node, "id", getattr(node, "attr", "")) in WORDS


def test_no_module_parses_the_words_of_a_cause() -> None:
    found = {
        f"{path.relative_to(PARITY)}: {code}"
        for path in PARITY.rglob("*.py")
        if path.relative_to(PARITY).parts[0] not in LAYING_OUT
        for code in parsed_words(ast.parse(path.read_text()))
    }
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "known.says.startswith('GELU by erf')",
        "hypothesis.says.split('; ')",
        "re.match('labels of (.*)', known.says)",
        "FACTOR.search(says)",
        "', the reference has' in cause.says",
        "self.change.what.endswith(' times')",
        "map(says.partition, HAS)",
    ],
)
def test_code_that_parses_words_is_found(code: str) -> None:
    assert [*parsed_words(ast.parse(f"def f():\n    return {code}\n"))]
    assert not [*parsed_words(ast.parse("x = {change.what}; says = f'{what} instead of {other}'; y = says in known"))]


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PARITY.rglob("*.py")):
        yield f"{path.relative_to(PARITY)}", ast.parse(path.read_text())


def forms(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Yield the form of each statement that code makes, and its parts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Statement":
            yield ast.literal_eval(node.args[0]), {one.arg for one in node.keywords if one.arg}


def parts_of(form: str) -> set[str]:
    """Return the parts that a sentence is filled in with."""
    made = SENTENCES[form]
    if isinstance(made, str):
        return {name for _, name, _, _ in string.Formatter().parse(made) if name}
    return {*inspect.signature(made).parameters}


def is_sentence(node: ast.expr) -> bool:
    """Return whether an expression has a text of two words or more."""
    if isinstance(node, ast.JoinedStr):
        pieces = ("".join(one.value if isinstance(one, ast.Constant) else "x" for one in node.values),)
    else:
        pieces = tuple(one.value for one in [node] if isinstance(one, ast.Constant) and isinstance(one.value, str))
    inside = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
    if isinstance(node, ast.Call | ast.Lambda | ast.Compare | ast.Subscript):  # it is looked at by itself
        inside = []
    return any(len(text.split()) > 1 for text in pieces) or any(map(is_sentence, inside))


def made_sentences(tree: ast.AST, outer: Assigned = MappingProxyType({})) -> Iterator[str]:
    """Yield the code that gives a sentence to a statement, or to what has one; also by way of a variable."""
    inner = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node is not tree]
    nested = {id(node) for function in inner for node in ast.walk(function)}
    own = [node for node in ast.walk(tree) if id(node) not in nested]
    assigned = {**outer}
    for node in own:
        for name, value in assignments(node):
            assigned[name] = [*assigned.get(name, ()), value]
    for function in inner:
        yield from made_sentences(function, assigned)
    for node in own:
        name, given = given_to(node)
        for one in given if name in GIVEN else ():
            values = [one, *(assigned.get(one.id, ()) if isinstance(one, ast.Name) else ())]
            if any(map(is_sentence, values)):
                yield ast.unparse(node)


def assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield names that a statement assigns, with their values."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    value = getattr(node, "value", None)
    for target in targets if value is not None else ():
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = [*zip(target.elts, value.elts, strict=False)]
        yield from ((one.id, of) for one, of in pairs if isinstance(one, ast.Name))


def given_to(node: ast.AST) -> tuple[str, list[ast.expr]]:
    """Return the name of what is called, and the arguments that are no texts by right."""
    if not isinstance(node, ast.Call):
        return "", []
    args = [*node.args, *(one.value for one in node.keywords if one.arg not in TEXTS)]
    args = [one.body if isinstance(one, ast.Lambda) else one for one in args]
    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
    return (getattr(args[0], "id", ""), args[1:]) if name == "partial" and args else (name, args)


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            of = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from (f"{of}{one.name}." for one in node.names)


def test_no_module_that_writes_no_report_imports_the_report() -> None:
    found = {
        name
        for name, tree in modules()
        if any(module.startswith("jaxddp.parity.report.") for module in imported(tree))
        if not name.startswith("report/") and name not in WRITERS
    }
    assert not found


def test_no_sentence_is_made_where_a_fault_is_found() -> None:
    found = {name: [*made_sentences(tree)] for name, tree in modules() if not name.startswith("report/")}
    assert not {name: codes for name, codes in found.items() if codes}


def test_each_form_has_a_sentence_with_its_parts_and_each_sentence_is_used() -> None:
    used: dict[str, set[str]] = {}
    for name, tree in modules():
        for form, parts in forms(tree) if not name.startswith("report/") and name != "deviation.py" else ():
            used.setdefault(form, set()).update(parts)
    assert used.keys() - {""} == SENTENCES.keys()
    assert all(used[form] - {*COMMON} <= parts_of(form) for form in SENTENCES)


@pytest.mark.parametrize(
    "code",
    [
        'Deviation("number", "weight decay 0.1")',
        'Deviation("number", Statement("decay", jax="the rate is 1"))',
        'says = f"{name} left out"; Change("call_left_out", says, argument(0))',
        'what, of = "left out", 1; yield_ = Statement("call_left_out", of=what)',
        'discrete(FAULT, f"the schedule starts again every {n} steps", change)',
        'OptimizerEdit(FAULT, change, lambda v: f"learning rate {v[0]}")',
        'what.but(at="a tensor")',
        'partial(Change, "number", f"{name} in {call}", times)',
    ],
)
def test_a_sentence_in_the_diagnosis_is_found(code: str) -> None:
    assert [*made_sentences(ast.parse(code))]


def test_data_is_no_sentence() -> None:
    code = (
        'Statement("decay", jax=f"{x:.4g}", of=name); Hypothesis((one,), 0.0, measured="as it is"); print("so it is")'
    )
    assert not [*made_sentences(ast.parse(code))]
