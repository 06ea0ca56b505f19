"""Worker processes: the same batches in the same order, failures in a line with the example, and none left behind."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxddp.data.sources import Source, as_source
from jaxddp.data.sources import workers as workers_module
from jaxddp.data.sources.source import Job
from jaxddp.data.sources.workers import DataWorkers
from jaxddp.errors import InputError, TrainingError
from jaxddp.scripts import run_file

PROGRAM = """
import os, pathlib
import jax, numpy as np
import beside

with open(pathlib.Path(__file__).with_name("runs"), "a") as file:
    file.write("run ")
SCALE = np.float32(0.5)

class Images:
    def __init__(self, tokens): self.tokens = tokens
    def __len__(self): return 40
    def __getitem__(self, index):
        import sys
        return {"x": self.tokens[index] * SCALE + beside.ONE, "jax": "jax" in sys.modules, "pid": os.getpid()}

def augment(example, rng): return example | {"noise": rng.standard_normal(1000)}
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside.py").write_text("ONE = 1")
    (tmp_path / "images.py").write_text(PROGRAM)
    yield run_file(tmp_path / "images.py")
    for name in ("port_images", "beside"):
        sys.modules.pop(name, None)


def jobs(count: int) -> list[Job]:
    return [Job(i % 3, (np.array([[i, 7]]), np.array([[i + 2]]))) for i in range(count)]


def test_workers_read_a_files_data_without_running_it_or_jax_again(program: Any, tmp_path: Path) -> None:
    np.arange(40, dtype=np.float32).tofile(tmp_path / "data.bin")
    tokens = np.memmap(tmp_path / "data.bin", np.float32, "r")[::-1][::-1]
    source = as_source(program.Images(tokens), "train_data()", augment=program.augment)
    workers = DataWorkers(source, 2, timeout=60)
    read = list(workers.read(jobs(12)))
    for ours, expected in zip(read, source.read(jobs(12)), strict=True):
        for part, same in zip(ours, expected, strict=True):
            assert list(part) == list(same)
            for name in ("x", "noise"):
                np.testing.assert_array_equal(part[name], same[name])
    assert not any(part["jax"].any() for parts in read for part in parts)
    pids = [{int(pid) for part in parts for pid in part["pid"].flat} for parts in read]
    assert pids[::2] == [pids[0]] * 6 and pids[1::2] == [pids[1]] * 6 and len(pids[0] | pids[1] | {os.getpid()}) == 3
    assert (tmp_path / "runs").read_text() == "run "

    # Readers that stop early leave no batch to the next, and two may take turns.
    assert len(list(itertools.islice(workers.read(jobs(9)), 2))) == 2
    for first, second in zip(workers.read(jobs(5)), workers.read(jobs(5)), strict=True):
        np.testing.assert_array_equal(first[0]["noise"], second[0]["noise"])
    workers.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in set().union(*pids))


@pytest.mark.parametrize("view", ["whole", "slice", "windows", "transposed"])
def test_arrays_mapped_from_a_file_are_sent_by_their_place_in_it(tmp_path: Path, view: str) -> None:
    np.arange(600_000).tofile(tmp_path / "data.bin")
    mapped = np.memmap(tmp_path / "data.bin", np.int64, "r", offset=800)
    array: Any = {
        "whole": mapped,
        "slice": np.asarray(mapped[1000:500_000:7]),
        "windows": np.lib.stride_tricks.sliding_window_view(mapped, 9)[5::3],
        "transposed": mapped[:500_000].reshape(1000, 500).T,
    }[view]
    source = as_source({"x": array})
    assert len(workers_module._pickled(source)) < 2000
    places = np.array([0, 3, len(array) - 1])
    workers = DataWorkers(source, 1, 60)
    (((part),),) = workers.read([Job(0, (places,))])
    np.testing.assert_array_equal(part["x"], array[places])
    workers.close()


class Failing:
    """Data that fail at example 5 in the way that they are told."""

    def __init__(self, how: str):
        self.how = how

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            match self.how:
                case "raise":
                    raise OSError("disk on fire")
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "exit":
                    os._exit(7)
                case "hang":
                    time.sleep(60)
                case "memory":
                    raise MemoryError
        return {"x": index}


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("raise", InputError, "example 5: OSError: disk on fire"),
        ("memory", InputError, "example 5: MemoryError: without a message"),
        ("kill", TrainingError, "example 5: worker process 0: died of SIGKILL, as when memory is used up"),
        ("exit", TrainingError, "example 5: worker process 0: ended with exit code 7"),
        ("hang", TrainingError, "example 5: worker process 0 has not finished its batch in time (1 s)"),
    ],
)
def test_a_worker_that_fails_is_one_line_with_the_example(how: str, kind: type[Exception], message: str) -> None:
    workers = DataWorkers(as_source(Failing(how), "train_data()"), 2, timeout=60)
    read = workers.read(Job(0, (np.array([i, i + 1]),)) for i in range(0, 8, 2))
    process, started = workers._process, time.monotonic()
    seen = []
    with pytest.raises(kind) as caught:
        for (part,) in read:
            seen += part["x"].tolist()
            workers._timeout = 1.0  # now that they have started
    assert str(caught.value) == f"train_data(): {message}" and seen == [0, 1, 2, 3][: len(seen)]
    workers.close()
    assert process.returncode == 0 and time.monotonic() - started < 10


def test_data_that_cannot_be_sent_are_refused() -> None:
    source = Source([{"x": 1, "lock": threading.Lock()}], "train_data()")
    with pytest.raises(InputError, match=r"^train_data\(\): cannot be sent to worker processes: TypeError: .*lock"):
        DataWorkers(source, 1)


def test_data_that_cannot_be_rebuilt_are_told_of() -> None:
    workers = DataWorkers(Source(Unpicklable(), "train_data()"), 1, timeout=60)
    with pytest.raises(TrainingError, match=r"^train_data\(\): worker processes: RuntimeError: only here$"):
        list(workers.read(jobs(1)))
    workers.close()


class Unpicklable:
    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise RuntimeError("only here")


TRAINER = """
import os, sys, time
import numpy as np
from jaxddp.data.sources import as_source
from jaxddp.data.sources.source import Job
from jaxddp.data.sources.workers import DataWorkers
class Slow:
    def __len__(self): return 10**6
    def __getitem__(self, index):
        if sys.argv[1] == "SIGKILL" and 3 < index < 1000: time.sleep(1000)
        return {"pid": os.getpid()}

workers = DataWorkers(as_source(Slow()), 2, timeout=100)
for count, (part,) in enumerate(workers.read(Job(0, (np.array([i]),)) for i in range(10**6))):
    print(int(part["pid"][0]), workers._process.pid, flush=True)
    if sys.argv[1] == "exit" and count > 4: break
"""


@pytest.mark.parametrize("how", ["exit", "SIGINT", "SIGKILL"])
def test_no_worker_outlives_the_trainer(how: str) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert trainer.stdout is not None
    pids = {int(pid) for _ in range(3) for pid in trainer.stdout.readline().split()}
    assert len(pids) == 3
    if how == "SIGKILL":
        trainer.kill()
    elif how == "SIGINT":
        os.killpg(trainer.pid, signal.SIGINT)  # as a terminal does, to all at once
    trainer.communicate(timeout=10)
    until = time.monotonic() + 10
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until, left
        time.sleep(0.02)
