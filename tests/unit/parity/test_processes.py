"""Child processes that raise, die or hang: who it was, where it was, and nothing of them left."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from jaxddp.parity.processes import Child, ChildError, answers, reported

PATIENT = 60.0  # longer than a child takes to start on a busy machine


def serve(connection: Connection) -> None:
    """Answers (what to do, with what) until None comes, as the children of a check do."""
    while (job := connection.recv()) is not None:
        what, argument = job
        with reported(connection, str(argument)):
            connection.send(("at", f"doing {what}"))
            connection.send(("done", DEEDS[what](argument)))


def load(path: Path) -> None:
    exec(compile(path.read_text(), path, "exec"), {})


def work_on(words: int, connection: Connection) -> None:
    """Says a word every half second, and is done after so many."""
    for word in range(words):
        connection.send(("at", f"word {word}"))
        time.sleep(0.5)
    connection.send(("done", words))


DEEDS: dict[str, Callable[[Any], Any]] = {
    "answer": lambda answer: answer,
    "load": load,
    "exit": os._exit,
    "stop": lambda number: os.kill(os.getpid(), number),
    "sleep": time.sleep,
    "start": lambda path: path.write_text(str(subprocess.Popen(["sleep", "1000"]).pid)),
    "ask another": lambda _: worker_of_its_own(),
}


def worker_of_its_own() -> int | None:
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(5,))
    process.start()
    process.join()
    return process.exitcode


@contextmanager
def serving(count: int = 1, target: Callable[..., None] = serve, args: tuple[Any, ...] = ()) -> Iterator[list[Child]]:
    before = multiprocessing.active_children()
    children = [Child(f"child {number}", target, args) for number in range(count)]
    try:
        yield children
    finally:
        for child in children:
            child.end()
        assert multiprocessing.active_children() == before


def asked(children: list[Child], *jobs: Any, timeout: float = PATIENT) -> list[Any]:
    for child, job in zip(children, jobs, strict=True):
        child.give(job)
    return answers(children, timeout)


def failure(children: list[Child], *jobs: Any, timeout: float = PATIENT) -> ChildError:
    with pytest.raises(ChildError) as caught:
        asked(children, *jobs, timeout=timeout)
    return caught.value


def test_answers_come_in_the_order_of_the_children_and_they_stay_for_more() -> None:
    with serving(3) as children:
        assert asked(children, ("sleep", 0.3), ("answer", "b"), ("answer", "c")) == [None, "b", "c"]
        assert asked(children, *[("answer", number) for number in range(3)]) == [0, 1, 2]
        assert [child.where for child in children] == ["doing answer"] * 3
        for child in children:
            child.give(None)
            child.end(patience=PATIENT)
            assert child.died() == "ended with exit code 0"


def test_one_that_raises_says_where_in_the_file_and_answers_again(tmp_path: Path) -> None:
    path = tmp_path / "port.py"
    path.write_text("def f():\n    raise KeyError('gone')\n\nf()\n")
    with serving() as children:
        error = failure(children, ("load", path))
        assert (error.child, error.where) == ("child 0", "doing load")
        assert error.what == f"{path}: line 2: KeyError: 'gone'"
        assert str(error) == f"child 0: doing load: {error.what}"
        assert "Traceback" in error.trace and "line 4, in <module>" in error.trace
        path.write_text("import sys\n\nsys.exit(7)\n")
        assert failure(children, ("load", path)).what == f"{path}: line 3: SystemExit: 7"
        assert asked(children, ("answer", 1)) == [1]


@pytest.mark.parametrize(
    ("job", "what"),
    [
        (("exit", 3), "ended with exit code 3"),
        (("stop", signal.SIGKILL), "died of SIGKILL"),
        (("stop", signal.SIGSEGV), "died of SIGSEGV"),
    ],
    ids=["exit", "killed", "segmentation fault"],
)
def test_one_that_dies_says_of_what(job: Any, what: str) -> None:
    with serving() as children:
        error = failure(children, job)
        assert (error.child, error.where, error.what, error.trace) == ("child 0", f"doing {job[0]}", what, "")
        children[0].give(("answer", 1))  # to a dead one
        with pytest.raises(ChildError, match=what):
            answers(children, PATIENT)


def test_one_that_hangs_is_told_when_its_time_is_over() -> None:
    with serving(3) as children:
        asked(children, *[("answer", None)] * 3)  # they are up
        began = time.monotonic()
        error = failure(children, ("sleep", 1000), ("answer", 1), ("sleep", 1000), timeout=1.0)
        assert 0.9 < time.monotonic() - began < 20
        assert error.child == "child 0, child 2"
        assert (error.where, error.what) == ("doing sleep", "no answer for 1 s")


@pytest.mark.large
def test_a_word_now_and_then_is_a_sign_of_life() -> None:
    with serving(1, work_on, (4,)) as children:
        began = time.monotonic()
        assert answers(children, timeout=PATIENT) == [4]
        assert children[0].where == "word 3"
    with serving(1, work_on, (4,)) as children:
        children[0].connection.recv()  # it is up
        assert answers(children, timeout=1.5) == [4]  # which is less than it takes, and more than between two words
    assert time.monotonic() - began > 1.5


@pytest.mark.large
def test_of_several_that_fail_the_first_is_told_and_who_waits_for_it_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "port.py"
    path.write_text("1 / 0\n")
    with serving(3) as children:
        asked(children, *[("answer", None)] * 3)
        began = time.monotonic()
        error = failure(children, ("sleep", 1000), ("load", path), ("load", path))
        assert (error.child, error.what) == ("child 1", f"{path}: line 1: ZeroDivisionError: division by zero")
        assert time.monotonic() - began < PATIENT / 2


def test_ctrl_c_is_the_parents_business() -> None:
    with serving() as children:
        asked(children, ("answer", None))
        assert asked(children, ("stop", signal.SIGINT)) == [None]
        assert asked(children, ("answer", 1)) == [1]


def test_a_child_whose_parent_is_gone_ends_by_itself() -> None:
    with serving() as children:
        asked(children, ("answer", None))
        children[0].connection.close()
        assert children[0].died() == "ended with exit code 0"


def test_its_work_may_start_processes_and_none_of_them_stays(tmp_path: Path) -> None:
    with serving() as children:
        assert asked(children, ("ask another", None)) == [5]
        asked(children, ("start", tmp_path / "pid"))
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, 0)  # it runs
    assert gone(pid)


def test_a_child_that_hangs_ends_with_its_parent(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from tests.unit.parity.test_processes import Child, answers, serve\n"
        "if __name__ == '__main__':\n"
        "    child = Child('child', serve, ())\n"
        "    child.give(('answer', 1)); answers([child], 60); child.give(('sleep', 1000))\n"
        "    print(child._process.pid, flush=True); __import__('time').sleep(1000)\n"
    )
    (tmp_path / "main.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, tmp_path / "main.py"], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert gone(pid)


def gone(pid: int) -> bool:
    """Whether a process ends within a while; nobody may have taken notice of its end yet."""
    deadline = time.monotonic() + PATIENT
    while time.monotonic() < deadline:
        try:
            if " Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_what_cannot_be_sent_is_an_error_here(tmp_path: Path) -> None:
    with serving() as children, pytest.raises(Exception, match="pickle"):
        children[0].give(("answer", lambda: 1))
