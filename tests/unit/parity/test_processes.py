"""Child processes that raise, die or hang are reported with their activity, and nothing of them is left."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from threadpoolctl import threadpool_info

from jaxddp.parity.processes import (
    Child,
    ChildError,
    answers,
    end_all,
    import_quickly,
    reported,
    start_imports,
    telling,
)
from tests.support.waiting import wait_for

PATIENT = 60.0  # longer than a child takes to start on a busy machine


def serve(connection: Connection) -> None:
    """Run jobs (name, argument) until None arrives, as the children of a check do."""
    while (job := connection.recv()) is not None:
        what, argument = job
        with reported(connection, str(argument)):
            telling(connection)(f"doing {what}")
            connection.send(("done", DEEDS[what](argument)))


def load(path: Path) -> None:
    exec(compile(path.read_text(), path, "exec"), {})


def work_on(words: int, connection: Connection) -> None:
    """Send a message every half second, and an answer after `words` of them."""
    for word in range(words):
        telling(connection)(f"word {word}")
        time.sleep(0.5)
    connection.send(("done", words))


# Detached from its parent as daemons are: in a session of its own, and its parent ends at once.
DAEMON = """
import os, pathlib, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
        time.sleep(1000)
    os._exit(0)
os.wait()
"""
DEEDS: dict[str, Callable[[Any], Any]] = {
    "answer": lambda answer: answer,
    "BLAS threads": lambda _: [one["num_threads"] for one in threadpool_info() if one["internal_api"] == "openblas"],
    "load": load,
    "exit": os._exit,
    "stop": lambda number: os.kill(os.getpid(), number),
    "sleep": time.sleep,
    "start": lambda path: path.write_text(str(subprocess.Popen(["sleep", "1000"]).pid)),
    "start a daemon": lambda path: subprocess.run([sys.executable, "-c", DAEMON, path], check=True),
    "read": lambda path: path.read_text().strip(),
    "wait in a thread": lambda seconds: threading.Thread(target=time.sleep, args=(seconds,)).start(),
    "ask another": lambda _: worker_of_its_own(),
    "environment": lambda _: dict(os.environ),
}


def worker_of_its_own() -> int | None:
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(5,))
    process.start()
    process.join()
    return process.exitcode


@contextmanager
def serving(count: int = 1, target: Callable[..., None] = serve, args: tuple[Any, ...] = ()) -> Iterator[list[Child]]:
    before = set(multiprocessing.active_children())
    children = [Child(f"child {number}", target, args) for number in range(count)]
    try:
        yield children
    finally:
        for child in children:
            child.end()
        assert set(multiprocessing.active_children()) == before


def asked(children: list[Child], *jobs: Any, timeout: float = PATIENT) -> list[Any]:
    for child, job in zip(children, jobs, strict=True):
        child.give(job)
    return answers(children, timeout)


def failure(children: list[Child], *jobs: Any, timeout: float = PATIENT) -> ChildError:
    with pytest.raises(ChildError) as caught:
        asked(children, *jobs, timeout=timeout)
    return caught.value


def test_answers_come_in_the_order_of_the_children_which_take_further_jobs() -> None:
    with serving(3) as children:
        assert asked(children, ("sleep", 0.3), ("answer", "b"), ("answer", "c")) == [None, "b", "c"]
        assert asked(children, *[("answer", number) for number in range(3)]) == [0, 1, 2]
        assert [child.where for child in children] == ["doing answer"] * 3
        for child in children:
            child.give(None)
            child.end(patience=PATIENT)
            assert child.died() == "ended with exit code 0"


def test_a_child_has_its_parents_environment_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    start_imports()  # with the environment of this moment
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.delenv("HOME")
    with serving() as children:
        (environment,) = asked(children, ("environment", None))
    assert environment["CUDA_VISIBLE_DEVICES"] == "7" and "HOME" not in environment


def test_products_of_numpy_take_one_thread_in_children_and_the_parent_keeps_its_environment() -> None:
    before = dict(os.environ)
    with serving() as children:
        (threads,) = asked(children, ("BLAS threads", None))
    assert threads and set(threads) == {1}
    assert dict(os.environ) == before


def test_a_child_that_raises_reports_the_line_and_takes_further_jobs(tmp_path: Path) -> None:
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
        path.write_text("raise BaseException('all')\n")
        assert failure(children, ("load", path)).what == f"{path}: line 1: BaseException: all"
        path.write_text("raise KeyboardInterrupt\n")
        assert failure(children, ("load", path)).what == "KeyboardInterrupt"
        assert asked(children, ("answer", 1)) == [1]


@pytest.mark.parametrize(
    ("job", "what"),
    [
        (("exit", 3), "ended with exit code 3"),
        (("stop", signal.SIGKILL), "died of SIGKILL, as when memory is used up"),
        (("stop", signal.SIGSEGV), "died of SIGSEGV"),
    ],
    ids=["exit", "killed", "segmentation fault"],
)
def test_the_cause_of_a_childs_death_is_reported(job: Any, what: str) -> None:
    with serving() as children:
        error = failure(children, job)
        assert (error.child, error.where, error.what, error.trace) == ("child 0", f"doing {job[0]}", what, "")
        children[0].give(("answer", 1))  # to a dead child
        with pytest.raises(ChildError, match=what):
            answers(children, PATIENT)


def test_a_child_whose_port_closes_its_connection_ends_without_a_traceback(tmp_path: Path) -> None:
    path, printed = tmp_path / "port.py", tmp_path / "printed"
    # The watch over the parent may begin before the pipe is closed or, on a busy machine, after it.
    path.write_text(
        "import os, threading, time\nfrom jaxddp.parity import processes\n\n"
        f"for stream in 1, 2: os.dup2(os.open({str(printed)!r}, os.O_CREAT | os.O_APPEND | os.O_WRONLY), stream)\n"
        "os.closerange(3, 200)\nkept = [os.open(os.devnull, os.O_RDONLY) for _ in range(50)]\n"
        "threading.Thread(target=processes._end_with_parent, daemon=True).start()\n"
        "time.sleep(0.5)\nprint('done', end='')\n"
    )
    with serving() as children:
        assert failure(children, ("load", path)).what == "ended with exit code 0"
    assert printed.read_text() == "done"


@pytest.mark.skipif(sys.platform != "linux", reason="a file of Linux")
def test_where_memory_is_used_up_a_child_is_killed_and_not_its_judge() -> None:
    score = Path("/proc/self/oom_score_adj")
    with serving() as children:
        assert asked(children, ("read", score)) == ["500"]
    assert int(score.read_text()) < 500


def test_children_that_do_not_end_share_the_patience() -> None:
    with serving(3) as children:
        asked(children, *[("wait in a thread", 1000)] * 3)
        began = time.monotonic()
        end_all(children, patience=1.0)
        assert 0.9 < time.monotonic() - began < 2.5  # not 3


def test_a_hanging_child_is_reported_after_the_timeout() -> None:
    with serving(3) as children:
        asked(children, *[("answer", None)] * 3)  # they have started
        began = time.monotonic()
        error = failure(children, ("sleep", 1000), ("answer", 1), ("sleep", 1000), timeout=1.0)
        assert 0.9 < time.monotonic() - began < 20
        assert error.child == "child 0, child 2"
        assert (error.where, error.what) == ("doing sleep", "no answer for 1 s")


@pytest.mark.large
def test_every_message_restarts_the_timeout() -> None:
    with serving(1, work_on, (4,)) as children:
        began = time.monotonic()
        assert answers(children, timeout=PATIENT) == [4]
        assert children[0].where == "word 3"
    with serving(1, work_on, (4,)) as children:
        children[0].connection.recv()  # it has started
        assert answers(children, timeout=1.5) == [4]  # shorter than the job, longer than the time between messages
    assert time.monotonic() - began > 1.5


def test_the_timeout_counts_from_the_last_message_though_nobody_was_listening() -> None:
    with serving(2) as children:
        asked(children, *[("answer", None)] * 2)
        children[0].give(("sleep", 1000))
        children[1].give(("answer", 1))
        time.sleep(2.0)
        began = time.monotonic()
        with pytest.raises(ChildError, match="doing sleep: no answer for 2 s"):
            answers(children[:1], timeout=2.0)
        assert time.monotonic() - began < 1.0
        assert answers(children[1:], timeout=0.5) == [1]  # its answer has been there for a while


@pytest.mark.large
def test_the_first_of_several_failures_is_reported_without_waiting_for_the_other_children(tmp_path: Path) -> None:
    path = tmp_path / "port.py"
    path.write_text("1 / 0\n")
    with serving(3) as children:
        asked(children, *[("answer", None)] * 3)
        began = time.monotonic()
        error = failure(children, ("sleep", 1000), ("load", path), ("load", path))
        assert (error.child, error.what) == ("child 1", f"{path}: line 1: ZeroDivisionError: division by zero")
        assert time.monotonic() - began < PATIENT / 2


def test_children_ignore_ctrl_c() -> None:
    with serving() as children:
        asked(children, ("answer", None))
        assert asked(children, ("stop", signal.SIGINT)) == [None]
        assert asked(children, ("answer", 1)) == [1]


def test_a_child_ends_when_its_connection_closes() -> None:
    with serving() as children:
        asked(children, ("answer", None))
        children[0].connection.close()
        assert children[0].died() == "ended with exit code 0"


def test_processes_that_a_job_starts_end_with_the_child(tmp_path: Path) -> None:
    with serving() as children:
        assert asked(children, ("ask another", None)) == [5]
        asked(children, ("start", tmp_path / "pid"))
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, 0)  # it runs
    wait_for(lambda: has_ended(pid), limit=PATIENT)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_a_daemon_that_a_job_starts_ends_with_the_child(tmp_path: Path) -> None:
    with serving() as children:
        asked(children, ("start a daemon", tmp_path / "pid"))
        written = tmp_path / "pid"
        wait_for(lambda: written.exists() and written.read_text(), limit=PATIENT)
        pid = int(written.read_text())
        assert os.getpgid(pid) != os.getpgid(children[0]._process.pid or 0)
    wait_for(lambda: has_ended(pid), limit=PATIENT)


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
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_for(lambda: has_ended(pid), limit=PATIENT)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; a zombie counts as ended."""
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


def test_a_job_that_cannot_be_pickled_raises_in_the_parent(tmp_path: Path) -> None:
    with serving() as children, pytest.raises(Exception, match="pickle"):
        children[0].give(("answer", lambda: 1))


@pytest.mark.parametrize("module", ["colorsys", "no_such_module"])
def test_imports_are_left_out_of_collections_which_go_on(module: str) -> None:
    gc.unfreeze()
    with suppress(ImportError):
        import_quickly(module)
    assert gc.isenabled() and gc.get_freeze_count() > 1000
