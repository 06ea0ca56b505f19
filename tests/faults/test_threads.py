"""Public threads, re-enacted in tests/faults/threads: their records, their ports, and the page about them.

`python -m benchmarks.scoreboard --parts threads --threads-page docs/threads.md` writes verdicts and page anew.
"""

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scoreboard import threads as page
from benchmarks.scoreboard.score import Question, Score
from jaxddp.parity.catalogue import EDITS, FAULTS
from jaxddp.parity.checking import check
from jaxddp.parity.port import PortFile
from jaxddp.parity.workers import Workers
from tests.faults.threads import GROUPS, THREADS, write_port
from tests.faults.threads.thread import PORT, PROGRAMS

ROOT = Path(__file__).parents[2]
VERDICTS = json.loads((ROOT / page.VERDICTS).read_text())
QUICK = ("token_mean", "adapters_in_bfloat16", "last_batch_dropped", "weights_set_in_a_callback")
ADDRESS = re.compile(r"[\w.-]+/[\w.-]+#\d+")


def score_of(name: str, folder: Path, workers: Workers, planted: bool = True) -> Score:
    thread = THREADS[name]
    source = PortFile(str(write_port(thread, folder, planted)), page.WORLD_SIZE)
    question = Question(source, name, thread.program, "", page.WORLD_SIZE, thread.steps, thread.accepted)
    return page.score_whole(question, workers)


def test_there_are_enough_threads_and_each_is_recorded_once() -> None:
    first = [thread.addresses[0] for thread in THREADS.values()]
    assert len(THREADS) == sum(map(len, GROUPS.values())) >= 61
    assert all(ADDRESS.fullmatch(address) for thread in THREADS.values() for address in thread.addresses)
    assert {address for address in first if first.count(address) > 1} <= {"xavysp/DexiNed#77"}  # which names two causes


def test_every_program_is_used() -> None:
    assert {path.name for path in PROGRAMS.iterdir() if path.is_dir()} - {"__pycache__"} == {
        thread.program for thread in THREADS.values()
    }


@pytest.mark.parametrize("name", THREADS)
def test_edits_match_exactly_once_and_leave_valid_python(name: str) -> None:
    thread = THREADS[name]
    for text in (*thread.texts(planted=False).values(), *thread.texts().values()):
        ast.parse(text)
    assert bool(thread.edits) == (thread.texts() != thread.texts(planted=False))


@pytest.mark.parametrize("name", THREADS)
def test_causes_have_names_of_the_catalogue(name: str) -> None:
    thread = THREADS[name]
    assert frozenset().union(*thread.accepted) <= (FAULTS | EDITS).keys()
    assert thread.edits or thread.outcome != "found"  # a cause that was found is planted
    assert not (thread.outcome == "mistake" and thread.causes)
    assert thread.words or thread.answer == "cause"


def test_a_port_is_three_files(tmp_path: Path) -> None:
    port = write_port(THREADS["same_padding"], tmp_path / "new")
    assert {path.name for path in port.parent.iterdir()} == {"torch_half.py", "jax_half.py", "port.py"}
    assert '"SAME"' in (tmp_path / "new" / "jax_half.py").read_text()


def test_every_thread_has_a_verdict() -> None:
    assert VERDICTS["threads"].keys() == THREADS.keys()


def test_the_page_is_that_of_the_records_and_verdicts() -> None:
    text = (ROOT / "docs" / "threads.md").read_text()
    assert text == page.to_page(GROUPS, VERDICTS)
    assert all(f"[{address}](" in text for thread in THREADS.values() for address in thread.addresses)


def test_agreements() -> None:
    cause = {"verdict": "different", "said": [["same_padding"]], "words": ["..."]}
    thread, equal = THREADS["same_padding"], {"verdict": "equal", "said": [], "words": []}
    agreements = [
        page.agreement(thread, page.score_from("", thread, verdict))
        for verdict in (cause, cause | {"said": [[]]}, cause | {"said": [["layout"]]}, equal)
    ]
    assert agreements == ["same", "none", "another", "none"]
    for name, expected in (("adam_agrees", "same"), ("detector", "open")):
        assert page.agreement(THREADS[name], page.score_from(name, THREADS[name], equal)) == expected


def test_a_cause_is_stated_by_its_words_at_its_place() -> None:
    thread = THREADS["key_not_returned"]
    says = "jax draws a bernoulli (2,) from a constant key: one mask for all steps"
    verdict = {"verdict": "equal", "said": [], "words": []}
    for sentence, expected in ((says, "same"), ("jax draws a bernoulli (2,)", "none")):
        result = page.score_from("", thread, verdict | {"says": [sentence]})
        assert page.agreement(thread, result) == expected
        assert page.verdict_of(thread, result)["says"] == [sentence]
    elsewhere = replace(page.score_from("", thread, verdict), says=(("beyond", says),))
    assert page.agreement(thread, elsewhere) == "none" and "says" not in page.verdict_of(thread, elsewhere)


@pytest.mark.large
@pytest.mark.parametrize("name", [name for name, thread in THREADS.items() if thread.setting and thread.edits])
def test_the_port_of_a_thread_without_its_difference_is_equal(name: str, tmp_path: Path, workers: Workers) -> None:
    result = score_of(name, tmp_path, workers, planted=False)
    assert result.verdict == "equal", result
    assert not page.stated(THREADS[name], result)


@pytest.mark.large
@pytest.mark.parametrize("program", sorted({x.program for x in THREADS.values() if x.start == PORT}))
def test_a_program_is_a_correct_port(program: str, workers: Workers) -> None:
    report = check(PROGRAMS / program / PORT, world_size=page.WORLD_SIZE, steps=3, workers=workers)
    assert report.verdict == "equal", str(report)


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.large] * (x not in QUICK)) for x in THREADS])
def test_the_check_says_what_is_recorded(name: str, tmp_path: Path, workers: Workers) -> None:
    result, kept = score_of(name, tmp_path, workers), VERDICTS["threads"][name]
    assert (result.verdict, [*map(list, result.said)]) == (kept["verdict"], kept["said"]), result
    assert page.verdict_of(THREADS[name], result).get("says", []) == kept.get("says", [])
