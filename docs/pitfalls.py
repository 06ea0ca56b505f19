"""Write docs/pitfalls.md, the page of differences between PyTorch and JAX by symptom: `python docs/pitfalls.py`.

tests/unit/test_pitfalls.py executes the code of every pitfall, within the programs of tests/support/pitfall_setups.py,
and compares the page with what this file writes.
"""

import math
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from jaxddp.files import write_atomically
from jaxddp.parity.catalogue import FAULTS

PAGE = Path(__file__).with_suffix(".md")
WIDTH = 120  # of the page
TORCH_IMPORTS = "import torch, torch.nn.functional as F"
JAX_IMPORTS = "import jax, jax.numpy as jnp, jaxddp, numpy as np, optax\nfrom flax import nnx"


class Pitfall(NamedTuple):
    """A difference between PyTorch and JAX.

    Attributes:
        title: heading in plain words.
        symptom: what people see, in the words by which they search.
        setup: name of the program around the code.
        torch: PyTorch code.
        obvious: JAX code that most people write first.
        right: JAX code with PyTorch's numbers.
        off: measured difference of the obvious code, relative to the largest number of PyTorch's result.
        why: a sentence on the cause.
        fault: name in the catalogue; "": the pitfall is not in it.
        issue: a public report; "": that of the catalogue, if it has one.
        within: largest difference of the right code; 0: that of float64 rounding.
    """

    title: str
    symptom: str
    setup: str
    torch: str
    obvious: str
    right: str
    off: float
    why: str
    fault: str = ""
    issue: str = ""
    within: float = 0.0


