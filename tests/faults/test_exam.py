"""The exam itself: its operators edit what they say, and its mutants are those that were fixed.

`make mutants` runs it.
"""

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.scoreboard.exam import examine
from jaxddp.parity.checking import check
from jaxddp.parity.workers import Workers
from tests.faults.exam import (
    COUNTS,
    HALVES,
    PORTS,
    SILENT,
    STEPS,
    WORLD_SIZE,
    Mutant,
    chosen,
    digest,
    share_of_exam,
)
from tests.faults.exam.operators import OPERATORS, edits
from tests.faults.exam.source import Source

FOLDER = Path(__file__).parent / "exam"
TENTH = 70  # mutants of a tenth of the exam
# The exam as it was fixed. A new text of a port, another operator or choice gives another: then say so, and run all.
DIGESTS = {"jax": "d54d673d13cbcf84", "torch": "36efcd0a99482faa"}
# Operator -> number of mutants of each half.
OF_OPERATORS = {
    "number": (38, 15),
    "arithmetic": (35, 13),
    "comparison": (6, 2),
    "boolean": (17, 9),
    "branch": (15, 2),
    "axis": (32, 13),
    "slice": (21, 9),
    "string": (30, 13),
    "keyword_left_out": (30, 15),
    "keyword_added": (36, 16),
    "keyword_value": (21, 10),
    "arguments_swapped": (37, 14),
    "call_left_out": (38, 13),
    "function_sibling": (39, 15),
    "statement_left_out": (27, 12),
    "name": (37, 14),
    "returned": (35, 15),
    "decorator": (6, 0),
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Workers]:
    with Workers(WORLD_SIZE, "cpu") as workers:
        yield workers


def edited(text: str, operator: str, half: str = "jax") -> list[str]:
    """Return a file after each edit of an operator."""
    source = Source(text)
    return [edit.apply(text) for edit in edits(source, source.tree.body, half) if edit.operator == operator]


