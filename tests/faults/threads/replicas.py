"""Threads about replicas, micro-batches and the schedule, on 2 replicas."""

from .thread import Thread, in_jax, in_port, in_torch

UPDATE = "    return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)\n"
STEP = """

def jax_step(loss, optimizer, state, batch):
    {body}
"""


def own_step(body: str) -> str:
    """Return the end of the language model's JAX half with a step by hand."""
    return UPDATE + STEP.format(body=body.strip())


MEAN_OF_MEANS = """
    values, gradients = of_micro_batches(loss, state, batch)
    value, gradients = jax.tree.map(lambda x: x.mean(0), (values, gradients))
    mean = jax.lax.pmean(gradients, "replica")
    return update(optimizer, state, mean), {"local_loss": value, "local_gradients": gradients, "gradients": mean}
"""
MEAN_PER_DEVICE = """
    (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, state.buffers, batch)
    mean = jax.lax.pmean(gradients, "replica")
    return update(optimizer, state, mean), {"local_loss": value, "local_gradients": gradients, "gradients": mean}
"""
GLOBAL_MEAN = """
    (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, state.buffers, batch)
    count = (batch["labels"] != -100).sum()
    share = count / jax.lax.pmean(count, "replica")
    value, gradients = value * share, jax.tree.map(lambda g: g * share, gradients)
    mean = jax.lax.pmean(gradients, "replica")
    return update(optimizer, state, mean), {"local_loss": value, "local_gradients": gradients, "gradients": mean}
"""
SUM_IN_LOSS = """

def jax_step(loss, optimizer, state, batch):
    def of_all(params):
        value, buffers = loss(params, state.buffers, batch)
        return jax.lax.psum(value, "replica"), buffers

    local, _ = jax.grad(of_all, has_aux=True)(state.params)
    gradients = jax.lax.pmean(local, "replica")
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    state = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)
    return state, {"local_gradients": local, "gradients": gradients}
"""
SCHEDULER = """    return torch.optim.Adam(parameters, lr=LR)


def torch_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 40)
"""

THREADS: dict[str, Thread] = {
    "scheduler_per_process": Thread(
        (
            "huggingface/accelerate#1398",
            "huggingface/accelerate#2142",
            "huggingface/accelerate#662",
            "huggingface/accelerate#2926",
            "huggingface/diffusers#3954",
        ),
        "The learning rate falls N times too fast on N GPUs.",
        "The scheduler steps once for each process.",
        "classifier",
        (in_jax("step / 40", "2 * step / 40"),),
        ("scheduler_too_fast",),
        (
            in_jax("optax.adam(LR)", "optax.adam(lambda step: LR * (1 - step / 40))"),
            in_torch("    return torch.optim.Adam(parameters, lr=LR)\n", SCHEDULER),
        ),
    ),
    "token_mean": Thread(
        ("huggingface/trl#2175", "axolotl-ai-cloud/axolotl#1100", "huggingface/transformers#34191"),
        "Training with accumulated gradients is worse than with one large batch.",
        "Each micro-batch's loss is a mean over its own tokens, however many they are.",
        "language",
        (in_jax(UPDATE, own_step(MEAN_OF_MEANS)),),
        ("mean_per_micro_batch",),
    ),
    "device_mean": Thread(
        ("huggingface/transformers#18458", "huggingface/transformers#18297"),
        "The loss of Flax examples is not that of the whole batch.",
        "Each device divides by the number of its own labels, and the means are averaged.",
        "language",
        (in_jax(UPDATE, own_step(MEAN_PER_DEVICE)),),
        ("mean_per_rank",),
        (in_port("accumulation_steps = 2", "accumulation_steps = 1"),),
    ),
    "process_mean": Thread(
        ("mlcommons/algorithmic-efficiency#272",),
        "The first steps of a workload differ between JAX and torch, on several GPUs.",
        "The mean of the loss over the processes is taken differently.",
        "language",
        (in_jax(UPDATE, own_step(GLOBAL_MEAN)),),
        ("global_mean",),
        (
            in_port("accumulation_steps = 2", "accumulation_steps = 1"),
            in_port('loss_normalization = "global"', 'loss_normalization = "ddp"'),
        ),
        note="it is assumed that torch averages the processes' means, and that JAX divides by the labels of all",
    ),
    "psum_in_loss": Thread(
        ("jax-ml/jax#3970",),
        "Gradients of a loss that is summed over the devices within pmap are too large.",
        "The transpose of psum is psum: the gradient is N times the local one.",
        "classifier",
        (in_jax("jax_optimizer = optax.adam(LR)\n", f"jax_optimizer = optax.adam(LR)\n{SUM_IN_LOSS}"),),
        ("collective_in_loss|sum_not_mean|check_vma",),
        (in_jax("import optax\n", "import dataclasses\n\nimport jax\nimport optax\n"),),
    ),
    "batch_norm_over_devices": Thread(
        ("google/flax#319",),
        "Examples of flax normalise each device's batch by itself; later versions do not.",
        "BatchNorm's statistics are those of one device, unless `axis_name` says otherwise.",
        "convnet",
        (
            in_jax(
                "self.bn1 = BatchNorm(6, momentum=MOMENTUM)", "self.bn1 = BatchNorm(6, momentum=MOMENTUM, sync=True)"
            ),
            in_jax(
                "self.bn2 = BatchNorm(6, momentum=MOMENTUM)", "self.bn2 = BatchNorm(6, momentum=MOMENTUM, sync=True)"
            ),
        ),
        ("batch_norm_sync",),
    ),
}
