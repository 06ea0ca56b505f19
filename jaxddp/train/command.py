"""`jaxddp train`: the command line of a training run."""

import contextlib
import os
from collections.abc import Sequence

from jaxddp import cli
from jaxddp.config import TrainerConfig
from jaxddp.config.choices import DEFAULT_CPU_DEVICES, MOST_CPU_DEVICES
from jaxddp.config.ulimits import LEAST_FOR_JAX, check_address_space
from jaxddp.errors import InputError

with cli.one_line_errors(show_traceback=False):
    check_address_space(LEAST_FOR_JAX)
    with cli.variables_named("JAX_"):
        import jax.errors  # noqa: F401 - the first import of jax reads its environment variables

from jaxddp.distributed.cluster import Cluster, find
from jaxddp.distributed.devices import prepare_cpu
from jaxddp.distributed.joining import tell_failure
from jaxddp.train.trainer import main


def tell_others(argv: Sequence[str], reason: str) -> None:
    """If this process is one of several, report its bad flags to the others, so that they do not wait for it."""
    with contextlib.suppress(ValueError):  # a flag is not a number, or there is no cluster
        if (cluster := _cluster_of(argv)) is not None:
            tell_failure(cluster, reason)


def request_devices(argv: Sequence[str]) -> None:
    """Request the CPU devices that the flags ask for before a program is loaded, whose top level may start jax."""
    with contextlib.suppress(ValueError, InputError):  # reported when the flags are parsed
        cluster = _cluster_of(argv)
        processes = 1 if cluster is None else cluster.num_processes
        default = DEFAULT_CPU_DEVICES if processes == 1 else 1
        given = cli.value_of("--devices", argv)
        prepare_cpu(default if given is None else min(max(1, int(given) // processes), MOST_CPU_DEVICES))


def _cluster_of(argv: Sequence[str]) -> Cluster | None:
    """Return the processes of the run, of which the flags or the launcher's variables tell."""
    texts = [cli.value_of(name, argv) for name in ("--num-processes", "--process-id")]
    size, number = (None if text is None else int(text) for text in texts)
    return find(os.environ, cli.value_of("--coordinator", argv), size, number)


def run(argv: Sequence[str]) -> None:
    """Run the command line."""
    request_devices(argv)
    cli.run(main, TrainerConfig, "jaxddp train", argv, tell_others)