LAYERS = (
    Pitfall(
        "GELU: tanh in JAX, erf in PyTorch",
        "Validation loss slightly higher than PyTorch's, with the same weights",
        "vectors",
        "result = F.gelu(x)",
        "result = jax.nn.gelu(x)",
        "result = jax.nn.gelu(x, approximate=False)",
        3e-4,
        'JAX and Flax approximate GELU by tanh, unless `approximate=False`. For `F.gelu(x, approximate="tanh")` the '
        "default is right.",
        "gelu_approximation",
    ),
    Pitfall(
        "LayerNorm: epsilon 1e-5 in PyTorch, 1e-6 in Flax",
        "Outputs after LayerNorm differ in the fifth or sixth digit",
        "vectors",
        "result = torch.nn.LayerNorm(6)(x)",
        "result = nnx.LayerNorm(6, rngs=nnx.Rngs(0))(x)",
        "result = nnx.LayerNorm(6, epsilon=1e-5, rngs=nnx.Rngs(0))(x)",
        3e-5,
        "GroupNorm has the same two defaults. In Linen the first argument of `LayerNorm` is the epsilon: "
        "`linen.LayerNorm(12)` adds 12 to the variance.",
        "norm_epsilon",
        "google/flax#2195",
    ),
    Pitfall(
        "LayerNorm: fast variance loses digits",
        "LayerNorm in float32 is inaccurate for inputs with a large mean",
        "float32",
        "result = module(x)",
        "result = nnx.LayerNorm(64, epsilon=1e-5, rngs=nnx.Rngs(0))(x)",
        "result = nnx.LayerNorm(64, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0))(x)",
        7e-3,
        "Flax computes the variance as E[x²] - E[x]², whose terms cancel in float32. BatchNorm and GroupNorm have the "
        "same option.",
        "fast_variance",
        within=1e-4,
    ),
    Pitfall(
        "BatchNorm: momentum 0.1 in PyTorch is 0.9 in Flax",
        "BatchNorm statistics never converge, or are too noisy",
        "running mean",
        "layer = torch.nn.BatchNorm1d(6, momentum=0.1)",
        "layer = nnx.BatchNorm(6, momentum=0.1, rngs=nnx.Rngs(0))",
        "layer = nnx.BatchNorm(6, momentum=0.9, rngs=nnx.Rngs(0))",
        0.9,
        "Torch's momentum is the weight of the new batch, Flax's that of the old statistics. Flax's default is 0.99.",
        "batch_norm_momentum",
        "pytorch/vision#8250",
        within=1e-6,
    ),
    Pitfall(
        "BatchNorm: biased running variance",
        "running_var is smaller than in PyTorch; evaluation differs with small batches",
        "running variance",
        "layer = torch.nn.BatchNorm1d(6)",
        "layer = nnx.BatchNorm(6, momentum=0.9, rngs=nnx.Rngs(0))",
        "layer = jaxddp.layers.BatchNorm(6)",
        0.09,
        "Both normalise by the biased variance of the batch, but torch's running variance is n / (n - 1) times it.",
        "biased_variance",
    ),
    Pitfall(
        "Convolution: SAME padding at stride 2",
        "Features are shifted; a ResNet with PyTorch's weights predicts another class",
        "convolution",
        "layer = torch.nn.Conv2d(3, 4, 3, stride=2, padding=1)",
        'layer = nnx.Conv(3, 4, (3, 3), strides=2, padding="SAME", rngs=rngs)',
        "layer = nnx.Conv(3, 4, (3, 3), strides=2, padding=((1, 1), (1, 1)), rngs=rngs)",
        2.0,
        '"SAME", which is Flax\'s default, pads images of even size by 0 and 1 here. Torch pads both sides, and its '
        "default is no padding.",
        "same_padding",
    ),
    Pitfall(
        "Pooling: the default stride",
        "Numbers differ after max_pool and global pooling; shapes do not match",
        "images",
        "result = F.max_pool2d(x, 2).mean((2, 3))",
        "result = nnx.max_pool(x, (2, 2)).mean((1, 2))",
        "result = nnx.max_pool(x, (2, 2), strides=(2, 2)).mean((1, 2))",
        0.2,
        "Torch's default is the size of the window, Flax's is 1.",
    ),
    Pitfall(
        "Flatten: NCHW and NHWC",
        "The first Dense layer after flatten gives wrong outputs with PyTorch's weights",
        "images",
        "result = x.flatten(1)",
        "result = x.reshape(len(x), -1)",
        "result = x.transpose(0, 3, 1, 2).reshape(len(x), -1)",
        1.0,
        "Features are torch's first axis after the batch and JAX's last. Both shapes are the same after flattening.",
        "layout",
    ),
    Pitfall(
        "Convolution kernels: OIHW to HWIO",
        "Converted convolution weights give wrong features and no error",
        "kernel",
        "result = F.conv2d(x, weight)",
        "kernel = weight.T",
        "kernel = weight.transpose(2, 3, 1, 0)",
        1.0,
        "`.T` also exchanges height and width. No shape shows it if kernels are square.",
        "layout",
    ),
    Pitfall(
        "ConvTranspose: kernels are flipped",
        "ConvTranspose with PyTorch's weights has other outputs; a decoder does not match",
        "transposed convolution",
        "layer = torch.nn.ConvTranspose2d(3, 5, 3, stride=2)",
        'layer = nnx.ConvTranspose(3, 5, (3, 3), strides=2, padding="VALID", rngs=rngs)',
        'layer = nnx.ConvTranspose(3, 5, (3, 3), strides=2, padding="VALID", transpose_kernel=True, rngs=rngs)',
        1.0,
        "Torch's layer is the gradient of a convolution, which is `transpose_kernel=True` in JAX. For a kernel of size "
        "k, torch's `padding=p` is k - 1 - p on both sides in JAX.",
        issue="jax-ml/jax#11252",
    ),
    Pitfall(
        "Default initialisation of Linear and Conv",
        "Training starts from a higher loss, or needs another learning rate",
        "initial weights",
        "weight = torch.nn.Linear(400, 400).weight",
        "weight = nnx.Linear(400, 400, rngs=rngs).kernel",
        'init = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")\n'
        "weight = nnx.Linear(400, 400, kernel_init=init, rngs=rngs).kernel",
        0.7,
        "Torch draws from ±1/sqrt(fan_in), biases too. Flax draws a truncated normal of deviation 1/sqrt(fan_in), and "
        "its biases are 0. The numbers here are standard deviations.",
        issue="jax-ml/jax#4862",
        within=0.02,
    ),
    Pitfall(
        "Truncated normal: absolute bounds",
        "Initial weights of a ViT have a smaller spread than with trunc_normal_",
        "initial weights",
        "weight = torch.nn.init.trunc_normal_(torch.empty(400, 400), std=0.02)",
        "weight = jax.nn.initializers.truncated_normal(0.02)(key, (400, 400))",
        "weight = jax.nn.initializers.truncated_normal(0.02, lower=-2 / 0.02, upper=2 / 0.02)(key, (400, 400))",
        0.1,
        "`trunc_normal_` cuts at -2 and 2, JAX at 2 standard deviations.",
        issue="google/flax#4091",
        within=0.02,
    ),
    Pitfall(
        "Standard deviation and variance: ddof",
        "Normalised advantages, rewards or inputs are off by a constant factor",
        "vectors",
        "result = x.std(0)",
        "result = jnp.std(x, axis=0)",
        "result = jnp.std(x, axis=0, ddof=1)",
        0.1,
        "`torch.std` and `torch.var` divide by n - 1, NumPy and JAX by n.",
        "std_correction",
    ),
    Pitfall(
        "Dropout: probability to drop, probability to keep",
        "Training with hand-written dropout underfits",
        "dropout",
        "y = F.dropout(x, p=0.1)",
        "y = jnp.where(jax.random.bernoulli(key, 0.1, x.shape), x / 0.9, 0)",
        "y = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)",
        0.9,
        "`nnx.Dropout(rate)` has torch's p, the probability to drop. The p of `bernoulli` is that of True: to keep.",
        "dropout_rate",
        within=0.01,
    ),
    Pitfall(
        "Embedding: padding_idx",
        "The embedding of the padding token changes in training",
        "embedding",
        "rows = F.embedding(ids, table, padding_idx=0)",
        "rows = table[ids]",
        "rows = table.at[0].set(jax.lax.stop_gradient(table[0]))[ids]",
        3.0,
        "Torch's padding row gets no gradient. `torch.nn.Embedding` also starts it at 0.",
        "padding_idx",
    ),
    Pitfall(
        "Softmax without an axis",
        "Probabilities of a port do not sum to one along the same axis",
        "cubes",
        "result = torch.nn.Softmax()(x)",
        "result = jax.nn.softmax(x)",
        "result = jax.nn.softmax(x, axis=0)",
        0.7,
        "Without `dim`, torch warns and takes axis 0 of arrays with one or three axes, and axis 1 otherwise. JAX takes "
        "the last axis.",
    ),
    Pitfall(
        "Interpolation: align_corners",
        "Upsampling differs; a segmentation or depth model is blurred or shifted",
        "pixels",
        'result = F.interpolate(x, size=(8, 8), mode="bilinear", align_corners=True)',
        'result = jax.image.resize(x, (2, 8, 8, 3), "bilinear")',
        "scale = jnp.full(2, (8 - 1) / (4 - 1))\n"
        'result = jax.image.scale_and_translate(x, (2, 8, 8, 3), (1, 2), scale, (1 - scale) / 2, "linear")',
        0.3,
        "`jax.image.resize` is `align_corners=False`.",
        issue="google/flax#2210",
    ),
    Pitfall(
        "Interpolation: antialiasing",
        "Images that are made smaller differ; a metric such as FID or CMMD has other values",
        "pixels",
        'result = F.interpolate(x, size=(2, 2), mode="bilinear")',
        'result = jax.image.resize(x, (2, 2, 2, 3), "bilinear")',
        'result = jax.image.resize(x, (2, 2, 2, 3), "bilinear", antialias=False)',
        0.3,
        "JAX antialiases by default when an image becomes smaller, torch does not.",
        issue="sayakpaul/cmmd-pytorch#4",
    ),
    Pitfall(
        "GRU: the reset gate acts after the product",
        "A GRU with PyTorch's weights diverges after a few time steps",
        "gru",
        "result = gru(x, h)",
        "n = jnp.tanh(x @ w_n + b_n + (r * h) @ u_n + c_n)",
        "n = jnp.tanh(x @ w_n + b_n + r * (h @ u_n + c_n))",
        0.3,
        "Haiku applies it to the state before the product, torch and Flax to the product and its bias. Torch's weights "
        "are in the order r, z, n.",
    ),
    Pitfall(
        "LSTM: the order of the gates",
        "An LSTM with PyTorch's weights gives other states",
        "lstm",
        "result, _ = lstm(x, (h, c))",
        "i, g, f, o = jnp.split(gates, 4, axis=-1)",
        "i, f, g, o = jnp.split(gates, 4, axis=-1)",
        2.0,
        "Torch's weights are in the order input, forget, cell, output. Haiku exchanges the two in the middle, and adds "
        "1 to the forget gate.",
    ),
    Pitfall(
        "Attention: the axis of the heads",
        "scaled_dot_product_attention and jax.nn.dot_product_attention differ",
        "heads",
        "result = F.scaled_dot_product_attention(q, k, v)",
        "result = jax.nn.dot_product_attention(q, k, v)",
        "q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))\n"
        "result = jax.nn.dot_product_attention(q, k, v).swapaxes(1, 2)",
        1.0,
        "Torch's arrays are (batch, heads, length, features), JAX's (batch, length, heads, features). Any shape fits "
        "both.",
        within=1e-6,
    ),
    Pitfall(
        "Attention: what True means in a mask",
        "Attention looks only at the padding, or the mask has no effect",
        "padded tokens",
        "result, _ = attention(x, x, x, key_padding_mask=padding)",
        "result = jax.nn.dot_product_attention(q, k, v, mask=padding[:, None, None])",
        "result = jax.nn.dot_product_attention(q, k, v, mask=~padding[:, None, None])",
        2.0,
        'True means "leave out" in `torch.nn.MultiheadAttention`, and "take part" in JAX, Flax and '
        "`F.scaled_dot_product_attention`. A floating-point mask is added to the scores: in JAX that is `bias`.",
        within=1e-6,
    ),
    Pitfall(
        "ReLU by jnp.maximum: the gradient at 0",
        "Gradients differ where activations are exactly 0",
        "zeros",
        "y = F.relu(x)",
        "y = jnp.maximum(x, 0)",
        "y = jax.nn.relu(x)",
        0.5,
        "`jnp.maximum` gives each of two equal numbers half of the gradient, and so does `jnp.clip` at its bounds. "
        "`torch.clamp` passes all of it there.",
    ),
    Pitfall(
        "Norm: the gradient at a vector of zeros",
        "NaN gradients in JAX only, from the norm of a zero vector",
        "zero row",
        "y = torch.linalg.norm(x, dim=-1)",
        "y = jnp.linalg.norm(x, axis=-1)",
        "y = optax.safe_norm(x, 0.0, axis=-1)",
        math.nan,
        "Torch defines this gradient as 0. In JAX it is 0 / 0, and `jnp.where` after the norm does not help.",
    ),
    Pitfall(
        "In-place updates with repeated indices",
        "Counts or sums by index are too large",
        "repeated ids",
        "x[ids] += 1",
        "x = x.at[ids].add(1)",
        "x = x.at[ids].set(x[ids] + 1)",
        0.9,
        "Torch's `+=` adds once to an index that comes twice. `x.at[ids].add` is `x.index_add_`, which adds twice. The "
        "result must be assigned: JAX's arrays do not change.",
    ),
)

