"""Small training loops in torch and in JAX with a recorder in them, and mistakes that may be planted in JAX's."""

import contextlib
import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from jaxddp.parity import Recorder

FEATURES, HIDDEN, CLASSES, EXAMPLES = 8, 12, 4, 16
NAMES = {"Dense_0": "0", "BatchNorm_0": "1", "Dense_1": "3"}


def batch_of(step: int, rank: int = 0, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Return one rank's examples of a step, counted from 1."""
    rng = np.random.default_rng((step, rank))
    return {
        "x": rng.normal(0.5, 1.0, (EXAMPLES, FEATURES)).astype(dtype),
        "y": rng.integers(0, CLASSES, EXAMPLES),
    }


def torch_model(seed: int = 0, dtype: str = "float32") -> nn.Sequential:
    """Return Linear, BatchNorm, GELU, Linear."""
    torch.manual_seed(seed)
    layers = nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.GELU(), nn.Linear(HIDDEN, CLASSES)
    return nn.Sequential(*layers).to(getattr(torch, dtype))


def train_torch(
    folder: Path,
    *,
    steps: int = 6,
    recorded: Any = 6,
    clip: float | None = None,
    accumulate: int = 1,
    make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2),
    schedule: Callable[[int], float] | None = None,
    dtype: str = "float32",
    reduce: str = "mean",
    **options: Any,
) -> None:
    """Train and record this process's part of a run, under DDP if a process group is there.

    Args:
        reduce: "mean" of the gradients over the ranks; "sum"; "none", without DDP; "by hand" or "sum by hand", without
            DDP and before the update; "early", with no_sync around the last micro-batch; "late", around all others.
    """
    model: nn.Module = torch_model(dtype=dtype)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if dist.is_initialized() and reduce in ("mean", "sum", "early", "late"):
        model = nn.parallel.DistributedDataParallel(model)
        if reduce == "sum":
            model.register_comm_hook(None, _summed)
    optimizer = make(model.parameters())
    rate = optimizer.param_groups[0]["lr"]
    recorder = Recorder(folder, recorded, **options)
    recorder.watch(model, optimizer)
    for step in range(1, steps + 1):
        if schedule is not None:
            optimizer.param_groups[0]["lr"] = rate * schedule(step)
        optimizer.zero_grad()
        for piece in range(accumulate):
            batch = {n: torch.from_numpy(x) for n, x in batch_of(step + 100 * piece, rank, dtype).items()}
            is_last = piece == accumulate - 1
            alone = reduce == ("early" if is_last else "late")
            with model.no_sync() if alone else contextlib.nullcontext():  # type: ignore[operator]
                loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
                (loss / accumulate).backward()
            if piece < accumulate - 1:
                recorder.micro_batch(batch, loss)
        for p in model.parameters() if "by hand" in reduce else ():
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad /= 1 if "sum" in reduce else dist.get_world_size()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        recorder.step(batch, loss)


