"""Devices: CPU devices that cannot deadlock, and clear errors if there are too few.

Tests of what happens before jax starts run in processes of their own.
"""

import os
import subprocess
import sys
import textwrap

import jax
import pytest

from jaxddp.distributed.devices import prepare
from jaxddp.errors import InputError

UNPREPARED = "jax.config.update('jax_num_cpu_devices', 8); devices = jax.devices()"
TIMEOUT = 60  # seconds; measured: 6, with 2 cores busy elsewhere 15


def python(code: str, **environment: str) -> list[str]:
    """Return the lines that `code` prints in a fresh process without GPUs and without `prepare`."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PJRT_NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.large
@pytest.mark.parametrize(
    ("start", "call", "printed"),
    [
        ("devices = prepare(8, 'cpu')", "state, _ = ddp._steps.program(state, batch)", "500 16"),
        (UNPREPARED, "state, _ = ddp.steps(state, batch)", "500 None"),
        (UNPREPARED, "ddp.evaluate_placed(state, placed)", "0 None"),
    ],
    ids=["prepared, without a bound", "unprepared, with a bound", "unprepared, evaluations"],
)
def test_500_steps_without_waiting_do_not_deadlock(start: str, call: str, printed: str) -> None:
    """Unprepared and without a bound, XLA aborts: 8 replicas in over 31 steps need more threads than it has."""
    code = f"""
        import os
        import jax
        from jaxddp.distributed.devices import prepare
        {start}
        import numpy as np
        from jaxddp import optim
        from jaxddp.data_parallel import DistributedDataParallel
        from jaxddp.loader import Loader
        from jaxddp.models import MLP
        from jaxddp.distributed.replicas import Replicas
        from jaxddp.data.torch_rng import Generator

        replicas = Replicas(devices)
        ddp = DistributedDataParallel(MLP(4, (8,), 3, generator=Generator(0)), optim.adam(), replicas=replicas)
        data = {{"x": np.ones((160, 4), "float32"), "y": np.zeros(160, int)}}
        batches = list(Loader(data, replicas, global_batch_size=16, steps_per_dispatch=1).epoch(0))
        state = ddp.init()
        placed = ddp.place(data)
        for step in range(500):
            batch = batches[step % len(batches)]
            {call}
        ddp.verify(state)
        print(state.step, os.environ.get("PJRT_NPROC"))
    """
    assert python(code) == [printed]


def test_prepare_sets_the_number_of_devices_before_jax_starts() -> None:
    code = "from jaxddp.distributed.devices import prepare; print(len(prepare()), len(prepare(platform='cpu')))"
    assert python(code, XLA_FLAGS="--xla_force_host_platform_device_count=5") == ["2 2"]


@pytest.mark.parametrize(
    ("environment", "cores", "threads"),
    [
        ({}, 2, "16"),
        ({}, 16, None),  # as many as XLA starts by itself
        ({"PJRT_NPROC": "15"}, 64, "16"),
        ({"PJRT_NPROC": "64"}, 2, "64"),
        ({"NPROC": "3"}, 64, "16"),
        ({"NPROC": "many"}, 2, "16"),
    ],
)
def test_prepare_asks_for_two_threads_per_device(monkeypatch, environment, cores, threads) -> None:
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("PJRT_NPROC", os.environ.get("PJRT_NPROC", ""))  # so that what prepare writes is undone
    prepare(8, "cpu")
    assert (os.environ["PJRT_NPROC"] or None) == threads


REFUSED = "from jaxddp.distributed.devices import prepare\ntry: prepare({})\nexcept ValueError as error: print(error)"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("environment", "call", "message"),
    [
        ({"JAX_PLATFORMS": "cuda"}, "", "JAX_PLATFORMS=cuda: jax finds no such devices here; unset it, or use cpu"),
        ({"JAX_PLATFORMS": "xyz"}, "", "JAX_PLATFORMS=xyz: jax finds no such devices here; unset it, or use cpu"),
        ({"PJRT_NPROC": "abc"}, "1", "PJRT_NPROC=abc: must be a number of threads up to 4096; or unset it"),
        ({"PJRT_NPROC": "9" * 9}, "1", "PJRT_NPROC=999999999: must be a number of threads up to 4096; or unset it"),
        ({}, "10**9, 'cpu'", "--devices 1000000000: must be at most 256 on the CPU"),
        ({"XLA_FLAGS": "--xla_a=1"}, "", "XLA_FLAGS=--xla_a=1: Unknown flag in XLA_FLAGS: --xla_a=1"),
    ],
    ids=str,
)
def test_what_keeps_jax_from_starting_is_told_in_one_line(environment: dict[str, str], call: str, message: str) -> None:
    assert python(REFUSED.format(call), **environment) == [message]


def test_a_running_jax_keeps_its_devices() -> None:
    """Existing devices can be used, more are refused, as a notebook needs."""
    code = """
        import jax
        jax.devices()
        from jaxddp.distributed.devices import prepare
        from jaxddp.errors import InputError
        print(len(prepare()), len(prepare(1, "cpu")))
        for devices, platform in ((2, "cpu"), (1, "gpu"), (None, "gpu")):
            try:
                prepare(devices, platform)
            except InputError as error:
                print(error)
    """
    sizes, too_few, *no_gpu = python(code)
    assert sizes == "1 1"
    assert too_few.startswith("--devices 2: jax is already running with 1 CPU device; call jaxddp.prepare before")
    assert no_gpu == ["--platform gpu: jax finds no GPU here; install jax[cuda12], or use --platform cpu"] * 2


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what `prepare` writes to os.environ."""
    monkeypatch.setenv("PJRT_NPROC", os.environ["PJRT_NPROC"])


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_prepare_returns_the_first_devices(devices: int) -> None:
    assert prepare(devices, "cpu") == jax.local_devices(backend="cpu")[:devices]


@pytest.mark.parametrize(
    ("devices", "message"),
    [(9, "--devices 9: jax is already running with 8 CPU"), (0, "--devices 0: must be"), (-1, "--devices -1: must be")],
)
def test_an_unavailable_number_of_devices_is_refused(devices: int, message: str, own_environment: None) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        prepare(devices, "cpu")