LOSSES = (
    Pitfall(
        "Cross entropy: ignore_index",
        "The loss is lower than PyTorch's when labels are padded with -100",
        "ignored labels",
        "result = F.cross_entropy(logits, labels)",
        "result = jnp.where(labels != -100, losses, 0).mean()",
        "result = jnp.where(labels != -100, losses, 0).sum() / (labels != -100).sum()",
        0.5,
        "Torch's mean is over the labels that count. -100 is the default of its `ignore_index`.",
        "ignore_index",
    ),
    Pitfall(
        "Cross entropy: label smoothing",
        "The loss differs slightly with label smoothing",
        "smoothed labels",
        "result = F.cross_entropy(logits, labels, label_smoothing=0.1)",
        "targets = jnp.where(jax.nn.one_hot(labels, 5) == 1, 0.9, 0.1 / 4)",
        "targets = optax.smooth_labels(jax.nn.one_hot(labels, 5), 0.1)",
        5e-3,
        "Torch spreads the smoothed part over all classes, the right one included. Some programs leave the right one "
        "out.",
        "label_smoothing",
    ),
    Pitfall(
        "Cross entropy: class weights",
        "The weighted loss has another scale than PyTorch's",
        "class weights",
        "result = F.cross_entropy(logits, labels, weight=weights)",
        "result = (weights[labels] * losses).mean()",
        "result = (weights[labels] * losses).sum() / weights[labels].sum()",
        2.0,
        "Torch divides by the sum of the labels' weights, and not by their number.",
    ),
    Pitfall(
        "Cross entropy: the axis of the classes",
        "The segmentation loss hardly falls, and nothing fails",
        "pixel labels",
        "result = F.cross_entropy(logits, labels)",
        "rows = logits.reshape(-1, 5)",
        "rows = jnp.moveaxis(logits, 1, -1).reshape(-1, 5)",
        0.4,
        "Torch's logits are (batch, classes, ...), and a reshape mixes classes with positions.",
        "layout",
    ),
    Pitfall(
        "Mean squared error: optax.l2_loss halves it",
        "The loss is half of PyTorch's",
        "predictions",
        "result = F.mse_loss(x, y)",
        "result = optax.l2_loss(x, y).mean()",
        "result = optax.squared_error(x, y).mean()",
        0.5,
        "`optax.l2_loss` is 0.5 (x - y)².",
        "loss_scale",
    ),
    Pitfall(
        "Binary cross entropy: the logarithm of 0",
        "The loss is NaN or infinite in JAX, and finite with BCELoss",
        "probabilities",
        "result = F.binary_cross_entropy(p, y)",
        "result = -(y * jnp.log(p) + (1 - y) * jnp.log(1 - p)).mean()",
        "log = lambda a: jnp.maximum(jnp.log(a), -100)\nresult = -(y * log(p) + (1 - y) * log(1 - p)).mean()",
        math.nan,
        "Torch does not let a logarithm fall below -100. From logits, `optax.sigmoid_binary_cross_entropy` needs no "
        "bound.",
    ),
)

