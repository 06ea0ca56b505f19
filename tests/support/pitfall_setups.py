"""Programs around the snippets of docs/pitfalls.py: the arrays and layers that a snippet takes, and its result."""

import re
import textwrap
from typing import NamedTuple

CODE = "CODE"  # the line that a snippet replaces
TO_NCHW = "result = result.transpose(0, 3, 1, 2)"


class Setup(NamedTuple):
    """The program around a snippet.

    Attributes:
        arrays: code that makes NumPy arrays by `np` and `normal`; each framework gets them as its own arrays.
        torch: PyTorch code with the line `CODE`; it leaves numbers in `result`.
        jax: JAX code with that line.
        ranks: processes that run the PyTorch code, each with its `rank`; their results are stacked.
    """

    arrays: str = ""
    torch: str = CODE
    jax: str = CODE
    ranks: int = 1


def program(template: str, snippet: str) -> str:
    """Return the code of a setup with a snippet in place of the line `CODE`, indented like it.

    >>> print(program("for x in range(2):\\n    CODE", "a = x\\nb = a"))
    for x in range(2):
        a = x
        b = a
    """
    line = re.compile(rf"^( *){CODE}$", re.MULTILINE)
    return line.sub(lambda found: textwrap.indent(snippet, found[1]), textwrap.dedent(template))


def nhwc(code: str = CODE, after: str = TO_NCHW) -> str:
    """Return JAX code whose x has the features last; `after` returns the result to torch's order."""
    return f"x = x.transpose(0, 2, 3, 1)\n{textwrap.dedent(code).strip()}\n{after}"


def updates(
    step: str = "optimizer.step()",
    optimizer: str = CODE,
    biases: str = "normal(size=(8, 2))",
    update: str = "optimizer.update",
) -> Setup:
    """Return a setup that takes eight steps of `optimizer`, and measures the change of the parameters.

    Args:
        step: PyTorch code of step `count`, given the gradients.
        optimizer: PyTorch code that makes the optimizer.
        biases: code that makes the gradients of the bias.
        update: JAX function that makes the updates.
    """
    return Setup(
        f"start, kernels, biases = normal(size=8), normal(size=(8, 3, 2)), {biases}",
        "kernel, bias = params = [torch.nn.Parameter(part.clone()) for part in (start[:6].view(3, 2), start[6:])]\n"
        f"{optimizer}\n"
        "for count in range(8):\n"
        "    for p, gradients in zip(params, (kernels, biases)):\n"
        "        p.grad = gradients[count].clone()\n"
        f"{textwrap.indent(textwrap.dedent(step), '    ')}\n"
        "result = torch.cat([kernel.flatten(), bias]) - start",
        f"""
        params = {{"kernel": start[:6].reshape(3, 2), "bias": start[6:]}}
        CODE
        state = optimizer.init(params)
        for count in range(8):
            gradients = {{"kernel": kernels[count], "bias": biases[count]}}
            updates, state = {update}(gradients, state, params)
            params = optax.apply_updates(params, updates)
        result = jnp.concatenate([params["kernel"].ravel(), params["bias"]]) - start
        """,
    )


def rates(steps_per_epoch: int = 1, scheduler: str = CODE) -> Setup:
    """Return a setup that measures the learning rates of `scheduler`, which steps once per epoch, and `schedule`."""
    return Setup(
        "",
        "optimizer, result = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), []\n"
        f"{scheduler}\n"
        "for step in range(12):\n"
        '    result.append(optimizer.param_groups[0]["lr"])\n'
        "    optimizer.step()\n"
        f"    if (step + 1) % {steps_per_epoch} == 0:\n"
        "        scheduler.step()",
        f"steps_per_epoch = {steps_per_epoch}\nCODE\nresult = [float(schedule(step)) for step in range(12)]",
    )


def statistics(name: str) -> Setup:
    """Return a setup that measures a running statistic of BatchNorm after ten batches."""
    loop = "CODE\nfor batch in x:\n    layer(batch)\nresult = layer."
    return Setup("x = normal(size=(10, 8, 6)) + 1", f"{loop}running_{name}", f"{loop}{name}[...]")


def gradient_at(x: str) -> Setup:
    """Return a setup that measures the gradient of the sum of `y` at x."""
    return Setup(
        f"x = np.array({x})",
        "x.requires_grad_()\nCODE\ny.sum().backward()\nresult = x.grad",
        "def total(x):\n    CODE\n    return y.sum()\nresult = jax.grad(total)(x)",
    )


