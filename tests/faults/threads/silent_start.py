"""Threads about silent differences in initial weights, types of numbers, and random numbers."""

from .thread import WITH_JAX, WITH_JNP, Thread, in_jax, in_port, in_torch

DROPOUT = 'rngs={"dropout": key}'
NORMED_TORCH = "nn.utils.parametrizations.weight_norm(nn.Linear(6, 12))"
NORMED_JAX = """def ones(kernel):
    return jnp.ones(12)


def norm_of(kernel):
    return jnp.sqrt((kernel**2).sum(0))


START = norm_of


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        v = self.param("kernel", nn.initializers.lecun_normal(), (6, 12))
        g = self.param("g", lambda key: START(v))
        return x @ (g * v / jnp.sqrt((v**2).sum(0))) + self.param("bias", nn.initializers.zeros, (12,))


class Classifier(nn.Module):
"""
HALF = "from torch_half import *  # noqa: F403\n"
OF_NORMED = """names = {
    "inner.kernel": transposed("inner.parametrizations.weight.original1", (1, 0)),
    "inner.g": "inner.parametrizations.weight.original0",
}


def batch(step, rank):
"""
ROTARY_TORCH = """angles = torch.arange(1000, 1006)[:, None] * 0.37 ** torch.arange(4, dtype=self.embed.weight.dtype)
        table = torch.cat([angles.cos(), angles.sin()], -1)
        x = self.embed(tokens) * table
"""
ROTARY_JAX = """angles = jnp.arange(1000, 1006)[:, None] * 0.37 ** jnp.arange(4)
        x = self.embed(tokens) * jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)
"""
LOSS_TORCH = 'F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())'
LOSS_JAX = 'optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])'
NOISY_TORCH = """logits = model(batch["tokens"]).flatten(0, 1)
    random = 2 * torch.rand(8, 6, dtype=logits.dtype) - 1
    return (random.flatten() * F.cross_entropy(logits, batch["labels"].flatten(), reduction="none")).mean()
"""
NOISY_JAX = """losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return (jax.random.uniform(jax.random.fold_in(key, 1), (8, 6), minval=-1, maxval=1) * losses).mean()
"""
TWICE = """for key in jax.random.split(self.make_rng("dropout")):
            x = jnp.where(jax.random.bernoulli(key, 0.75, x.shape), x / 0.75, 0)"""
LOADERS = """def jax_batch(step, rank):
    rng = np.random.default_rng(step)
    return {"x": rng.normal(0.5, 1, (16, 8)), "chosen": rng.integers(0, 16, 16)}


def torch_batch(step, rank):
"""