OPTIMIZERS = (
    Pitfall(
        "AdamW: weight decay is 1e-2 in PyTorch, 1e-4 in Optax",
        "AdamW overfits more than in PyTorch; weights grow larger",
        "updates",
        "optimizer = torch.optim.AdamW(params, lr=0.01)",
        "optimizer = optax.adamw(0.01)",
        "optimizer = optax.adamw(0.01, weight_decay=1e-2)",
        0.02,
        "Both are the defaults of an argument that most programs leave out.",
        "decay_value",
    ),
    Pitfall(
        "Adam with weight decay is not AdamW",
        "A result with torch.optim.Adam(weight_decay=...) is not reproduced",
        "updates",
        "optimizer = torch.optim.Adam(params, lr=0.01, weight_decay=0.1)",
        "optimizer = optax.adamw(0.01, weight_decay=0.1)",
        "optimizer = optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.01))",
        0.05,
        "Torch's Adam adds the decay to the gradient, so its statistics contain it. For weight decay of torch's SGD, "
        "RMSprop and Adagrad, the same transformation comes first.",
        "coupled_decay",
    ),
    Pitfall(
        "Weight decay of biases and norms",
        "Biases and LayerNorm scales shrink in JAX only",
        "updates",
        'optimizer = torch.optim.AdamW([{"params": kernel}, {"params": bias, "weight_decay": 0}], weight_decay=0.1)',
        "optimizer = optax.adamw(1e-3, weight_decay=0.1)",
        "optimizer = optax.adamw(1e-3, weight_decay=0.1, mask=jax.tree.map(lambda p: p.ndim > 1, params))",
        0.2,
        "Torch's parameter groups are a `mask` in Optax. Biases of Flax's attention have two axes: mask them by name.",
        "decay_mask",
    ),
    Pitfall(
        "Frozen and unused parameters still decay",
        "Frozen layers change in JAX; weights without a gradient shrink",
        "unused bias",
        "optimizer = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)",
        "optimizer = optax.adamw(0.01, weight_decay=0.1)",
        'optimizer = optax.masked(optax.adamw(0.01, weight_decay=0.1), {"kernel": True, "bias": False})',
        0.2,
        "Torch skips a parameter whose gradient is None. In JAX its gradient is 0, and decay and momentum continue.",
        "unused_parameters",
    ),
    Pitfall(
        "RMSprop: decay and epsilon",
        "IMPALA or A2C learns differently with RMSprop, and alike with Adam",
        "updates",
        "optimizer = torch.optim.RMSprop(params, lr=0.01, eps=0.01)",
        "optimizer = optax.rmsprop(0.01, eps=0.01)",
        "optimizer = optax.rmsprop(0.01, decay=0.99, eps=0.01, eps_in_sqrt=False)",
        0.7,
        "Torch's alpha is 0.99, and it adds epsilon to the root. Optax and TensorFlow add it to the mean square "
        "(`eps_in_root`).",
        "rmsprop_decay",
    ),
    Pitfall(
        "Adagrad: the accumulator starts at 0.1 in Optax",
        "The first steps of Adagrad are much smaller than PyTorch's",
        "updates",
        "optimizer = torch.optim.Adagrad(params, lr=0.01)",
        "optimizer = optax.adagrad(0.01, eps=1e-10)",
        "optimizer = jaxddp.optim.adagrad(0.01)",
        0.2,
        "Torch's starts at 0. Its epsilon is 1e-10 and outside of the root, Optax's 1e-7 and inside.",
        "adagrad_accumulator",
    ),
    Pitfall(
        "AMSGrad: the maximum comes before the bias correction",
        "Adam with amsgrad=True differs from optax.amsgrad",
        "updates",
        "optimizer = torch.optim.Adam(params, lr=0.01, amsgrad=True)",
        "optimizer = optax.amsgrad(0.01)",
        "optimizer = jaxddp.optim.adam(0.01, amsgrad=True)",
        0.1,
        "Optax corrects the bias first and takes the maximum after it.",
        "amsgrad",
    ),
    Pitfall(
        "Clipping: PyTorch adds 1e-6 to the norm",
        "Clipped gradients differ by 1e-6, or by 1e-4 if they are small",
        "clipped gradients",
        "torch.nn.utils.clip_grad_norm_(params, 0.1)",
        "clip = optax.clip_by_global_norm(0.1)",
        "clip = optax.stateless(lambda g, _: jaxddp.optim.clip_by_global_norm(g, 0.1)[0])",
        5e-7,
        "Torch multiplies by max_norm / (norm + 1e-6), Optax by max_norm / norm.",
        "clip_epsilon",
        "goodfire-ai/spd#643",
    ),
    Pitfall(
        "Clipping: its place in optax.chain",
        "Clipping has no effect, or the steps become tiny",
        "updates in the loop",
        "torch.nn.utils.clip_grad_norm_(params, 0.1)",
        "optimizer = optax.chain(optax.adam(0.01), optax.clip_by_global_norm(0.1))",
        "optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01))",
        0.1,
        "A chain applies its members from left to right. Clipping after Adam clips the update.",
        within=1e-6,
    ),
    Pitfall(
        "Gradient accumulation: apply_every adds updates",
        "Accumulated gradients train worse than a large batch",
        "accumulated updates",
        "optimizer = torch.optim.Adam(params, lr=0.01)",
        "optimizer = optax.chain(optax.adam(0.01), optax.apply_every(4))",
        "optimizer = optax.MultiSteps(optax.adam(0.01), every_k_schedule=4)",
        2.0,
        "`apply_every` adds up the updates that Adam makes of each gradient. `MultiSteps` takes the mean of the "
        "gradients first, like a torch loop that steps once for four micro-batches of loss / 4.",
        issue="jenkspt/gpt-jax#2",
        within=1e-6,
    ),
    Pitfall(
        "StepLR: epochs and steps",
        "The learning rate decays too fast",
        "rates by epoch",
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)",
        "schedule = optax.exponential_decay(0.1, 2, 0.5, staircase=True)",
        "schedule = optax.exponential_decay(0.1, 2 * steps_per_epoch, 0.5, staircase=True)",
        0.8,
        "Optax counts optimizer steps, and a torch loop mostly calls `scheduler.step()` once per epoch. Without "
        "`staircase=True` the rate falls at every step.",
        "scheduler_too_fast",
    ),
    Pitfall(
        "Warm-up: the first rate is not 0",
        "The first step of JAX changes nothing; warm-up is a step late",
        "rates",
        "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 5))",
        "schedule = optax.linear_schedule(0.0, 0.1, 5)",
        "schedule = optax.linear_schedule(0.1 / 5, 0.1, 4)",
        0.2,
        "The first update takes the schedule's value at 0. Here torch's is a fifth of the rate.",
        "warmup_start",
    ),
    Pitfall(
        "Cosine decay with warm-up: what decay_steps counts",
        "Cosine decay ends too early after a warm-up",
        "rates after warm-up",
        "after_warmup = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)",
        "schedule = optax.warmup_cosine_decay_schedule(0.025, 0.1, warmup_steps=3, decay_steps=8)",
        "schedule = optax.warmup_cosine_decay_schedule(0.025, 0.1, warmup_steps=3, decay_steps=3 + 8)",
        0.4,
        "Optax's `decay_steps` contains the warm-up, torch's `T_max` does not.",
        issue="marin-community/levanter#124",
    ),
    Pitfall(
        "Cosine decay: eta_min is a rate, alpha a ratio",
        "The learning rate at the end of cosine decay is too small",
        "rates",
        "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=11, eta_min=0.01)",
        "schedule = optax.cosine_decay_schedule(0.1, 11, alpha=0.01)",
        "schedule = optax.cosine_decay_schedule(0.1, 11, alpha=0.01 / 0.1)",
        0.09,
        "Torch's `eta_min` is Optax's alpha times the first rate. After `T_max` torch's rate rises again.",
    ),
    Pitfall(
        "OneCycleLR: other points, and a momentum",
        "OneCycleLR differs from optax.cosine_onecycle_schedule",
        "rates",
        "scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)",
        "schedule = optax.cosine_onecycle_schedule(12, 0.1)",
        "schedule = jaxddp.schedules.one_cycle(0.1, total_steps=12)",
        0.1,
        "Torch's peak and end come a step earlier. It also cycles the momentum, which is "
        "`jaxddp.schedules.one_cycle_momentum`.",
    ),
    Pitfall(
        "Moving averages: step_size is not the decay",
        "The EMA or the target network follows the parameters at once",
        "average",
        "averaged.lerp_(params, 1 - 0.999)",
        "averaged = optax.incremental_update(params, averaged, 0.999)",
        "averaged = optax.incremental_update(params, averaged, 1 - 0.999)",
        1.0,
        "`step_size` is the weight of the new parameters, usually called tau.",
    ),
)