def distinct(torch: str, jax: str, before_torch: str = "", before_jax: str = "key = jax.random.key(0)") -> Setup:
    """Return a setup that counts how many of four steps have other numbers.

    Args:
        torch, jax: code of a step, which leaves numbers in `drawn`.
    """
    loop = (
        "{}\ndrawings = set()\n"
        "for step in range(4):\n{}\n    drawings.add(tuple(np.asarray(drawn).tolist()))\n"
        "result = len(drawings)"
    )
    torch, jax = (textwrap.indent(code, "    ") for code in (torch, jax))
    return Setup("", loop.format(before_torch, torch), loop.format(before_jax, jax))


def shares(examples: int) -> Setup:
    """Return a setup that measures the indices of two ranks' examples."""
    loop = "result = []\nfor rank in range(2):\n    CODE\n    result.append(list(map(int, indices)))"
    return Setup("", f"dataset = range({examples})\n{loop}", f"order = np.arange({examples})\n{loop}")


MESH = """
P, mesh = jax.sharding.PartitionSpec, jax.sharding.Mesh(jax.devices()[:2], ("replicas",))
specs = P(), P("replicas"), P("replicas")
x, y = x.reshape(6, 4), y.reshape(6)
loss_fn = lambda params, x, y: ((x @ params - y) ** 2).mean()
clip = lambda gradients: jaxddp.optim.clip_by_global_norm(gradients, 0.1)[0]
"""
TORCH_MODEL = """
model = torch.nn.Linear(4, 1, bias=False)
model.weight.data = params[None].clone()
loss_fn = lambda output, y: ((output[:, 0] - y) ** 2).mean()
"""
DDP = f"""
x, y = x[rank], y[rank]
{TORCH_MODEL}
ddp = torch.nn.parallel.DistributedDataParallel(model)
"""
REPLICAS = "x, y, params = normal(size=(2, 3, 4)), normal(size=(2, 3)), normal(size=4)\n"


def on_replicas(torch: str, jax: str) -> Setup:
    """Return a setup of two replicas, each with its part of x and y: DDP's ranks, and the body of a `shard_map`."""
    return Setup(
        REPLICAS,
        DDP + torch,
        f"{MESH}def on_replica(params, x, y):\n"
        f"{textwrap.indent(jax, '    ')}\n"
        "    return jnp.asarray(result)[None]\n"
        'mapped = jax.shard_map(on_replica, mesh=mesh, in_specs=specs, out_specs=P("replicas"), check_vma=False)\n'
        "result = jax.jit(mapped)(params, x, y)",
        ranks=2,
    )


