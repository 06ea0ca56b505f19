"""A JAX loop, seen through the trees that it hands to the recorder."""

import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxddp.errors import InputError, listed
from jaxddp.parity.recorder.batches import Entries, entries_of, identified, to_array
from jaxddp.parity.recorder.excerpt_grid import kept, norms_of, projections_of
from jaxddp.parity.recorder.files import Stages
from jaxddp.torch_layout import dotted

Arrays = dict[str, np.ndarray]

TREES = ("grads", "local_grads", "clipped_grads", "updates", "params", "buffers", "batch_stats", "opt_state", "state")
COLLECTION = "params"  # linen's name for the parameters among the variables


class JaxLoop:
    """Values that a step of JAX computes.

    Args:
        model: parameters, variables, a state with `params`, or an nnx module.
        optimizer: the `nnx.Optimizer` of an nnx module; None: states are given with the steps.
        limit: see `Recorder`.
        stacked: every array has a leading axis of this process's replicas.

    Raises:
        InputError: the model has no parameters.
    """

    def __init__(self, model: Any, optimizer: Any, limit: int, stacked: bool = False):
        self.rank, self._limit, self._stacked = jax.process_index(), limit, stacked
        self._module: Any = model if _is_nnx(model) else None
        self._optimizer: Any = optimizer if _is_nnx(model) else None
        if self._module is None and optimizer is not None:
            raise InputError("Recorder.watch: optimizer: taken for a module of nnx or torch; give opt_state to step")
        parts = self._parts({"params": model})
        if not _named(parts.get("params")):
            raise InputError("Recorder.watch: must be a tree of arrays, a state with params, or a module of nnx")
        self._structure: Any = jax.tree.structure(parts["params"])
        params, buffers = self._flat(parts["params"]), self._flat(parts.get("buffers", {}))
        self._shapes = {name: x.shape for name, x in params.items()}
        self._tensors = {name: [list(x.shape), str(x.dtype), "parameter"] for name, x in params.items()}
        self._tensors |= {name: [list(x.shape), str(x.dtype), "buffer"] for name, x in buffers.items()}
        self._replicas = len(jax.tree.leaves(parts["params"])[0]) if stacked else 1
        self._before: Arrays = {}

    def header(self) -> dict[str, Any]:
        """Describe the run and the model."""
        return {
            "side": "jax",
            "version": jax.__version__,
            "world_size": jax.process_count(),
            "replicas": self._replicas,
            "tensors": self._tensors,
        }

    def entries(self, batch: Any) -> Entries:
        """Return the arrays of a batch that this process has."""
        return entries_of(jax.tree.map(_of_process, batch))

    def check(self, values: dict[str, Any]) -> None:
        """Raise `InputError` if a step's values have unknown names."""
        if unknown := sorted(values.keys() - {*TREES, "lr"}):
            raise InputError(f"Recorder.step: {listed(unknown)}: unknown; must be among {', '.join((*TREES, 'lr'))}")

    def stop(self) -> None:
        """Stop watching: there are no hooks."""

    def arm(self, values: dict[str, Any]) -> None:
        """Copy the parameters before the next step, to which they may be donated, from the values of the last one."""
        parts = self._parts(values)
        params = self._flat(parts["params"], "params") if "params" in parts else {}
        self._norms: Arrays = {}
        self._before = self._taken("params", params, self._norms)
        self._whole = projections_of("params", params, self._limit)

    def take(self, batches: list[Entries], losses: list[Any], values: dict[str, Any]) -> tuple[Stages, dict[str, Any]]:
        """Return the step.

        Raises:
            InputError: a value has other arrays than the parameters, or another number of replicas.
        """
        parts = self._parts(values)
        of_ranks = self._of_replicas(batches)
        samples = [identified(rank) for rank in of_ranks]
        loss = np.mean([np.atleast_1d(to_array(_of_process(one))).astype(np.float64) for one in losses], axis=0)
        if loss.ndim > 1:
            raise InputError(f"Recorder.step: loss: has shape {loss.shape}; must be a scalar, or one for each replica")
        stages: dict[str, Mapping[str, np.ndarray]] = {
            "samples": {name: np.stack([one[name] for one in samples]) for name in samples[0]},
            "local_loss": {"loss": loss},
        }
        norms, whole = dict(self._norms), dict(self._whole)
        notes: dict[str, Any] = {"loss": float(loss.mean()), "micro_batches": len(batches)}
        notes["entries"] = {name: [list(x.shape), str(x.dtype)] for name, x in of_ranks[0][-1].items()}
        for stage, name in (("gradients", "grads"), ("clipped_gradients", "clipped_grads"), ("update", "updates")):
            if name in parts:
                arrays = self._flat(parts[name], name)
                stages[stage] = self._taken(stage, arrays, norms)
                whole |= projections_of(stage, arrays, self._limit)
        if self._stacked and "grads" in parts:
            grads = _named(parts["grads"], "grads")
            stages["replica_gradients"] = self._of_each({n: x for n, x in grads.items() if not (x == x[:1]).all()})
        if "local_grads" in parts:
            local = _named(parts["local_grads"], "local_grads")
            stages["local_gradients"] = self._of_each({n: x if self._stacked else x[None] for n, x in local.items()})
        params = self._flat(parts["params"], "params") if "params" in parts else {}
        after = kept(params, self._limit)
        if self._before:
            stages["params"] = self._before
        if after and self._before and "update" not in stages:
            difference = {name: after[name].astype(float) - x for name, x in self._before.items()}
            stages["update"] = {name: x.astype(self._before[name].dtype) for name, x in difference.items()}
            notes["update"] = "difference"
            of_after = projections_of("params", params, self._limit)
            whole |= {key.replace("params", "update", 1): x - whole[key] for key, x in of_after.items() if key in whole}
        elif after and self._before:
            stages["params_changes_after"] = _beside(stages["update"], self._before, after)
        if "buffers" in parts:
            buffers = self._flat(parts["buffers"], "buffers")
            if odd := sorted(buffers.keys() - self._tensors.keys()):
                given = "give Recorder.watch the variables, {'params': ..., 'batch_stats': ...}"
                raise InputError(f"Recorder.step: buffers: {listed(odd)}: unknown; {given}")
            stages["buffers"] = self._taken("buffers", buffers, norms)
        if "opt_state" in parts:
            stages["optimizer_state"] = self._states(parts["opt_state"])
            notes["hyperparameters"] = _hyperparameters(parts["opt_state"])
        if values.get("lr") is not None:
            notes["lr"] = float(np.ravel(to_array(_of_process(values["lr"])))[0])
        stages |= {"norms": norms, "projections": whole}
        return {stage: tensors for stage, tensors in stages.items() if tensors}, notes

    def _parts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the trees of a step by name, those of a state or an nnx module among them."""
        parts = {name: value for name, value in values.items() if value is not None and name not in ("state", "lr")}
        state = values.get("state")
        if state is None and hasattr(parts.get("params"), "params"):
            state = parts.pop("params")
        if state is not None:
            read = {name: getattr(state, name, None) for name in ("params", "batch_stats", "opt_state")}
            parts = {name: value for name, value in read.items() if value is not None} | parts
        if self._module is not None:
            parts = {**parts, **_of_module(self._module, self._optimizer)}
        variables = parts.get("params")
        if isinstance(variables, Mapping) and COLLECTION in variables:
            others = {name: x for name, x in variables.items() if name != COLLECTION}
            parts |= {"params": variables[COLLECTION]}
            if others:
                parts.setdefault("buffers", next(iter(others.values())) if len(others) == 1 else others)
        for name in ("grads", "local_grads", "clipped_grads", "updates"):
            tree = parts.get(name)
            if isinstance(tree, Mapping) and [*tree] == [COLLECTION]:
                parts[name] = tree[COLLECTION]
        if "batch_stats" in parts:
            parts["buffers"] = parts.pop("batch_stats")
        return parts

    def _flat(self, tree: Any, what: str = "") -> Arrays:
        """Return the arrays of a tree by name, those of the first replica if they are stacked."""
        arrays = _named(tree, what)
        if self._stacked:
            arrays = {name: x[0] for name, x in arrays.items()}
        if what and what != "buffers" and {n: x.shape for n, x in arrays.items()} != self._shapes:
            odd = sorted(arrays.keys() ^ self._shapes.keys()) or ["shapes"]
            raise InputError(f"Recorder.step: {what}: must have the parameters' arrays; differs in {listed(odd)}")
        return arrays

    def _taken(self, stage: str, arrays: Arrays, norms: Arrays) -> Arrays:
        """Return excerpts, and add the norms of the whole arrays to `norms`."""
        norms |= norms_of(stage, arrays, self._limit)
        return kept(arrays, self._limit)

    def _of_each(self, arrays: Arrays) -> Arrays:
        """Return each replica's excerpts of arrays (R, ...)."""
        return {n: np.stack([kept({n: one}, self._limit)[n] for one in x]) for n, x in arrays.items()}

    def _of_replicas(self, batches: list[Entries]) -> list[list[Entries]]:
        if not self._stacked:
            return [batches]
        if odd := {len(x) for batch in batches for x in batch.values()} - {self._replicas}:
            raise InputError(
                f"Recorder.step: batch: its first axis has {odd.pop()}; must be {self._replicas}, the replicas"
            )
        replicas = range(self._replicas)
        return [[{name: x[place] for name, x in batch.items()} for batch in batches] for place in replicas]

    def _states(self, opt_state: Any) -> Arrays:
        """Return the parts of an optimizer's state that have an array for each parameter, "mu:name"."""

        def per_parameter(node: Any) -> bool:
            return bool(jax.tree.structure(node) == self._structure) or _alike(node, self._shapes, self._stacked)

        states: Arrays = {}
        for path, node in jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=per_parameter)[0]:
            kind = str(getattr(path[-1], "name", getattr(path[-1], "key", ""))) if path else ""
            if kind and per_parameter(node):
                states |= {f"{kind}:{n}": x for n, x in kept(self._flat(node), self._limit).items()}  # of all groups
        return states