REPLICAS = (
    Pitfall(
        "Gradients: psum is not DDP's mean",
        "Training diverges on several devices, and works on one",
        "replicas",
        "loss_fn(ddp(x), y).backward()",
        'gradients = jax.lax.psum(jax.grad(loss_fn)(params, x, y), "replicas")',
        'gradients = jax.lax.pmean(jax.grad(loss_fn)(params, x, y), "replicas")',
        1.0,
        "DDP averages the gradients of the ranks. Under Adam the factor N hardly changes the updates.",
        "sum_not_mean",
    ),
    Pitfall(
        "A collective inside the loss",
        "Gradients are N times too large, or not averaged, with pmean of the loss",
        "replicas",
        "loss_fn(ddp(x), y).backward()",
        'gradients = jax.grad(lambda params: jax.lax.pmean(loss_fn(params, x, y), "replicas"))(params)',
        'gradients = jax.lax.pmean(jax.grad(loss_fn)(params, x, y), "replicas")',
        0.6,
        "In `pmap`, and in `shard_map` with `check_vma=False`, the gradient of `pmean` is the local one, and that of "
        "`psum` N times it.",
        "collective_in_loss",
    ),
    Pitfall(
        "shard_map sums gradients itself",
        "Gradients are N times too large after a move from pmap to shard_map",
        "mapped",
        "loss_fn(ddp(x), y).backward()",
        "mapped = jax.shard_map(averaged_gradients, mesh=mesh, in_specs=specs, out_specs=P())",
        "mapped = jax.shard_map(averaged_gradients, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)",
        1.0,
        "With `check_vma=True`, the default, `jax.grad` sums the gradient of a replicated parameter over the replicas. "
        "The `pmean` of `averaged_gradients` then changes nothing.",
        "check_vma",
    ),
    Pitfall(
        "Mean of the ranks or of all tokens",
        "Gradients of padded batches differ from DDP's on several devices",
        "unequal ranks",
        "loss = (losses * mask).sum() / mask.sum()",
        "loss = (losses * mask).sum() / mask.sum()",
        "loss = ((losses * mask).sum(1) / mask.sum(1)).mean()",
        0.4,
        "DDP averages the ranks' means, however many tokens each has. Under `jit` over the global batch, here with a "
        "row per rank, the obvious code is the mean of all tokens.",
        "global_mean",
    ),
    Pitfall(
        "Mean of micro-batches or of all tokens",
        "Accumulation is worse than a large batch with sequences of unequal length",
        "micro-batches of tokens",
        "loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())",
        "loss = (losses.sum(1) / counted.sum(1)).mean()",
        "loss = losses.sum() / counted.sum()",
        0.03,
        "A mean in each micro-batch, here a row, gives tokens of short sequences more weight.",
        "mean_per_micro_batch",
    ),
    Pitfall(
        "Gradient accumulation: divide by the micro-batches",
        "Accumulation behaves like a larger learning rate",
        "micro-batches",
        "(loss_fn(model(x), y) / 4).backward()",
        "gradients += jax.grad(loss_fn)(params, x, y)",
        "gradients += jax.grad(loss_fn)(params, x, y) / 4",
        3.0,
        "`backward()` adds to the gradients, and the loop divides the loss.",
        "accumulation_not_divided",
    ),
    Pitfall(
        "Clipping before the mean",
        "Clipping is stronger than DDP's with the same max_norm",
        "clipped replicas",
        "torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)",
        'gradients = jax.lax.pmean(clip(jax.grad(loss_fn)(params, x, y)), "replicas")',
        'gradients = clip(jax.lax.pmean(jax.grad(loss_fn)(params, x, y), "replicas"))',
        0.1,
        "DDP has averaged when `clip_grad_norm_` is called. Average before `optimizer.update` if a chain clips.",
        "clipped_before_mean",
    ),
    Pitfall(
        "BatchNorm: statistics of a replica or of all",
        "BatchNorm on several devices differs from DDP's",
        "normalised replicas",
        "layer = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(4))",
        'layer = nnx.BatchNorm(4, axis_name="replicas", rngs=nnx.Rngs(0))',
        "layer = nnx.BatchNorm(4, rngs=nnx.Rngs(0))",
        0.6,
        "DDP leaves BatchNorm local. `axis_name`, or `jit` over the global batch, is torch's SyncBatchNorm.",
        "batch_norm_sync",
    ),
)