def _summed(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce without a division."""
    dist.all_reduce(bucket.buffer())
    reduced = torch.futures.Future[torch.Tensor]()
    reduced.set_result(bucket.buffer())
    return reduced


def train_ranks(folder: Path, world_size: int = 2, *runs: Mapping[str, Any]) -> None:
    """Train with this many gloo ranks, a process each.

    Args:
        runs: options of `train_torch`, with the `name` of a folder within `folder` for each; (): one run in `folder`.
    """
    context = multiprocessing.get_context("spawn")
    store = folder.with_name(f"{folder.name}-store")
    children = [
        context.Process(target=_rank, args=(rank, world_size, store, folder, runs)) for rank in range(world_size)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert all(child.exitcode == 0 for child in children)


def _rank(rank: int, world_size: int, store: Path, folder: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size)
    for options in runs or ({"name": ""},):
        train_torch(folder / options["name"], **{key: x for key, x in options.items() if key != "name"})
    dist.destroy_process_group()
    assert "jax" not in sys.modules, "the recorder of a torch loop imports no jax"


def variables(seed: int = 0, dtype: str = "float32") -> dict[str, dict[str, dict[str, np.ndarray]]]:
    """Return torch's weights as linen's variables."""
    state = {name: x.numpy().copy() for name, x in torch_model(seed, dtype).state_dict().items()}
    return {
        "params": {
            "Dense_0": {"kernel": state["0.weight"].T, "bias": state["0.bias"]},
            "BatchNorm_0": {"scale": state["1.weight"], "bias": state["1.bias"]},
            "Dense_1": {"kernel": state["3.weight"].T, "bias": state["3.bias"]},
        },
        "batch_stats": {"BatchNorm_0": {"mean": state["1.running_mean"], "var": state["1.running_var"]}},
    }


def train_jax(
    folder: Path,
    *,
    steps: int = 6,
    recorded: Any = 6,
    replicas: int = 0,
    tx: Any = None,
    reduce: str = "mean",
    scale: float = 1.0,
    approximate: bool = False,
    momentum: float = 0.9,
    mean_momentum: float | None = None,
    biased: bool = False,
    data: Callable[[int, int], dict[str, np.ndarray]] = batch_of,
    seed: int = 0,
    dtype: str = "float32",
    show: tuple[str, ...] = ("grads", "updates", "params", "batch_stats", "opt_state"),
    lr: Callable[[int], float] | None = None,
    local: bool = False,
    **options: Any,
) -> None:
    """Train in JAX and record.

    Args:
        replicas: number of replicas under `jax.pmap`; 0: one, under `jax.jit`.
        tx: the optimizer.
        reduce: "mean", "sum" or "none" of the gradients over the replicas.
        scale: factor of the loss.
        approximate: GELU by tanh.
        momentum: of the running statistics.
        mean_momentum: of the running mean; None: the same.
        biased: running variance with divisor n.
        show: what `step` is given.
        lr: learning rate that `step` is given, by the step.
        local: give the local gradients too.
    """
    import jax
    import optax
    from jax import numpy as jnp

    tx = optax.adamw(1e-2, weight_decay=0.01) if tx is None else tx
    state = variables(seed, dtype)
    params, stats = (jax.tree.map(jnp.asarray, state[name]) for name in ("params", "batch_stats"))
    opt_state = tx.init(params)

    def loss_of(params: Any, stats: Any, batch: Any) -> Any:
        dense, norm, out = params["Dense_0"], params["BatchNorm_0"], params["Dense_1"]
        x = batch["x"] @ dense["kernel"] + dense["bias"][None]
        mean, var = x.mean(0), x.var(0)
        shown = var if biased else var * len(x) / (len(x) - 1)
        old = stats["BatchNorm_0"]
        kept = momentum if mean_momentum is None else mean_momentum
        new = {
            "mean": kept * old["mean"] + (1 - kept) * mean,
            "var": momentum * old["var"] + (1 - momentum) * shown,
        }
        x = (x - mean[None]) * (norm["scale"] / jnp.sqrt(var + 1e-5))[None] + norm["bias"][None]
        logits = jax.nn.gelu(x, approximate=approximate) @ out["kernel"] + out["bias"][None]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return scale * losses.mean(), {"BatchNorm_0": new}

    def step_of(params: Any, stats: Any, opt_state: Any, batch: Any) -> dict[str, Any]:
        (loss, stats), local_grads = jax.value_and_grad(loss_of, has_aux=True)(params, stats, batch)
        grads = local_grads
        if replicas and reduce != "none":
            grads = getattr(jax.lax, f"p{reduce}")(grads, "replica")
            stats = jax.tree.map(lambda x: jax.lax.all_gather(x, "replica")[0], stats)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        found = {"loss": loss, "grads": grads, "local_grads": local_grads, "updates": updates, "params": params}
        return {**found, "batch_stats": stats, "opt_state": opt_state}

    if replicas:
        params, stats, opt_state = (
            jax.tree.map(lambda x: jnp.stack([x] * replicas), tree) for tree in (params, stats, opt_state)
        )
        step_of_all = jax.pmap(step_of, axis_name="replica", devices=jax.devices()[:replicas])
    else:
        step_of_all = jax.jit(step_of)
    recorder = Recorder(folder, recorded, **options)
    recorder.watch({"params": params, "batch_stats": stats}, stacked=replicas > 0)
    for step in range(1, steps + 1):
        of_ranks = (
            [data(step, rank) for rank in range(max(replicas, 1))] if dtype == "float32" else [batch_of(step, 0, dtype)]
        )
        batch = {n: np.stack([one[n] for one in of_ranks]) if replicas else of_ranks[0][n] for n in of_ranks[0]}
        found = step_of_all(params, stats, opt_state, {n: x.astype(dtype) if n == "x" else x for n, x in batch.items()})
        params, stats, opt_state = found["params"], found["batch_stats"], found["opt_state"]
        given = {name: found[name] for name in (*show, *["local_grads"] * local)}
        recorder.step(batch, found["loss"], **given, **({} if lr is None else {"lr": lr(step)}))
