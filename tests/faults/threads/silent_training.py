"""Threads about silent differences in schedules, clipping, and what counts devices."""

from .optimizers import JAX_ADAM, TORCH_ADAM, clipped_as_in_torch
from .replicas import UPDATE, own_step
from .thread import WITH_JAX, WITH_JNP, Edit, Thread, in_jax, in_port, in_torch

MADE = f"    return {TORCH_ADAM}\n"
CLIPPED_TREE = """

def clipped(gradients):
    return jax.tree.map(lambda g: g * jnp.minimum(1, 0.05 / (optax.tree.norm(gradients) + 1e-6)), gradients)


"""
MICRO_STEP = """
    values, gradients = of_micro_batches(loss, state, batch)
    value, gradients = jax.tree.map(lambda x: x.mean(0), (values, {gradients}))
    mean = jax.lax.pmean(gradients, "replica")
    shown = {{"local_loss": value, "local_gradients": gradients, "gradients": mean}}
    return update(optimizer, state, {mean}), shown
"""
STEP = MICRO_STEP.format(gradients="gradients", mean="clipped(mean)").strip()
EACH_CLIPPED = MICRO_STEP.format(gradients="jax.vmap(clipped)(gradients)", mean="mean").strip()
WARM_TORCH = "min(1, (step + 1) / 4)"
WARM_JAX = "LR * jnp.minimum(1, (step + 1) / 4)"
COSINE = "(1 + math.cos(math.pi * min(step{}, {length}) / {length})) / 2"  # torch's own goes up again behind its end
WITH_MATH = in_torch("import torch\nfrom", "import math\n\nimport torch\nfrom")
COSINE_JAX = "optax.cosine_decay_schedule(LR, 35)"
CHAIN = f"optax.chain(optax.clip_by_global_norm(5.0), {JAX_ADAM})"
BRANCHES = f"""optax.multi_transform(
    {{"inner": {CHAIN}, "rest": {CHAIN}}},
    lambda params: {{name: "inner" if name == "inner" else "rest" for name in params}},
)"""
PER_TENSOR = "optax.stateless(lambda g, _: jax.tree.map(lambda x: x * jnp.minimum(1, 0.05 / jnp.linalg.norm(x)), g))"
SQUARED = """

def without_root(gradients, params):
    squares = sum(jnp.square(g).sum() for g in jax.tree.leaves(gradients))
    return jax.tree.map(lambda g: g * jnp.minimum(1, 0.01 / squares), gradients)


jax_optimizer = optax.chain(optax.stateless(without_root), optax.adam(LR))
"""
BY_HAND = """

def jax_step(loss, optimizer, state, batch):
    (value, buffers), local = jax.value_and_grad(loss, has_aux=True)(state.params, state.buffers, batch)
    gradients = jax.lax.pmean(local, "replica")
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return dataclasses.replace(state, params=params, buffers=buffers, opt_state=opt_state), {"gradients": gradients}
"""


def of_factor(torch: str, jax: str) -> tuple[Edit, Edit]:
    """Return the edits that scale the rate of the classifiers by a function of the step."""
    scheduler = f"    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: {torch})\n"
    function = f"{MADE}\n\ndef torch_scheduler(optimizer):\n{scheduler}"
    return in_torch(MADE, function), in_jax(JAX_ADAM, f"optax.adam({jax})")


OPTIMIZER = f"jax_optimizer = {JAX_ADAM}\n"
JNP = WITH_JAX, WITH_JNP
TOTAL = in_port("def batch(step, rank):\n", "total_steps = 40\n\n\ndef batch(step, rank):\n")