DATA = (
    Pitfall(
        "Dropout: one key on all replicas",
        "All replicas draw the same dropout mask",
        "masks of replicas",
        "torch.manual_seed(seed + rank)",
        "key = jax.random.key(seed)",
        'key = jax.random.fold_in(jax.random.key(seed), jax.lax.axis_index("replicas"))',
        0.5,
        "A replicated key is the same everywhere. The numbers here count different masks.",
        "same_dropout_mask",
    ),
    Pitfall(
        "Dropout: one key in all steps",
        "The dropout mask or the noise is the same in every step",
        "masks of steps",
        "mask = torch.rand(16) < 0.5",
        "mask = jax.random.bernoulli(key, 0.5, (16,))",
        "mask = jax.random.bernoulli(jax.random.fold_in(key, step), 0.5, (16,))",
        0.8,
        "A key does not change when it is used. The numbers here count different masks.",
        issue="araffin/sbx#45",
    ),
    Pitfall(
        "NumPy's random numbers inside jit",
        "Random augmentation or noise is the same in every call of a jitted function",
        "noise of steps",
        "noisy = lambda x: x + torch.randn(16)",
        "noisy = jax.jit(lambda x, key: x + np.random.normal(size=16))",
        "noisy = jax.jit(lambda x, key: x + jax.random.normal(key, (16,)))",
        0.8,
        "NumPy draws while jax traces the function, and the numbers become constants of the compiled program.",
        issue="keras-team/keras#18426",
    ),
    Pitfall(
        "Shuffling: every epoch has the same order",
        "Every epoch has the order of the first; set_epoch was forgotten",
        "orders of epochs",
        "sampler.set_epoch(epoch)",
        "order = np.random.default_rng(seed).permutation(99)",
        "order = np.random.default_rng((seed, epoch)).permutation(99)",
        0.8,
        "The order must depend on the seed and on the epoch. `jaxddp.DistributedSampler` draws torch's order. The "
        "numbers here count different orders.",
        "set_epoch_missing",
    ),
    Pitfall(
        "Sharding: DistributedSampler deals examples in turn",
        "Ranks see other examples than in PyTorch, and batches differ",
        "even examples",
        "indices = torch.utils.data.DistributedSampler(dataset, 2, rank, shuffle=False)",
        "indices = np.split(order, 2)[rank]",
        "indices = order[rank::2]",
        0.4,
        "A sharding over devices, and `reshape` before `pmap`, give each device a contiguous part.",
        "shards_in_blocks",
    ),
    Pitfall(
        "Sharding: the end of an epoch is padded",
        "Epochs are a step shorter than PyTorch's; some examples are never used",
        "odd examples",
        "indices = torch.utils.data.DistributedSampler(dataset, 2, rank, shuffle=False)",
        "indices = order[: len(order) // 2 * 2][rank::2]",
        "indices = np.resize(order, -(-len(order) // 2) * 2)[rank::2]",
        math.inf,
        "By default the sampler repeats examples from the start, so that all ranks have equally many.",
        "padding_or_dropping",
    ),
    Pitfall(
        "Evaluation: the last incomplete batch",
        "Test accuracy is computed on fewer examples than in PyTorch",
        "evaluation",
        "batches = torch.utils.data.DataLoader(dataset, batch_size=4)",
        "batches = [dataset[4 * i : 4 * i + 4] for i in range(len(dataset) // 4)]",
        "batches = [dataset[i : i + 4] for i in range(0, len(dataset), 4)]",
        0.2,
        "A DataLoader keeps it, unless `drop_last=True`. The numbers here count examples.",
        issue="huggingface/transformers#17863",
    ),
)

