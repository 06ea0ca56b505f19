"""Join the processes of a run, through jax.distributed."""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jaxddp.distributed.cluster import Cluster
from jaxddp.distributed.held_line import HeldLine
from jaxddp.distributed.line import BEAT, SILENCE
from jaxddp.distributed.peers import Peers, end_process
from jaxddp.errors import INTERRUPTED, InputError, LostError, exit_code, reason, tells_of_memory
from jaxddp.signals import SAVED, ending

STOPPED = (None, 0, SAVED, INTERRUPTED)  # exit codes with which all processes stop after the same step
NEVER = 2**31 - 1  # seconds
LONGEST_WRITE = 86400  # seconds that the others wait for process 0 at the end; jax's 300 are few for a large model


@contextlib.contextmanager
def joined(
    cluster: Cluster | None,
    config: Mapping[str, Any],
    timeout: float,
    on_loss: Callable[[str, bool, int], None] = end_process,
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
    line = HeldLine(cluster.address)
    try:
        with _only_python_prints(), _lost_processes_told(cluster):
            _initialize(cluster, timeout, line)
            yield peers
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in STOPPED:
            _leave(peers, line)
            raise
        code = exit_code(error)
        peers.close(" ".join(str(error).split()) or type(error).__name__, code)
        _exit_after_main(code)
        raise
    _leave(peers, line)


def _leave(peers: Peers, line: HeldLine) -> None:
    """Leave the run together with all other processes, as process 0 may still write files."""
    jax.distributed.shutdown()  # waits for them; if one dies or fails meanwhile, `peers` ends this process
    peers.close()
    line.close()


def _exit_after_main(code: int) -> None:
    """Exit when the main thread has ended, without what jax and Orbax do at exit.

    Both would wait for the other processes. And jax's shutdown is a barrier, at which others wait that have nothing
    left to do: they would take this process's arrival for the end of the run.
    """

    def exit_now() -> None:
        with ending(code):
            sys.stdout.flush()
            sys.stderr.flush()

    def after_main() -> None:  # the main thread itself may be held up before atexit, by a thread that it waits for
        threading.main_thread().join()
        exit_now()

    atexit.register(exit_now)  # what is registered last runs first
    threading.Thread(target=after_main, name="exit", daemon=True).start()


@contextlib.contextmanager
def _lost_processes_told(cluster: Cluster) -> Iterator[None]:
    """Turn the error of a collective into one line, unless another process or a lack of memory is the reason."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if tells_of_memory(error):
            raise
        # Where another process has died, `peers` knows which one, and ends this process meanwhile.
        time.sleep(SILENCE + BEAT)
        raise LostError(f"process {cluster.process_id}: {reason(error)}") from error


def _initialize(cluster: Cluster, timeout: float, line: HeldLine) -> None:
    # jax's service would swallow SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    # The coordinator, in process 0, listens where the address says.
    address = cluster.coordinator if cluster.process_id == 0 else f"127.0.0.1:{line.port}"
    try:
        jax.distributed.initialize(
            address,
            cluster.num_processes,
            cluster.process_id,
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, int(timeout)),
            heartbeat_timeout_seconds=NEVER,  # `peers` watches; jax would compare times of day, which may jump
            shutdown_timeout_seconds=LONGEST_WRITE,
        )
    except RuntimeError as error:
        raise InputError(f"--coordinator {cluster.coordinator}: {reason(error)}") from error


@contextlib.contextmanager
def _only_python_prints() -> Iterator[None]:
    """Discard what C++ libraries print on stdout: gloo reports every process that it meets."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    before = sys.stdout
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=before.encoding, errors=before.errors, buffering=1)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        sys.stdout.close()
        sys.stdout = before
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