THREADS: dict[str, Thread] = {
    "warm_up_twice": Thread(
        ("huggingface/transformers#218",),
        "BERT reaches 77 % on MRPC instead of 84 %.",
        "Warm-up is applied twice, and the number of steps ignores accumulation.",
        "classifier",
        (in_jax(WARM_JAX, f"{WARM_JAX} ** 2"),),
        ("schedule",),
        (*of_factor(WARM_TORCH, f"lambda step: {WARM_JAX}"), *JNP),
        note="the first of both causes; the second is that of `scheduler_too_fast`",
        steps=6,
    ),
    "cosine_too_short": Thread(
        ("marin-community/levanter#124",),
        "Cosine decay is too short in a trainer in JAX.",
        "The steps of the warm-up are subtracted from the decay twice.",
        "classifier",
        (in_jax("(LR, 35)", "(LR, 35 - 5)"),),
        (),
        (
            *of_factor(
                f"(step + 1) / 5 if step < 5 else {COSINE.format(' - 5', length=35)}",
                f"optax.join_schedules([lambda step: LR * (step + 1) / 5, {COSINE_JAX}], [5])",
            ),
            TOTAL,
            WITH_MATH,
        ),
        answer="rates",
        words=("the learning rate differs first at step", "in jax"),
    ),
    "schedule_of_the_steps_run": Thread(
        ("AI-Hypercomputer/maxtext#4029",),
        "A recipe's trajectory is not reproduced with another number of batches.",
        "The schedule's length that is configured is ignored; it has the number of steps that are run.",
        "classifier",
        (in_jax("(LR, 40)", "(LR, 8)"),),
        ("schedule",),
        (*of_factor(COSINE.format("", length=40), "optax.cosine_decay_schedule(LR, 40)"), WITH_MATH),
        steps=8,
    ),
    "clipped_before_accumulation": Thread(
        ("jenkspt/gpt-jax#2",),
        "The update of accumulated gradients in a nanoGPT in JAX is not torch's.",
        "`apply_every` follows the clipping; torch clips the accumulated gradient.",
        "language",
        (in_jax(STEP, EACH_CLIPPED),),
        setting=(
            in_port('loss_normalization = "global"', 'loss_normalization = "ddp"\nclip_grad_norm = 0.05'),
            in_jax(UPDATE, f"{UPDATE}{CLIPPED_TREE}{own_step(STEP).removeprefix(UPDATE).lstrip()}"),
        ),
    ),
    "norm_without_root": Thread(
        ("mlcommons/algorithmic-efficiency#193",),
        "ViT workloads clip gradients otherwise in JAX and torch.",
        "There is no clipping in torch, and the norm of JAX's seems to lack the square root.",
        "classifier",
        (in_jax(f"\n\n{OPTIMIZER}", SQUARED),),
        setting=JNP,
    ),
    "norm_of_each_tensor": Thread(
        ("huggingface/transformers#581", "huggingface/transformers#614"),
        "BERT in torch clips gradients unlike the original in TensorFlow.",
        "A norm for each group of parameters, in place of that of all.",
        "classifier",
        (in_jax("optax.stateless(torchs_clipping)", PER_TENSOR),),
        (),
        (
            in_torch("LR = 1e-3\n", "LR = 1e-3\ntorch_clip_grad_norm = 0.05\n"),
            in_jax(f"\n\n{OPTIMIZER}", clipped_as_in_torch("0.05", JAX_ADAM)),
            *JNP,
        ),
        note="JAX's half has the norms of single tensors",
    ),
    "clipping_in_each_branch": Thread(
        ("marin-community/marin#6160",),
        "Global clipping of a mixture of experts in JAX is not global.",
        "Clipping is a member of each branch of `multi_transform`.",
        "classifier",
        (in_jax(CHAIN, BRANCHES),),
        setting=(
            in_torch("LR = 1e-3\n", "LR = 1e-3\ntorch_clip_grad_norm = 5.0\n"),
            in_jax(OPTIMIZER, f"jax_optimizer = {CHAIN}\n"),
        ),
        note="no gradient of the run is clipped",
        answer="beyond",
        words=("gradients 1000 times as large", "clip"),
    ),
    "eight_cores": Thread(
        ("google/uncertainty-baselines#201", "google/uncertainty-baselines#91"),
        "The published accuracy on CIFAR is missed on a single GPU.",
        "The flags assume eight cores, and so the global batch.",
        "classifier",
        (in_jax('jax.lax.pmean(local, "replica")', 'jax.lax.psum(jax.tree.map(lambda g: g / 2, local), "replica")'),),
        setting=(
            in_jax("import optax\n", "import dataclasses\n\nimport jax\nimport optax\n"),
            in_jax(OPTIMIZER, f"{OPTIMIZER}{BY_HAND}"),
        ),
        note="the number of the run's replicas is written into the step; the cause is a guess of a maintainer's",
        answer="beyond",
        words=("with 3 replicas", "2 counts the replicas of this run"),
    ),
}
