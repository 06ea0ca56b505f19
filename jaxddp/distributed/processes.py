"""Joining of the processes of a run, through jax.distributed."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental.multihost_utils import sync_global_devices

from jaxddp.distributed.cluster import Cluster
from jaxddp.distributed.held_line import HeldLine
from jaxddp.distributed.peers import BEAT, SILENCE, Peers, end_process
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError, TrainingError


@contextlib.contextmanager
def joined(
    cluster: Cluster | None,
    config: Mapping[str, Any],
    timeout: float,
    on_loss: Callable[[str], None] = end_process,
) -> Iterator[Peers | None]:
    """Join the processes of a run, before any other use of jax, and leave them at the end.

    If the body raises, the other processes learn the reason, and end.

    Args:
        cluster: this process among the others; None: it trains alone, and nothing is done.
        config, timeout, on_loss: see `jaxddp.distributed.peers.Peers`.

    Yields:
        The connections to the other processes; None without a cluster.

    Raises:
        InputError: not all processes came, they do not fit each other, or jax was running already.
    """
    if cluster is None:
        yield None
        return
    peers = Peers(cluster, config, timeout, on_loss)
    try:
        _initialize(cluster, timeout)
        yield peers
    except jax.errors.JaxRuntimeError as error:
        # Where another process has died, a collective fails; `peers` knows which one, and ends this process meanwhile.
        time.sleep(SILENCE + BEAT)
        reason = str(error).strip().partition("\n")[0]
        peers.close(reason)
        raise TrainingError(f"process {cluster.process_id}: {reason}") from error
    except BaseException as error:
        peers.close(" ".join(str(error).split()) or type(error).__name__)
        raise
    peers.close()
    jax.distributed.shutdown()


def _initialize(cluster: Cluster, timeout: float) -> None:
    # jax's own service would swallow SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    first = cluster.process_id == 0
    address = cluster.coordinator if first else f"127.0.0.1:{HeldLine(cluster.address).port}"
    try:
        jax.distributed.initialize(
            address,
            cluster.num_processes,
            cluster.process_id,
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, int(timeout)),
        )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"--coordinator {cluster.coordinator}: {reason}") from error


def meet(replicas: Replicas) -> None:
    """Connect all devices, and all processes, for the first time; gloo's reports of it are not shown."""
    with _stdout_silenced():
        replicas.meet()
        sync_global_devices("jaxddp")  # as Orbax does


@contextlib.contextmanager
def _stdout_silenced() -> Iterator[None]:
    """Discard what is printed on stdout, by C++ libraries too."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
