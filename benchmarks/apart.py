"""A process for each number of replicas: when jax starts, it fixes the CPU devices and the threads for them."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax

from jaxddp.config.options import Platform
from jaxddp.distributed.devices import prepare

Call = Callable[..., Any]


@contextlib.contextmanager
def process(replicas: int | None, platform: Platform | None) -> Iterator[Call]:
    """Start a process; yield a function that calls another one there, with the devices before its arguments.

    Args:
        replicas: number of devices, one per replica; None: all GPUs.
        platform: cpu | gpu; None: GPUs if there are any.
    """
    context = multiprocessing.get_context("spawn")  # a fork would share jax's threads
    with ProcessPoolExecutor(1, context) as pool:

        def call(function: Call, *arguments: Any) -> Any:
            return pool.submit(_on_devices, function, replicas, platform, arguments).result()

        yield call


def _on_devices(function: Call, replicas: int | None, platform: Platform | None, arguments: tuple[Any, ...]) -> Any:
    # On GPUs jax would multiply float32 matrices in TF32, which keeps 10 bits; torch does not.
    with jax.default_matmul_precision("highest"):
        return function(prepare(replicas, platform), *arguments)
