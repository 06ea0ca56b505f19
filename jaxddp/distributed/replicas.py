"""Replicas on devices, and the only place where a function is mapped over them.

A `Replicas` object knows the number of replicas, copies a tree to all of them (`replicate`), splits a batch
over them (`shard`), and runs a function on each (`map`). Code that uses only this interface runs unchanged on N
devices (`Replicas`, by `jax.pmap`) and on one (`VirtualReplicas`, by `jax.vmap`).
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxddp.distributed.collectives import AXIS_NAME, all_gather, broadcast
from jaxddp.errors import check_name

WAYS = ("pmap", "shard_map")  # to map a function over the devices
Tree = TypeVar("Tree")
Axes = Any  # None: the same on all replicas; 0: one slice per replica; or a tree of these


class Replicas:
    """One replica per device, mapped by `jax.pmap`.

    Args:
        devices: devices of all replicas, in rank order; all processes pass the same list.
        mapped_by: "pmap", or "shard_map" for `jax.jit(jax.shard_map(..., check_vma=False))`, which gives the same bits;
            None: the environment's JAXDDP_MAPPED_BY, by default pmap.

    Raises:
        InputError: `mapped_by` is another word.

    Attributes:
        devices: devices of all replicas, in rank order.
        world_size: number of replicas over all processes.
        local_ranks: ranks of the replicas that this process drives.

    >>> from jaxddp.distributed.collectives import all_reduce, rank
    >>> from jaxddp.distributed.devices import prepare
    >>> replicas = Replicas(prepare(2, "cpu"))
    >>> add_ranks = replicas.map(lambda x: all_reduce(x * rank()), in_axes=(0,), out_axes=None)
    >>> print(add_ranks(replicas.shard(np.array([5.0, 7.0]))))
    7.0
    """

    def __init__(self, devices: Sequence[jax.Device], mapped_by: str | None = None):
        self.mapped_by = mapped_by or os.environ.get("JAXDDP_MAPPED_BY") or WAYS[0]
        check_name("mapped_by", self.mapped_by, WAYS)
        self.devices = list(devices)
        self.world_size = len(self.devices)
        here = jax.process_index()
        self.local_ranks = [rank for rank, device in enumerate(self.devices) if device.process_index == here]
        # The mesh covers this process's devices only: pmap takes and returns each process's part of the arrays.
        mesh = Mesh(np.array([self.devices[rank] for rank in self.local_ranks]), (AXIS_NAME,))
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._sharded = NamedSharding(mesh, PartitionSpec(AXIS_NAME))

    @property
    def in_one_process(self) -> bool:
        """Return whether this process drives all replicas."""
        return len(self.local_ranks) == self.world_size

    def replicate(self, tree: Tree) -> Tree:
        """Copy every leaf to every device of this process, into buffers that are not shared with the caller."""
        # device_put may reuse the caller's buffer as one of the copies, which a donating step would free.
        return jax.tree.map(lambda leaf: jax.device_put(np.array(leaf), self._replicated), tree)

    def shard(self, tree: Tree) -> Tree:
        """Split leaves with one slice per replica of this process over its devices."""
        self.check_dealt(tree)
        return jax.device_put(tree, self._sharded)

    def place(self, tree: Any, axes: Any) -> Any:
        """Place each field of a dataclass by its axis: `replicate` for None; for 0, of leaves (world_size, ...)."""
        differing = _differing(axes)
        parts = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
        for name, part in parts.items():
            parts[name] = self.shard(self.local(part)) if name in differing else self.replicate(part)
        return type(tree)(**parts)

    def start(self, tree: Any, axes: Any) -> Any:
        """Place one replica's values on all replicas, also as the initial values of fields that differ later."""
        return self.place(self.repeat(tree, _differing(axes)), axes)

    def repeat(self, tree: Any, names: Iterable[str]) -> Any:
        """Return the dataclass with the named fields repeated once per replica, on a new first axis."""

        def repeated(part: Any) -> Any:
            arrays = jax.tree.map(np.asarray, part)
            return jax.tree.map(lambda x: np.broadcast_to(x, (self.world_size, *x.shape)), arrays)

        return dataclasses.replace(tree, **{name: repeated(getattr(tree, name)) for name in names})

    def meet(self) -> None:
        """Wait until all processes have called this: a collective ends only once every process takes part."""
        if not self.in_one_process:
            self.gather(self.shard(np.array(self.local_ranks)))

    def local(self, tree: Any) -> Any:
        """Return the slices of leaves (world_size, ...) that belong to this process's replicas."""
        if self.in_one_process:
            return tree
        return jax.tree.map(lambda leaf: np.asarray(leaf)[self.local_ranks], tree)

    def gather(self, tree: Any) -> Any:
        """Return leaves (world_size, ...) of sharded ones, as NumPy arrays, in every process; all must call it."""
        if self.in_one_process:
            return jax.device_get(tree)
        return jax.tree.map(lambda leaf: np.asarray(self._all_gather(leaf)), tree)

    @functools.cached_property
    def _all_gather(self) -> Callable[[jax.Array], jax.Array]:
        return self.map(all_gather, in_axes=(0,), out_axes=None)

    def copied_from(self, rank: int, tree: Tree) -> Tree:
        """Copy a tree that should be equal on all replicas from one of them to all."""
        # The ranks serve as the mapped argument that pmap needs; the tree itself is not mapped.
        copy = self.map(lambda tree, _: broadcast(tree, src=rank), in_axes=(None, 0), out_axes=None)
        return copy(tree, self.shard(np.array(self.local_ranks)))

    def unsharded(self, tree: Any, axes: Any) -> Any:
        """Compute the inverse of `place` for a dataclass: fields of axis 0 as leaves (world_size, ...)."""
        return dataclasses.replace(tree, **{name: self.gather(getattr(tree, name)) for name in _differing(axes)})

    def check_dealt(self, tree: Tree) -> None:
        """Raise `ValueError` unless each leaf has a slice per replica of this process; pmap would use fewer devices."""
        count = len(self.local_ranks)
        for leaf in jax.tree.leaves(tree):
            if np.shape(leaf)[:1] != (count,):
                raise ValueError(f"a batch of shape {np.shape(leaf)} cannot be sharded over {count} replicas")

    def map(
        self,
        function: Callable[..., Any],
        in_axes: tuple[Axes, ...],
        out_axes: Axes,
        donate: tuple[int, ...] = (),
        compiler_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compile `function` to run on every replica at once, with collectives over `AXIS_NAME`.

        Args:
            function: pure function, called with one replica's slice of each argument.
            in_axes: for each argument, 0 for one slice per replica, or None for the same value on all
                replicas. At least one must be 0, since pmap needs a mapped argument.
            out_axes: likewise; None asserts that all replicas return the same value, which is not checked
                (see `jaxddp.distributed.verify`).
            donate: indices of arguments whose buffers may be reused for the results.
            compiler_options: XLA's options, see `jaxddp.distributed.gpu_options`; not used by several processes.

        Returns:
            The compiled function.
        """
        # With axis None a value keeps its shape, and each device holds a copy, which a step may donate and return.
        # Stacked values (axis 0 for all) would be copied at each step, and sliced before they are saved or compared.
        # What comes back with None is replica 0's: nothing here would notice that the others differ.
        if self.mapped_by == "shard_map":
            return self._by_shard_map(function, in_axes, out_axes, donate, compiler_options)
        in_jit = self.in_one_process  # inside of jit, pmap takes this process's devices for all
        # jax.pmap is in maintenance mode, so this is its only use. In jit, a call takes less time of the main thread:
        # one of the default job at 1 replica 0.24 ms instead of 0.3. And pmap takes no options.
        mapped = jax.pmap(
            function,
            axis_name=AXIS_NAME,
            in_axes=in_axes,
            out_axes=out_axes,
            devices=self.devices,
            donate_argnums=() if in_jit else donate,
        )
        if not in_jit:
            return self._traceable(mapped, function, in_axes, out_axes)
        by_axis = {None: self._replicated, 0: self._sharded}
        return jax.jit(
            lambda *arguments: mapped(*arguments),  # jit would take over pmap's `lower`, which does not donate
            out_shardings=_map_axes(lambda axis: by_axis[axis], out_axes),
            donate_argnums=donate,
            compiler_options=dict(compiler_options or {}),
        )

    def _by_shard_map(
        self,
        function: Callable[..., Any],
        in_axes: tuple[Axes, ...],
        out_axes: Axes,
        donate: tuple[int, ...],
        compiler_options: Mapping[str, Any] | None,
    ) -> Any:
        """Return what `map` returns, for the day on which pmap goes."""
        mesh = Mesh(np.array(self.devices), (AXIS_NAME,))
        specs = {None: PartitionSpec(), 0: PartitionSpec(AXIS_NAME)}
        in_specs, out_specs = (_map_axes(lambda axis: specs[axis], axes) for axes in (in_axes, out_axes))

        def on_replica(*blocks: Any) -> Any:  # with one slice each, where pmap gives the slice
            arguments = _by_axis(lambda part: jax.tree.map(lambda x: x[0], part), in_axes, blocks)
            return _by_axis(
                lambda part: jax.tree.map(lambda x: jnp.asarray(x)[None], part), out_axes, function(*arguments)
            )

        # With check_vma, gradients of replicated values would be summed over the devices before their mean.
        mapped = jax.jit(
            jax.shard_map(on_replica, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False),
            out_shardings=_map_axes(lambda axis: NamedSharding(mesh, specs[axis]), out_axes),
            donate_argnums=donate,
            compiler_options=dict(compiler_options or {}) if self.in_one_process else None,
        )
        if self.in_one_process:
            return mapped

        def of_all(axis: int | None, part: Any) -> Any:
            return jax.tree.map(lambda x: self._of_all_processes(x, NamedSharding(mesh, specs[axis]), axis), part)

        def of_this_process(axis: int | None, part: Any) -> Any:
            return jax.tree.map(lambda x: self._of_this_process(x, axis), part)

        def call(*arguments: Any) -> Any:
            return _map_axes(of_this_process, out_axes, mapped(*_map_axes(of_all, in_axes, arguments)))

        return self._traceable(call, function, in_axes, out_axes)

    def _of_all_processes(self, x: Any, sharding: NamedSharding, axis: int | None) -> jax.Array:
        """Return this process's part of an array as its part of one that lies on the devices of all processes."""
        placed = x if isinstance(x, jax.Array) else self.replicate(x) if axis is None else self.shard(x)
        shape = placed.shape if axis is None else (self.world_size, *placed.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, [s.data for s in placed.addressable_shards])

    def _of_this_process(self, x: jax.Array, axis: int | None) -> jax.Array:
        """Return this process's part of an array of all processes."""
        shape = x.shape if axis is None else (len(self.local_ranks), *x.shape[1:])
        sharding = self._replicated if axis is None else self._sharded
        return jax.make_array_from_single_device_arrays(shape, sharding, [s.data for s in x.addressable_shards])

    def _traceable(
        self, mapped: Callable[..., Any], function: Callable[..., Any], in_axes: Axes, out_axes: Axes
    ) -> Any:
        """Return `mapped` for several processes; where only shapes are asked for, they come from `jax.vmap`.

        Traced, as by `jax.eval_shape`, pmap takes this process's devices for all.
        """

        def of_all(part: Any) -> Any:
            return jax.tree.map(lambda x: jnp.repeat(x[:1], self.world_size, axis=0), part)

        def of_this_process(part: Any) -> Any:
            return jax.tree.map(lambda x: x[: len(self.local_ranks)], part)

        @functools.wraps(mapped)
        def call(*arguments: Any) -> Any:
            if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
                return mapped(*arguments)
            of_every_replica = _by_axis(of_all, in_axes, arguments)
            results = self._on_one_device(function, in_axes, out_axes)(*of_every_replica)
            return _by_axis(of_this_process, out_axes, results)

        return call

    def _on_one_device(self, function: Callable[..., Any], in_axes: Axes, out_axes: Axes) -> Callable[..., Any]:
        """Return the function of all replicas' slices, computed by one device."""
        return jax.vmap(function, in_axes, out_axes, axis_name=AXIS_NAME, axis_size=self.world_size)


def _differing(axes: Any) -> list[str]:
    """Return the fields of a dataclass of axes that have one slice per replica."""
    return [field.name for field in dataclasses.fields(axes) if getattr(axes, field.name) == 0]


def _by_axis(function: Callable[[Any], Any], axes: Axes, tree: Any) -> Any:
    """Apply a function to the parts of a tree whose axis is 0; axes are a prefix of the tree."""
    return _map_axes(lambda axis, part: part if axis is None else function(part), axes, tree)


def _map_axes(function: Callable[..., Any], axes: Axes, *trees: Any) -> Any:
    """Map a function over axes, where None is an axis and not an empty branch, and the subtrees below them."""
    return jax.tree.map(function, axes, *trees, is_leaf=lambda axis: axis is None)


class VirtualReplicas(Replicas):
    """N replicas on one device, mapped by `jax.vmap`: the same program without parallel hardware.

    Args:
        world_size: number of replicas.
        device: device of all replicas; None: jax's default device.
    """

    def __init__(self, world_size: int, device: jax.Device | None = None):
        super().__init__([device or jax.devices()[0]])
        self.world_size = world_size
        self.local_ranks = list(range(world_size))

    def map(
        self,
        function: Callable[..., Any],
        in_axes: tuple[Axes, ...],
        out_axes: Axes,
        donate: tuple[int, ...] = (),
        compiler_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compile `function` to run on every replica at once, on one device, without options; see `Replicas.map`."""
        return jax.jit(self._on_one_device(function, in_axes, out_axes), donate_argnums=donate)