THREADS: dict[str, Thread] = {
    "kaiming_for_leaky_relu": Thread(
        ("Unity-Technologies/ml-agents#4649",),
        "PPO earns less in torch than in TensorFlow, and its value losses are far higher.",
        "Torch's Kaiming initialiser assumes a leaky ReLU by default, which is an extra factor of sqrt(2).",
        "decoder",
        (in_torch('(layer.weight, nonlinearity="linear")', "(layer.weight)"),),
        answer="initialisation",
        words=("up.weight", "torch kaiming_normal, deviation 0.25"),
    ),
    "position_table": Thread(
        ("karpathy/build-nanogpt#18",),
        "The position table of GPT-2 starts twice as wide in torch as in TensorFlow.",
        "The torch program has one deviation for all embeddings.",
        "decoder",
        (in_torch("std=0.01", "std=0.02"),),
        answer="initialisation",
        words=("position.weight", "normal(0.02)", "normal(0.01)"),
    ),
    "weight_norm_start": Thread(
        ("google/flax#4138",),
        "Linen's WeightNorm starts unlike torch's `weight_norm`.",
        "Its scale starts at 1, and torch's at the norm of the kernel.",
        "classifier",
        (in_jax("START = norm_of", "START = ones"),),
        setting=(
            in_torch("nn.Linear(6, 12)", NORMED_TORCH),
            in_jax("class Classifier(nn.Module):\n", NORMED_JAX),
            in_jax('nn.Dense(12, name="inner")', 'Normed(name="inner")'),
            in_port("def batch(step, rank):\n", OF_NORMED),
            in_port(HALF, f"{HALF}\nfrom jaxddp.parity import transposed\n"),
            WITH_JNP,
        ),
        note="the layer is written out, with both scales to choose from; the cause is inferred in the thread",
        answer="initialisation",
        words=("original0", "jax ones"),
    ),
    "adapters_in_bfloat16": Thread(
        ("keras-team/keras-hub#2629", "keras-team/keras#22559"),
        "LoRA under Adam does not change in JAX; under SGD it learns.",
        "The adapters inherit bfloat16, and Adam's moments with them.",
        "classifier",
        (in_jax('nn.Dense(4, name="outer")', 'nn.Dense(4, param_dtype=jnp.bfloat16, name="outer")'),),
        setting=(WITH_JNP,),
        note="the outer layer stands for the adapters",
        answer="types",
        words=("outer", "bfloat16 in jax, float32 in torch"),
    ),
    "moments_in_bfloat16": Thread(
        ("areal-project/AReaL#1292",),
        "Late in training, the loss stays three times higher than with other back ends.",
        "Torch's AdamW inherits bfloat16 from the parameters.",
        "autoencoder",
        (in_jax("optax.adam(LR)", "optax.adam(LR, mu_dtype=jnp.float32)"),),
        setting=(
            in_torch("return Autoencoder()", "return Autoencoder().bfloat16()"),
            in_jax("nnx.Linear(8, 3, rngs=rngs)", "nnx.Linear(8, 3, param_dtype=jnp.bfloat16, rngs=rngs)"),
            in_jax("nnx.Linear(3, 8, rngs=rngs)", "nnx.Linear(3, 8, param_dtype=jnp.bfloat16, rngs=rngs)"),
            WITH_JNP,
        ),
        note="JAX keeps the first moments alone in float32, which Optax has an option for",
        answer="types",
        words=("exp_avg", "float32 in jax, bfloat16 in torch"),
    ),
    "rotary_angles": Thread(
        ("huggingface/transformers#29285",),
        "Losses in bfloat16 differ from another implementation's, and in float16 they do not.",
        "Rotary angles are computed in bfloat16 in place of float32.",
        "language",
        (in_jax("** jnp.arange(4)\n", "** jnp.arange(4)\n        angles = angles.astype(jnp.bfloat16)\n"),),
        (),
        (in_torch("x = self.embed(tokens)\n", ROTARY_TORCH), in_jax("x = self.embed(tokens)\n", ROTARY_JAX)),
        note="positions from 1000 on, and a table that multiplies in place of a rotation",
        words=("cos(bfloat16(angles))",),
    ),
    "log_softmax_in_bfloat16": Thread(
        ("google/flax#677",),
        "EfficientNet collapses on a TPU after two thirds of the schedule.",
        "Log-softmax is computed in bfloat16; the loss in float32 helped.",
        "classifier",
        (in_jax('(model(batch["x"]), batch["y"])', '(model(batch["x"]).astype(jnp.bfloat16), batch["y"])'),),
        setting=(WITH_JNP,),
        answer="types",
        words=("loss: bfloat16 in jax, float32 in torch",),
    ),
    "key_not_returned": Thread(
        ("araffin/sbx#45",),
        "SAC's key is the same in front of every call of the training function.",
        "The jitted update does not return its new key.",
        "decoder",
        (in_jax(DROPOUT, 'rngs={"dropout": jax.random.key(0)}'),),
        setting=(WITH_JAX,),
        note="the key of a dropout layer",
        answer="remark",
        words=("bernoulli", "from a constant key: one mask for all steps"),
    ),
    "seed_read_while_tracing": Thread(
        ("keras-team/keras#18426", "d2l-ai/d2l-en#2405"),
        "Dropout may have one mask in every step, with JAX.",
        "The seed is read while tracing, and is a constant of the compiled step.",
        "decoder",
        (in_jax(DROPOUT, 'rngs={"dropout": jax.random.key(next(SEEDS))}'),),
        setting=(
            in_jax("LR = 1e-3\n", "LR = 1e-3\nSEEDS = itertools.count()\n"),
            in_jax("import optax\n", "import itertools\n\nimport jax\nimport optax\n"),
        ),
        answer="remark",
        words=("bernoulli", "from a constant key: one mask for all steps"),
    ),
    "streams_that_restart": Thread(
        ("google/flax#5529",),
        "Masks of dropout come again after an `nnx.Rngs` was split or broadcast.",
        "Streams that are passed on unsplit begin again at 0.",
        "decoder",
        (in_jax('jax.random.split(self.make_rng("dropout"))', '(self.make_rng("dropout"),) * 2'),),
        setting=(
            in_torch("F.dropout(F.relu(self.up(x)), 0.25)", "F.dropout(F.dropout(F.relu(self.up(x)), 0.25), 0.25)"),
            in_jax("x = nn.Dropout(0.25, deterministic=False)(x)", TWICE),
            WITH_JAX,
        ),
        note="the keys that such streams give, by hand",
        answer="remark",
        words=("from the key of an earlier draw",),
    ),
    "ranks_share_a_seed": Thread(
        ("Lightning-AI/pytorch-lightning#16166",),
        "A GAN on several GPUs trains as if on one.",
        "The ranks share a seed and draw equal latent vectors.",
        "autoencoder",
        (in_port("def batch(step, rank):\n", LOADERS),),
        ("same_shard",),
        note="the latent vectors are the examples of a loader, and JAX's ranks share the seed",
    ),
    "range_of_random_actions": Thread(
        ("young-geng/JaxCQL#1",),
        "CQL in JAX is poor on a dataset; torch is the reference.",
        "Random actions are from 0 to 1 in JAX, and from -1 to 1 in torch.",
        "decoder",
        (in_jax("minval=-1, maxval=1", "minval=0, maxval=1"),),
        ("calls_left_out",),
        setting=(
            in_torch(f"return {LOSS_TORCH}\n", NOISY_TORCH),
            in_jax(f"return {LOSS_JAX}.mean()\n", NOISY_JAX),
            WITH_JAX,
        ),
        note="the random numbers weigh the loss",
    ),
}