LAYERS = {
    "vectors": Setup("x = normal(size=(4, 6))"),
    "cubes": Setup("x = normal(size=(2, 3, 4))"),
    "images": Setup("x = normal(size=(2, 3, 4, 4))", CODE, nhwc(after="")),
    "pixels": Setup("x = normal(size=(2, 3, 4, 4))", CODE, nhwc()),
    "float32": Setup("x = np.float32(normal(size=(4, 64)) + 300)", "module = torch.nn.LayerNorm(64).float()\nCODE"),
    "running mean": statistics("mean"),
    "running variance": statistics("var"),
    "convolution": Setup(
        "x, weight = normal(size=(2, 3, 6, 6)), normal(size=(4, 3, 3, 3))",
        """
        CODE
        layer.weight.data, layer.bias.data = weight, torch.zeros(4)
        result = layer(x)
        """,
        nhwc("""
        rngs = nnx.Rngs(0)
        CODE
        layer.kernel = nnx.Param(weight.transpose(2, 3, 1, 0))
        result = layer(x)
        """),
    ),
    "kernel": Setup(
        "x, weight = normal(size=(2, 3, 6, 6)), normal(size=(4, 3, 3, 3))",
        CODE,
        nhwc("""
        CODE
        layer = nnx.Conv(3, 4, (3, 3), padding="VALID", use_bias=False, rngs=nnx.Rngs(0))
        layer.kernel = nnx.Param(kernel)
        result = layer(x)
        """),
    ),
    "transposed convolution": Setup(
        "x, weight = normal(size=(2, 3, 4, 4)), normal(size=(3, 5, 3, 3))",
        "CODE\nlayer.weight.data, layer.bias.data = weight, torch.zeros(5)\nresult = layer(x)",
        nhwc("""
        rngs = nnx.Rngs(0)
        CODE
        kernel = weight.transpose(2, 3, 0, 1)  # height, width, in, out
        layer.kernel = nnx.Param(kernel if kernel.shape == layer.kernel.shape else kernel.swapaxes(2, 3))
        result = layer(x)
        """),
    ),
    "initial weights": Setup(
        "",
        "CODE\nresult = weight.std()",
        "rngs, key = nnx.Rngs(0), jax.random.key(0)\nCODE\nresult = jnp.std(weight[...])",
    ),
    "dropout": Setup(
        "x = np.ones(100_000)",
        "CODE\nresult = (y != 0).double().mean()",
        "key = jax.random.key(0)\nCODE\nresult = (y != 0).mean()",
    ),
    "embedding": Setup(
        "ids, table, gain = np.array([[0, 2, 1], [3, 0, 0]]), normal(size=(4, 5)), normal(size=(2, 3, 5))",
        """
        table.requires_grad_()
        CODE
        (rows * gain).sum().backward()
        result = table.grad
        """,
        """
        def total(table):
            CODE
            return (rows * gain).sum()
        result = jax.grad(total)(table)
        """,
    ),
    "gru": Setup(
        "x, h, w, u, b, c = (normal(size=size) for size in ((2, 4), (2, 5), (15, 4), (15, 5), 15, 15))",
        """
        gru = torch.nn.GRUCell(4, 5)
        for p, value in zip(gru.parameters(), (w, u, b, c)):
            p.data = value
        CODE
        """,
        """
        w_r, w_z, w_n, u_r, u_z, u_n = (part for a in (w, u) for part in jnp.split(a.T, 3, axis=1))
        b_r, b_z, b_n, c_r, c_z, c_n = (part for a in (b, c) for part in jnp.split(a, 3))
        r = jax.nn.sigmoid(x @ w_r + b_r + h @ u_r + c_r)
        z = jax.nn.sigmoid(x @ w_z + b_z + h @ u_z + c_z)
        CODE
        result = (1 - z) * n + z * h
        """,
    ),
    "lstm": Setup(
        "x, h, c, w, u, b = (normal(size=size) for size in ((2, 4), (2, 5), (2, 5), (20, 4), (20, 5), 20))",
        """
        lstm = torch.nn.LSTMCell(4, 5)
        for p, value in zip(lstm.parameters(), (w, u, b, torch.zeros(20))):
            p.data = value
        CODE
        """,
        """
        gates = x @ w.T + h @ u.T + b
        CODE
        result = jax.nn.sigmoid(o) * jnp.tanh(jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g))
        """,
    ),
    "heads": Setup("q, k, v = normal(size=(3, 2, 3, 5, 4))"),
    "padded tokens": Setup(
        "x, padding = normal(size=(2, 5, 4)), np.arange(5) >= np.array([[3], [4]])",
        """
        attention = torch.nn.MultiheadAttention(4, 1, bias=False, batch_first=True)
        attention.in_proj_weight.data, attention.out_proj.weight.data = torch.eye(4).repeat(3, 1), torch.eye(4)
        CODE
        """,
        "q = k = v = x[:, :, None]\nCODE\nresult = result[:, :, 0]",
    ),
    "repeated ids": Setup("x, ids = normal(size=5), np.array([1, 3, 3])", "CODE\nresult = x", "CODE\nresult = x"),
    "zeros": gradient_at("[-1.0, 0.0, 2.0]"),
    "zero row": gradient_at("[[3.0, 4.0], [0.0, 0.0]]"),
}

CROSS_ENTROPY = "losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)\n"
LOSSES = {
    "smoothed labels": Setup(
        "logits, labels = normal(size=(4, 5)), np.array([1, 4, 0, 2])",
        CODE,
        "CODE\nresult = optax.softmax_cross_entropy(logits, targets).mean()",
    ),
    "ignored labels": Setup(
        "logits, labels = normal(size=(4, 5)), np.array([1, -100, -100, 2])", CODE, f"{CROSS_ENTROPY}CODE"
    ),
    "class weights": Setup(
        "logits, labels, weights = normal(size=(4, 5)), np.array([1, 4, 0, 2]), np.arange(1.0, 6)",
        CODE,
        f"{CROSS_ENTROPY}CODE",
    ),
    "pixel labels": Setup(
        "logits, labels = normal(size=(2, 5, 3)), np.array([[1, 4, 0], [2, 2, 3]])",
        CODE,
        "CODE\nresult = optax.softmax_cross_entropy_with_integer_labels(rows, labels.ravel()).mean()",
    ),
    "predictions": Setup("x, y = normal(size=(2, 4, 3))"),
    "probabilities": Setup("p, y = np.array([0.0, 0.3, 1.0, 0.0]), np.array([0.0, 1.0, 1.0, 1.0])"),
}

