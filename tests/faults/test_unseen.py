"""The exam by an author who does not know how the check works is sound: its edits fit, and its lines are there."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxddp.parity.checking import check
from jaxddp.parity.port import load_port
from jaxddp.parity.workers import Workers
from tests.faults.unseen import PAIRS, PORTS, UNSEEN
from tests.faults.unseen.fault import edited, source, write

WORLD_SIZE = 2


@pytest.mark.parametrize("label", UNSEEN)
def test_a_fault_is_an_edit_that_changes_the_lines_it_names(label: str) -> None:
    fault = UNSEEN[label]
    text = edited(fault.port, fault)
    compile(text, fault.port, "exec")
    assert text != source(fault.port, "jax") and fault.ours != fault.reference
    for file, lines in ((text, fault.jax_lines), (source(fault.port, "torch"), fault.torch_lines)):
        assert lines
        for line in lines:
            assert sum(line in one for one in file.splitlines()) == 1, line


@pytest.mark.parametrize("label", UNSEEN)
def test_no_empty_cause_has_the_words_of_a_fault(label: str) -> None:
    expects = UNSEEN[label].expects
    assert expects
    for words in ("", "an unexplained difference"):
        assert not all(re.search(expression, words, re.IGNORECASE) for expression in expects)


@pytest.mark.parametrize("label", PAIRS)
def test_both_faults_of_a_pair_fit_into_one_port(label: str) -> None:
    first, second = (UNSEEN[name] for name in PAIRS[label])
    assert first.port == second.port
    compile(edited(first.port, first, second), first.port, "exec")


def test_there_are_sixty_faults_and_fifteen_pairs() -> None:
    assert len(UNSEEN) == 60 and len(PAIRS) == 15
    assert min(Counter(fault.port for fault in UNSEEN.values()).values()) >= 4


@pytest.mark.parametrize("port", PORTS)
def test_a_port_is_a_program_of_the_check(port: str, tmp_path: Path) -> None:
    assert load_port(write(tmp_path, port), WORLD_SIZE).micro_batches(0, 0)


@pytest.fixture(scope="module")
def pair() -> Iterator[Workers]:
    with Workers(WORLD_SIZE, "cpu") as workers:
        yield workers


# The last, tabular, has a constant of NumPy, which is float64 in one run and float32 in the other.
@pytest.mark.one_in(12, first=11)
@pytest.mark.parametrize("port", PORTS)
def test_a_right_port_is_equal(port: str, pair: Workers, tmp_path: Path) -> None:
    report = check(write(tmp_path, port), world_size=WORLD_SIZE, steps=2, quick=True, workers=pair)
    assert report.verdict == "equal" and report.numerics, str(report)
