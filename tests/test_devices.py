"""Devices: CPU devices that cannot deadlock, and clear words where there are too few.

What is decided before jax starts is tried in processes of its own.
"""

import os
import subprocess
import sys
import textwrap

import jax
import pytest

from jaxddp.devices import prepare
from jaxddp.errors import InputError

TIMEOUT = 60  # seconds; measured: 6, with 2 cores busy elsewhere 15


def python(code: str, **environment: str) -> list[str]:
    """The lines that `code` prints in a fresh process without GPUs and without our preparations."""
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


def test_500_steps_that_nobody_waits_for_finish() -> None:
    """Unprepared, XLA aborts the process: 8 replicas in more than 31 steps need more threads than cores."""
    code = """
        import os
        from jaxddp.devices import prepare
        devices = prepare(8, "cpu")
        import numpy as np
        from jaxddp import optim
        from jaxddp.data_parallel import DataParallel
        from jaxddp.loader import Loader
        from jaxddp.models import MLP
        from jaxddp.replicas import Replicas
        from jaxddp.torch_random import Generator

        replicas = Replicas(devices)
        ddp = DataParallel(MLP(4, (8,), 3, generator=Generator(0)), optim.adam(), replicas=replicas)
        data = {"x": np.ones((160, 4), "float32"), "y": np.zeros(160, int)}
        batches = list(Loader(data, replicas, global_batch_size=16, steps_per_dispatch=1).epoch(0))
        state = ddp.init()
        for step in range(500):
            state, _ = ddp.steps(state, batches[step % len(batches)])
        ddp.verify(state)
        print(state.step, os.environ["PJRT_NPROC"])
    """
    assert python(code) == ["500 32"]


def test_an_untouched_jax_gets_the_devices_asked_for() -> None:
    code = """
        import os
        from jaxddp.devices import prepare
        print(len(prepare()), len(prepare(platform="cpu")), len(prepare(1)), os.environ["PJRT_NPROC"])
    """
    assert python(code, XLA_FLAGS="--xla_force_host_platform_device_count=5", PJRT_NPROC="64") == ["2 2 1 64"]
    assert python(code, PJRT_NPROC="3") == ["2 2 1 8"]


def test_a_started_jax_keeps_its_devices() -> None:
    """As in a notebook: what is there can be used, more is refused."""
    code = """
        import jax
        jax.devices()
        from jaxddp.devices import prepare
        from jaxddp.errors import InputError
        print(len(prepare(1, "cpu")))
        for devices, platform in ((2, "cpu"), (None, None), (1, "gpu"), (None, "gpu")):
            try:
                prepare(devices, platform)
            except InputError as error:
                print(error)
    """
    too_few = "--devices 2: jax was already started with 1 CPU devices; call jaxddp.devices.prepare first"
    no_gpu = "--platform gpu: jax finds no GPU here; install jax[cuda12], or use --platform cpu"
    assert python(code) == ["1", too_few, too_few, no_gpu, no_gpu]


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prepare` may write to os.environ; undo it."""
    monkeypatch.setenv("PJRT_NPROC", os.environ["PJRT_NPROC"])


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_the_first_devices_are_taken(devices: int) -> None:
    assert prepare(devices, "cpu") == jax.local_devices(backend="cpu")[:devices]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (9, "--devices 9: jax was already started with 8"),
        (0, "--devices 0: must be"),
        (-1, "--devices -1: must be"),
    ],
)
def test_a_number_that_cannot_be_had_is_refused(devices: int, message: str, own_environment: None) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        prepare(devices, "cpu")
