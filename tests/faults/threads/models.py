"""Threads about layers and their weights."""

from .thread import WITH_JAX, Thread, in_jax, in_torch

TF32 = '''

def tf32(x, y, dimension_numbers, precision=None, preferred_element_type=None):
    """Multiply as the tensor cores of a GPU do by default: factors keep 10 bits of their mantissa."""
    x, y = (jax.lax.reduce_precision(array, exponent_bits=8, mantissa_bits=10) for array in (x, y))
    return jax.lax.dot_general(x, y, dimension_numbers)

'''
AS_IN_TORCH = 'kernel_init=nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")'
OF_FLAX = "std=0.5 / 0.87962566, a=-1 / 0.87962566, b=1 / 0.87962566"  # its deviation is that behind the cut

THREADS: dict[str, Thread] = {
    "same_padding": Thread(
        ("google/flax#963", "google/flax#2993", "keras-team/keras#16363"),
        "With torch's weights, a ResNet-50 predicts another class, and a ResNet-18 differs from the first convolution.",
        'The default padding, "SAME", is not torch\'s padding of 3 at stride 2.',
        "convnet",
        (in_jax("strides=2, padding=3", 'strides=2, padding="SAME"'),),
        ("same_padding",),
    ),
    "layer_norm_12": Thread(
        ("google/flax#2195",),
        "LayerNorm with torch's weights has another output.",
        "The first argument of flax's LayerNorm is its epsilon: `LayerNorm(12)` sets it to 12.",
        "classifier",
        (in_jax('nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name="norm")', 'nn.LayerNorm(12, name="norm")'),),
        ("norm_epsilon",),
        note="the cause is read off the thread's code",
    ),
    "gelu": Thread(
        ("huggingface/transformers#11364",),
        "FlaxBERT's outputs differ slightly from torch's.",
        "`gelu` is the tanh approximation in flax by default, and not in torch.",
        "classifier",
        (in_jax(", approximate=False", ""),),
        ("gelu_approximation",),
    ),
    "batch_norm_of_tensorflow": Thread(
        ("pytorch/vision#8250", "affinelayer/pix2pix-tensorflow#126", "lukemelas/EfficientNet-PyTorch#3"),
        "A number for BatchNorm's momentum was copied from TensorFlow to torch, or back.",
        "Torch's momentum is the complement of TensorFlow's: 0.99 is torch's 0.01.",
        "convnet",
        (in_torch("0.05, 0.01", "0.05, 0.99"),),
        ("batch_norm_momentum",),
        (in_torch("0.05, 0.1", "0.05, 0.01"), in_jax("0.05, 0.1", "0.05, 0.01")),
    ),
    "batch_norm_of_flax": Thread(
        ("mlcommons/algorithmic-efficiency#231",),
        "Outputs of workloads in JAX and torch differ after training steps.",
        "The torch layers took flax's momentum as it was, in place of 1 - momentum; besides, padding.",
        "convnet",
        (in_torch("0.05, 0.1", "0.05, 0.9"),),
        ("batch_norm_momentum",),
    ),
    "batch_norm_stands_still": Thread(
        ("mlcommons/algorithmic-efficiency#798", "mlcommons/algorithmic-efficiency#783"),
        "Running statistics of BatchNorm stay as they are for the rest of a training.",
        "Switching the updates off twice overwrote the saved momentum with 0.",
        "convnet",
        (in_torch("0.05, 0.1", "0.05, 0.0"),),
        ("batch_norm_momentum",),
    ),
    "batch_norm_defaults": Thread(
        ("scverse/scvi-tools#2309",),
        "Flax's BatchNorm has other parameters than torch's.",
        "Defaults: flax's momentum of 0.99 is 0.01 in torch, whose default is 0.1.",
        "convnet",
        (
            in_jax("self.bn1 = BatchNorm(6, momentum=MOMENTUM)", "self.bn1 = nnx.BatchNorm(6, rngs=rngs)"),
            in_jax("self.bn2 = BatchNorm(6, momentum=MOMENTUM)", "self.bn2 = nnx.BatchNorm(6, rngs=rngs)"),
        ),
        ("batch_norm_momentum", "biased_variance"),
        note="flax's running variance is another difference, which the thread does not mention",
    ),
    "tf32": Thread(
        ("google/flax#3128", "typoverflow/flow-rl#12", "deepmodeling/deepmd-kit#4726"),
        "Dense and torch's Linear differ by 1e-3 on a GPU; other programs lose precision.",
        "Matrix products in TF32 are JAX's default on GPUs.",
        "classifier",
        (
            in_jax("LR = 1e-3\n\n", f"LR = 1e-3\n{TF32}"),
            in_jax('nn.Dense(12, name="inner")', 'nn.Dense(12, dot_general=tf32, name="inner")'),
            in_jax('nn.Dense(4, name="outer")', 'nn.Dense(4, dot_general=tf32, name="outer")'),
        ),
        ("reduced_precision_matmul",),
        (WITH_JAX,),
        note="a GPU's rounding, done on a CPU: the products' factors keep TF32's 10 bits; the cause of the first "
        "thread is inferred",
    ),
    "initial_weights": Thread(
        ("jax-ml/jax#4862", "google/flax#3125", "google/flax#4388"),
        "Ports of networks train differently from torch's.",
        "Default initial weights differ: Dense, Conv and Embed draw from other distributions.",
        "classifier",
        (in_jax(f"{AS_IN_TORCH}, ", ""),),
        setting=(in_jax('nn.Dense(12, name="inner")', f'nn.Dense(12, {AS_IN_TORCH}, name="inner")'),),
        answer="initialisation",
        words=("inner.weight", "torch kaiming_uniform", "jax lecun_normal"),
    ),
    "truncated_normal": Thread(
        ("google/flax#4091", "mlcommons/algorithmic-efficiency#819"),
        "Initial weights of a ViT reach other bounds in JAX and torch, with the same standard deviation.",
        "The bounds of torch's `trunc_normal_` are absolute; JAX's are multiples of the standard deviation.",
        "decoder",
        (in_torch(f"trunc_normal_(layer.weight, {OF_FLAX})", "trunc_normal_(layer.weight, std=0.5)"),),
        setting=(
            in_torch('kaiming_normal_(layer.weight, nonlinearity="linear")', f"trunc_normal_(layer.weight, {OF_FLAX})"),
            in_jax('variance_scaling(1.0, "fan_in", "normal")', "truncated_normal(0.5)"),
        ),
        answer="initialisation",
        words=("up.weight", "torch normal(0.5); jax truncated_normal(0.5)"),
    ),
    "antialias": Thread(
        ("sayakpaul/cmmd-pytorch#4", "sayakpaul/cmmd-pytorch#5"),
        "A port of a metric gives other numbers.",
        "Shrinking an image antialiases in JAX by default, and not in torch.",
        "segmenter",
        (in_torch(", antialias=True", ""),),
        causes=("other_option",),
    ),
    "align_corners": Thread(
        ("google/flax#2210", "google/flax#2214", "jax-ml/jax#11206"),
        "Upsampling in a port of a depth estimator differs.",
        "`jax.image.resize` has no `align_corners`, which torch's model sets.",
        "segmenter",
        (in_torch("align_corners=False", "align_corners=True"),),
        causes=("other_option",),
    ),
    "transposed_convolution": Thread(
        ("jax-ml/jax#11252", "google/flax#3137"),
        "A transposed convolution with torch's weights has another output.",
        "Flax needs `transpose_kernel=True` for torch's kernels.",
        "segmenter",
        (in_jax(", transpose_kernel=True", ""),),
        ("layout",),
    ),
}