OPTIMIZERS = {
    "updates": updates(),
    "unused bias": updates("bias.grad = None\noptimizer.step()", biases="np.zeros((8, 2))"),
    "updates in the loop": updates("CODE\noptimizer.step()", "optimizer = torch.optim.Adam(params, lr=0.01)"),
    "accumulated updates": updates(
        """
        if count % 4 == 3:
            for p, gradients in zip(params, (kernels, biases)):
                p.grad = gradients[count - 3 : count + 1].mean(0)
            optimizer.step()
        """,
        update="jax.jit(optimizer.update)",  # its `lax.cond` would be compiled in every step
    ),
    "clipped gradients": Setup(
        "gradients = normal(size=8)",
        "params = [torch.nn.Parameter(torch.zeros(8))]\nparams[0].grad = gradients\nCODE\nresult = params[0].grad",
        "CODE\nresult, _ = clip.update(gradients, clip.init(gradients))",
    ),
    "rates": rates(),
    "rates by epoch": rates(3),
    "rates after warm-up": rates(
        scheduler="warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3)\n"
        "CODE\n"
        "scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, after_warmup], [3])"
    ),
    "average": Setup("params, averaged = normal(size=(2, 6))", "CODE\nresult = averaged", "CODE\nresult = averaged"),
}

REPLICAS_AND_DATA = {
    "replicas": on_replicas("CODE\nresult = model.weight.grad[0]", "CODE\nresult = gradients"),
    "mapped": Setup(
        REPLICAS,
        f"{DDP}CODE\nresult = model.weight.grad[0]",
        f"{MESH}averaged_gradients = lambda params, x, y: jax.lax.pmean(jax.grad(loss_fn)(params, x, y), 'replicas')\n"
        "CODE\nresult = jnp.stack([jax.jit(mapped)(params, x, y)] * 2)",
        ranks=2,
    ),
    "unequal ranks": Setup(
        f"{REPLICAS}mask = np.array([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])",
        f"{DDP}losses, mask = (ddp(x)[:, 0] - y) ** 2, mask[rank]\n"
        "CODE\nloss.backward()\nresult = model.weight.grad[0]",
        """
        def loss_fn(params):
            losses = (x @ params - y) ** 2
            CODE
            return loss
        result = jnp.stack([jax.grad(loss_fn)(params)] * 2)
        """,
        ranks=2,
    ),
    "micro-batches of tokens": Setup(
        "logits, labels = normal(size=(3, 4, 5)), np.array([[1, 2, 3, 4], [1, 0, -100, -100], [2, -100, -100, -100]])",
        "CODE\nresult = loss",
        """
        counted = labels != -100
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counted, labels, 0)) * counted
        CODE
        result = loss
        """,
    ),
    "micro-batches": Setup(
        "xs, ys, params = normal(size=(4, 3, 4)), normal(size=(4, 3)), normal(size=4)",
        f"{TORCH_MODEL}for x, y in zip(xs, ys):\n    CODE\nresult = model.weight.grad[0]",
        """
        loss_fn = lambda params, x, y: ((x @ params - y) ** 2).mean()
        gradients = jnp.zeros(4)
        for x, y in zip(xs, ys):
            CODE
        result = gradients
        """,
    ),
    "clipped replicas": on_replicas(
        "loss_fn(ddp(x), y).backward()\nCODE\nresult = model.weight.grad[0]", "CODE\nresult = gradients"
    ),
    "normalised replicas": on_replicas("CODE\nresult = layer(x)", "CODE\nresult = layer(x)"),
    "masks of replicas": on_replicas(
        "seed = 0\nCODE\n"
        "masks = [torch.zeros(16), torch.zeros(16)]\n"
        "torch.distributed.all_gather(masks, F.dropout(torch.ones(16)))\n"
        "result = len({tuple(mask.tolist()) for mask in masks})",
        "seed = 0\nCODE\n"
        'masks = jax.lax.all_gather(jax.random.bernoulli(key, 0.5, (16,)), "replicas")\n'
        "result = 1 + (masks[0] != masks[1]).any()",
    ),
    "masks of steps": distinct("CODE\ndrawn = mask", "CODE\ndrawn = mask"),
    "noise of steps": distinct("drawn = noisy(0.0)", "drawn = noisy(0.0, jax.random.key(step))", CODE, CODE),
    "orders of epochs": distinct(
        "epoch = step\nCODE\ndrawn = list(sampler)",
        "epoch = step\nCODE\ndrawn = order",
        "sampler = torch.utils.data.DistributedSampler(range(99), num_replicas=2, rank=0)",
    ),
    "even examples": shares(8),
    "odd examples": shares(7),
    "evaluation": Setup(
        "dataset = np.arange(10.0)", "CODE\nresult = sum(map(len, batches))", "CODE\nresult = sum(map(len, batches))"
    ),
}

SETUPS = LAYERS | LOSSES | OPTIMIZERS | REPLICAS_AND_DATA
