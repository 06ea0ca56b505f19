"""Slices of a checkpoint: each of several processes writes one."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SMALLEST = 2**16  # bytes of an array that is worth slicing


def over_processes(tree: Any) -> Any:
    """Return arrays as global ones, so that Orbax lets each process write a slice of them.

    An array is sliced along its first axis that the number of processes divides. Small arrays, and those without such
    an axis, stay as they are: process 0 writes them. So do all if jax has no CPU devices (JAX_PLATFORMS=cuda).

    Args:
        tree: NumPy arrays, the same in all processes.
    """
    count = jax.process_count()
    if count == 1:
        return tree
    try:
        by_process = {device.process_index: device for device in jax.devices("cpu")}
    except RuntimeError:  # JAX_PLATFORMS leaves out the CPU, whose devices hold slices without memory of GPUs
        return tree
    mesh = Mesh(np.array([by_process[process] for process in range(count)]), ("process",))
    return jax.tree.map(lambda array: sliced(array, mesh), tree)


def sliced(array: np.ndarray, mesh: Mesh) -> Any:
    """Return an array in slices over a mesh, or as it is, see `over_processes`."""
    axis = next((axis for axis, size in enumerate(array.shape) if size % mesh.size == 0), None)
    if axis is None or array.nbytes < SMALLEST or jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        return array
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * axis, "process"))
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