FUNCTION = "def f(a, b):\n    c = g(a)\n    {}\n    return c\n"
EDITS = {
    "number": ("x = 0.5", ["x = 1.0", "x = 0.55", "x = 0.0", "x = (-0.5)"]),
    "arithmetic": ("y = a - b * 2", ["y = (a + (b * 2))", "y = ((b * 2) - a)", "y = a", "y = (b * 2)"]),
    "comparison": ("y = a and b", ["y = (a or b)"]),
    "boolean": ("f(x, approximate=True)", ["f(x, approximate=False)"]),
    "branch": ("y = jnp.where(c, a, b)", ["y = jnp.where(c, b, a)", "y = a", "y = b"]),
    "axis": ("x.mean(axis=1)", ["x.mean(axis=0)", "x.mean(axis=-1)", "x.mean(axis=-2)"]),
    "slice": ("x[:, :-1]", ["x[:, :0]", "x[:, :-2]", "x[:, :]"]),
    "string": ('jnp.einsum("ij,jk->ik", a, b)', ['jnp.einsum("ij,jk->ki", a, b)']),
    "keyword_left_out": ("optax.sgd(0.1, momentum=0.9, nesterov=True)", ["optax.sgd(0.1, nesterov=True)"]),
    "keyword_added": ("optax.rmsprop(1e-3)", ["optax.rmsprop(1e-3, centered=True)"]),
    "keyword_value": ("optax.adam(1e-3, b1=0.9)", ["optax.adam(1e-3, b2=0.9)"]),
    "arguments_swapped": ("f(a, (b), c)", ["f(b, (a), c)", "f(a, (c), b)"]),
    "call_left_out": ("y = f(a).mean()", ["y = f(a)", "y = a.mean()"]),
    "function_sibling": ("x.mean()", ["x.sum()", "x.max()"]),
    "statement_left_out": (FUNCTION.format("c = c + b"), [FUNCTION.format("pass")]),
    "name": (FUNCTION.format("d = c"), [FUNCTION.format("d = b")]),
    "returned": ("def f(a, b):\n    return a, b\n", ["def f(a, b):\n    return b, a\n"]),
    "decorator": ("@nn.compact\ndef f(): pass", ["\ndef f(): pass"]),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_edits_one_place_and_leaves_the_rest(operator: str) -> None:
    text, expected = EDITS[operator]
    texts = edited(text, operator)
    assert {*expected} <= {*texts}
    assert text not in texts


def test_docstrings_imports_assertions_and_annotations_are_not_edited() -> None:
    text = '"""One, 1."""\nimport a.b as c\nx: f(1) = y\nassert x == 1\ndef f(x: g(2)) -> h(3):\n    """Two, 2."""\n'
    assert [edit.apply(text) for edit in edits(Source(text), Source(text).tree.body, "jax")] == []


def test_positions_count_characters_beside_letters_of_several_bytes() -> None:
    assert 'x = "üß", (-1)' in edited('x = "üß", 1', "number")


def test_a_half_is_what_its_fields_reach_and_the_other_half_does_not() -> None:
    names = {name: {*map(PORTS[name].sources["jax"].code, PORTS[name].statements("jax"))} for name in ("mlp", "mine")}
    assert any(code.startswith("def jax_batch") for code in names["mlp"])
    assert [code.partition("(")[0] for code in sorted(names["mine"])] == ["def jax_loss", "def jax_model"]


@pytest.mark.parametrize("half", HALVES)
def test_the_exam_is_the_one_that_was_fixed(half: str) -> None:
    mutants = chosen(half)
    assert Counter(mutant.edit.operator for mutant in mutants) == Counter(
        {operator: counts[HALVES.index(half)] for operator, counts in OF_OPERATORS.items()}
    )
    assert digest(mutants) == DIGESTS[half], "the exam is another one: see CONTRIBUTING.md"
    assert len({mutant.name for mutant in mutants}) == len(mutants) == COUNTS[half]


@pytest.mark.parametrize("half", HALVES)
def test_every_port_is_in_the_exam_and_none_has_most_of_it(half: str) -> None:
    of_ports = Counter(mutant.port for mutant in chosen(half))
    assert of_ports.keys() == PORTS.keys()
    assert max(of_ports.values()) < 0.15 * COUNTS[half]


def test_every_operator_is_in_the_exam() -> None:
    assert {mutant.edit.operator for mutant in chosen("jax")} == OPERATORS.keys()


@pytest.mark.parametrize("half", HALVES)
def test_a_mutant_is_another_program_than_its_port(half: str) -> None:
    of_ports = {name: ast.dump(port.sources[half].tree) for name, port in PORTS.items()}
    for mutant in chosen(half):
        assert ast.dump(ast.parse(mutant.text)) != of_ports[mutant.port], mutant


def test_a_share_of_the_exam_has_all_ports_and_is_part_of_a_larger_one() -> None:
    tenth = share_of_exam(0.1)
    assert len(tenth) == TENTH and {*tenth} < {*share_of_exam(0.5)} < {*share_of_exam()}
    assert {mutant.port for mutant in tenth} == PORTS.keys()


def test_the_same_mutants_are_chosen_in_another_process() -> None:
    code = "from tests.faults.exam import chosen, digest; print(digest(chosen('torch')))"
    command, variables = [sys.executable, "-c", code], {**os.environ, "PYTHONHASHSEED": "7"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest(chosen("torch"))


def test_a_mutant_is_written_beside_the_other_half(tmp_path: Path) -> None:
    mutant: Mutant = next(mutant for mutant in chosen("jax") if mutant.port == "critics")
    port = mutant.source.write(tmp_path, mutant.half, mutant.text)
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert port.name == "port.py" and texts.keys() == mutant.source.texts.keys()
    assert [name for name in texts if texts[name] != mutant.source.texts[name]] == ["jax_half.py"]


@pytest.mark.one_in(13, first=5)
@pytest.mark.parametrize("name", PORTS)
def test_a_port_is_equal_before_it_is_edited(name: str, workers: Workers, tmp_path: Path) -> None:
    report = check(PORTS[name].write(tmp_path), world_size=WORLD_SIZE, steps=STEPS, numerics=False, workers=workers)
    assert report.verdict == "equal", str(report)


def test_the_exam_shares_no_code_with_the_check() -> None:
    for path in FOLDER.rglob("*.py"):
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not [node for node in nodes if "parity" in ast.unparse(node)], path


def known_silent() -> set[str]:
    """Return the names of the mutants that are silent today; none may be added."""
    return {line for line in SILENT.read_text().splitlines() if not line.startswith("#")}


def test_the_list_of_silent_mutants_has_mutants_of_the_exam() -> None:
    assert known_silent() <= {mutant.name for mutant in share_of_exam()}


@pytest.mark.large
@pytest.mark.parametrize("number", range(TENTH))
def test_no_mutant_of_a_tenth_of_the_exam_is_newly_silent(number: int, pair: Workers) -> None:
    mutant = share_of_exam(0.1)[number]
    score = examine(mutant, pair)
    assert score.outcome != "silent" or mutant.name in known_silent(), f"{mutant}: {score.said}"