NOTES = {
    "Optimizers and schedules": "The numbers are changes of parameters in eight steps, or learning rates in twelve.",
    "Data parallel": "The PyTorch code runs on two ranks, and `ddp` is the model in DDP. The JAX code is in a function "
    'that `jax.shard_map` maps over the axis "replicas", with `check_vma=False`.',
}
SECTIONS = {
    "Layers": LAYERS,
    "Losses": LOSSES,
    "Optimizers and schedules": OPTIMIZERS,
    "Data parallel": REPLICAS,
    "Randomness and data": DATA,
}
PITFALLS = tuple(pitfall for section in SECTIONS.values() for pitfall in section)

INTRODUCTION = f"""\
# From PyTorch to JAX: the pitfalls

Each entry has the PyTorch code, the obvious JAX code and the right code. All of it was executed. The right code gives
PyTorch's numbers, in float64 within 1e-12 or as the comment says. "Off by" is the error relative to the largest number.
[`jaxddp check`](parity.md) finds differences like these in your port. Entries show its name for the cause.

```python
{TORCH_IMPORTS}
{JAX_IMPORTS}
```

Arrays are small and random, images NCHW in PyTorch and NHWC in JAX. `losses` has the cross entropy of each example.
"""


def main() -> None:
    """Write the page."""
    write_atomically(PAGE, page().encode())