def _beside(update: Mapping[str, np.ndarray], before: Arrays, after: Arrays) -> Arrays:
    """Return what was added to the parameters that is neither their update nor the rounding of the sum."""
    added = {name: after[name].astype(float) - (before[name] + x) for name, x in update.items()}
    return {name: x.astype(before[name].dtype) for name, x in added.items() if x.any()}


def _alike(node: Any, shapes: Mapping[str, tuple[int, ...]], stacked: bool) -> bool:
    """Return whether a tree of another kind has arrays of the parameters, as states of nnx and masked ones do."""
    if not isinstance(node, Mapping) or not node:
        return False
    arrays = {_name(path): np.shape(x)[stacked:] for path, x in jax.tree_util.tree_flatten_with_path(node)[0]}
    return bool(arrays) and arrays.items() <= dict(shapes).items()


def _name(path: tuple[Any, ...]) -> str:
    return dotted(path).removesuffix(".value")


def _named(tree: Any, what: str = "") -> Arrays:
    """Return the arrays of a tree by their dotted names.

    Raises:
        InputError: an array lies on other processes too.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {_name(path): _on_host(x, f"{what} {_name(path)}".strip()) for path, x in leaves if hasattr(x, "shape")}


def _on_host(x: Any, name: str) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            raise InputError(f"Recorder: {name}: is sharded over processes; give a replicated array")
        x = x.addressable_data(0)
    return np.asarray(x)


def _of_process(x: Any) -> Any:
    """Return the rows of an array that this process has."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    if x.is_fully_replicated:
        return np.asarray(x.addressable_data(0))
    shards = {str(shard.index): shard for shard in x.addressable_shards}
    in_order = sorted(shards.values(), key=lambda shard: [part.start or 0 for part in shard.index])
    return np.concatenate([np.asarray(shard.data) for shard in in_order])


def _is_nnx(model: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


def _of_module(module: Any, optimizer: Any) -> dict[str, Any]:
    """Return the parameters, buffers and optimizer state of an nnx module."""
    from flax import nnx

    others = nnx.state(module, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))
    found = {"params": nnx.state(module, nnx.Param), "buffers": others}
    return found if optimizer is None else {**found, "opt_state": optimizer.opt_state}


def _hyperparameters(opt_state: Any) -> dict[str, float]:
    """Return what `optax.inject_hyperparams` shows, without what has several values."""
    shown: dict[str, set[float]] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(opt_state)[0]:
        words = dotted(path).removesuffix(".value").split(".")
        if "hyperparams" in words and np.size(leaf) >= 1 and np.ndim(leaf) <= 1:
            shown.setdefault(words[-1], set()).update(np.ravel(np.asarray(leaf)).astype(float).tolist())
    return {name: values.pop() for name, values in shown.items() if len(values) == 1}
