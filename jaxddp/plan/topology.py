"""GPUs that this machine lacks, as XLA's compiler sees them."""

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental import topologies
from jaxlib.version import __version__ as JAXLIB_VERSION

from jaxddp.config.hardware import GPU
from jaxddp.errors import InputError

PLUGIN = Path(sys.prefix, "cuda-plugin")  # next to the packages, not among them: jax would use it in every run
_PACKAGE = "jax-cuda12-plugin"


def start() -> None:
    """Let jax find its CUDA plugin, which has the compiler, but no GPUs; before jax is used, as a program may.

    Raises:
        InputError: the plugin is not installed.
    """
    _find_plugin()
    with contextlib.suppress(RuntimeError):  # jax is already running
        jax.config.update("jax_platforms", "cpu")
    with _quiet():
        jax.devices()


def gpus(gpu: GPU, per_node: int, nodes: int) -> list[jax.Device]:
    """Return the devices of a run, for which programs can be compiled, but not run.

    Raises:
        InputError: jax's CUDA plugin is not installed.
    """
    start()
    with _quiet():
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=gpu.target_config, topology=f"1x{nodes}x{per_node}"
        )
    return list(topology.devices)


def _find_plugin() -> None:
    """Make the plugin importable; raise `InputError` if it is missing or for another jax."""
    if PLUGIN.is_dir() and str(PLUGIN) not in sys.path:
        sys.path.append(str(PLUGIN))
    install = (
        f"`make .venv/cuda-plugin` installs it, or `pip install --no-deps --target {PLUGIN} "
        f"{_PACKAGE}=={JAXLIB_VERSION} jax-cuda12-pjrt=={JAXLIB_VERSION}`"
    )
    if all(importlib.util.find_spec(f"jax_plugins.{name}") is None for name in _names()):
        raise InputError(f"no GPU compiler here: jax's CUDA plugin is missing; {install} (182 MB, needs no GPU)")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if (version := importlib.metadata.version(_PACKAGE)) != JAXLIB_VERSION:
            raise InputError(f"{_PACKAGE} {version}: must be {JAXLIB_VERSION}, jaxlib's version; {install}")


def _names() -> list[str]:
    """Return the names of the plugin's modules, if there is a folder for plugins at all."""
    return ["xla_cuda12", "xla_cuda13"] if importlib.util.find_spec("jax_plugins") is not None else []


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard the message that the plugin writes on stderr while it loads: that there is no GPU."""
    sys.stderr.flush()
    kept = os.dup(2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