def page() -> str:
    """Return the page: introduction, contents by symptom, the sections, and the rest of the catalogue."""
    parts = [INTRODUCTION, "## Find your symptom\n"]
    for title, pitfalls in SECTIONS.items():
        links = "\n".join(f"- [{pitfall.symptom}](#{anchor(pitfall.title)})" for pitfall in pitfalls)
        parts.append(f"{title}:\n\n{links}\n")
    for title, pitfalls in SECTIONS.items():
        parts += [f"## {title}\n", *([f"{wrapped(NOTES[title])}\n"] if title in NOTES else []), *map(entry, pitfalls)]
    return "\n".join([*parts, rest()])


def entry(pitfall: Pitfall) -> str:
    """Return the section of a pitfall."""
    issue = pitfall.issue or (FAULTS[pitfall.fault].thread if pitfall.fault else "")
    sentences = [
        f"*{pitfall.symptom}.*",
        pitfall.why,
        f"`jaxddp check`: `{pitfall.fault}`." if pitfall.fault else "",
        f"Issue: {link(issue)}." if issue else "",
    ]
    text = wrapped(" ".join(filter(None, sentences)))
    return f"### {pitfall.title}\n\n{text}\n\n```python\n{code(pitfall)}\n```\n"


def code(pitfall: Pitfall) -> str:
    """Return the three snippets with their comments: on the right of single lines if they fit, otherwise above."""
    snippets = {
        "PyTorch": pitfall.torch,
        f"the obvious JAX: {error(pitfall.off)}": pitfall.obvious,
        f"right, within {number(pitfall.within)}" if pitfall.within else "right": pitfall.right,
    }
    for width in (max(map(len, snippets.values())), 0):  # in one column, or each right after its code
        lines = [f"{snippet:{width}}  # {comment}" for comment, snippet in snippets.items()]
        if all("\n" not in line and len(line) <= WIDTH for line in lines):
            return "\n".join(lines)
    return "\n".join(f"# {comment}\n{snippet}" for comment, snippet in snippets.items())


def error(off: float) -> str:
    """Describe the error of obvious code.

    >>> error(0.25), error(math.nan), error(math.inf)
    ('off by 0.2', 'NaN', 'another shape')
    """
    if math.isfinite(off):
        return f"off by {number(off)}"
    return "NaN" if math.isnan(off) else "another shape"


def number(value: float) -> str:
    """Return a number with one digit.

    >>> number(0.25), number(3e-4), number(3.0)
    ('0.2', '3e-4', '3')
    """
    return f"{value:.0e}".replace("e-0", "e-") if value < 0.01 else f"{value:.1g}"


def rest() -> str:
    """Return the table of faults that no pitfall is about."""
    names = {pitfall.fault for pitfall in PITFALLS}
    rows = [
        f"| `{name}` | {cell(fault.title)} | {cell(fault.fix)} | {link(fault.thread) if fault.thread else ''} |"
        for name, fault in FAULTS.items()
        if name not in names
    ]
    head = "## More that the check finds\n\n| `jaxddp check` | the port | fix | issue |\n|---|---|---|---|"
    return "\n".join([head, *rows]) + "\n"


def cell(text: str) -> str:
    """Return text for a table, without signs that Markdown would read."""
    return re.sub(r"([|*<])", r"\\\1", text)


def link(issue: str) -> str:
    """Return a link to an issue or a pull request.

    >>> link("google/flax#963")
    '[google/flax#963](https://github.com/google/flax/issues/963)'
    """
    repository, number = issue.split("#")
    return f"[{issue}](https://github.com/{repository}/issues/{number})"


def anchor(title: str) -> str:
    """Return the anchor of a heading.

    >>> anchor("Adam: epsilon 1e-5, not 1e-8")
    'adam-epsilon-1e-5-not-1e-8'
    """
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def wrapped(text: str) -> str:
    """Return text in lines of the page's width; links are not broken."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    main()
