"""Functions, strings and values that are mistaken for each other."""

# Functions of one namespace that take the same arguments; each is replaced by the two after it, in turn.
GROUPS: tuple[tuple[str, ...], ...] = (
    ("mean", "sum", "max"),
    ("min", "max", "mean"),
    ("var", "std"),
    ("relu", "gelu", "silu", "elu", "softplus", "leaky_relu", "mish"),
    ("tanh", "sigmoid", "relu"),
    ("softmax", "log_softmax"),
    ("sin", "cos"),
    ("exp", "expm1", "log", "log1p"),
    ("sqrt", "square", "abs"),
    ("arctanh", "arcsinh", "tanh"),
    ("maximum", "minimum"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("tril", "triu"),
    ("cumsum", "cumprod"),
    ("concatenate", "stack"),
    ("max_pool", "avg_pool"),
    ("Dense", "DenseGeneral"),
    ("LayerNorm", "RMSNorm"),
    ("normal", "uniform"),
    ("pmean", "psum", "pmax"),
    ("grad", "value_and_grad"),
    ("floor", "ceil", "round"),
)
JAX_GROUPS: tuple[tuple[str, ...], ...] = (
    ("sgd", "adam", "adamw", "rmsprop", "adamax", "nadam", "lion"),
    ("trace", "scale_by_adam", "scale_by_rms"),
    ("huber_loss", "squared_error", "l2_loss", "log_cosh"),
    ("softmax_cross_entropy", "sigmoid_binary_cross_entropy"),
    ("sigmoid_binary_cross_entropy", "squared_error"),
    ("softmax_cross_entropy_with_integer_labels", "poly_loss_cross_entropy"),
    ("cosine_similarity", "cosine_distance"),
    ("polynomial_schedule", "linear_schedule", "cosine_decay_schedule"),
    ("clip_by_global_norm", "clip", "clip_by_block_rms"),
    ("lecun_normal", "he_normal", "xavier_uniform"),
    ("GroupNorm", "LayerNorm", "BatchNorm"),
    ("hstack", "vstack"),
)
TORCH_GROUPS: tuple[tuple[str, ...], ...] = (
    ("SGD", "Adam", "AdamW", "NAdam", "Adamax"),
    ("RMSprop", "Adagrad", "Adam"),
    ("Adamax", "Adam", "RAdam"),
    ("StepLR", "ExponentialLR"),
    ("huber_loss", "smooth_l1_loss", "mse_loss", "l1_loss"),
    ("mse_loss", "huber_loss", "l1_loss"),
    ("cross_entropy", "nll_loss"),
    ("binary_cross_entropy_with_logits", "mse_loss"),
    ("BatchNorm2d", "InstanceNorm2d"),
    ("LSTM", "GRU", "RNN"),
    ("GRU", "LSTM"),
    ("ReLU", "GELU", "SiLU"),
    ("max_pool2d", "avg_pool2d"),
    ("cat", "stack"),
    ("atanh", "asinh", "tanh"),
    ("argmax", "argmin"),
    ("add_", "sub_"),
    ("mul_", "div_"),
    ("randn_like", "rand_like"),
    ("pow", "mul"),
)

# String options that are mistaken for each other.
STRINGS: dict[str, tuple[str, ...]] = {
    "nearest": ("bilinear", "bicubic"),
    "CIRCULAR": ("SAME", "VALID"),
    "SAME": ("VALID", "CIRCULAR"),
    "VALID": ("SAME",),
    "circular": ("zeros", "reflect"),
    "none": ("mean", "sum"),
    "mean": ("sum", "none"),
    "sum": ("mean", "none"),
    "adam": ("adamw", "sgd"),
    "adamw": ("adam", "sgd"),
    "sgd": ("adam",),
    "float32": ("bfloat16", "float64"),
}

# Values of keywords, and keywords, that are mistaken for each other.
VALUES: dict[str, tuple[str, ...]] = {
    "eps": ("1e-3", "1e-5"),
    "epsilon": ("1e-3", "1e-6"),
    "momentum": ("0.99", "0.1"),
    "padding": ('"SAME"', '"VALID"', "0", "2"),
    "dtype": ('"bfloat16"', '"float32"'),
    "weight_decay": ("1e-4", "1e-2"),
    "num_groups": ("4", "1"),
    "mask": ("None",),
    "attn_mask": ("None",),
    "weight": ("None",),
    "generator": ("None",),
}
KEYWORDS: dict[str, tuple[str, ...]] = {
    "b1": ("b2",),
    "b2": ("b1",),
    "decay": ("momentum", "eps"),
    "momentum": ("weight_decay", "dampening"),
    "eps": ("weight_decay",),
    "alpha": ("beta",),
    "delta": ("beta",),
    "min": ("max",),
    "max": ("min",),
    "eps_in_sqrt": ("centered",),
    "use_bias": ("promote_dtype",),
    "stride": ("padding",),
    "padding": ("stride",),
    "T_max": ("eta_min",),
}
# Keywords that a function takes, with values that are not its defaults; {0} is the namespace of the function.
LAYERS = (
    *("kernel_init={0}.initializers.normal(1.0)", "bias_init={0}.initializers.ones"),
    *('param_dtype="bfloat16"', 'dtype="bfloat16"'),
)
ADAMS = ("eps=1e-6", "b2=0.99", "weight_decay=0.01", "betas=(0.9, 0.99)", "amsgrad=True", "mu_dtype='bfloat16'")
ADDED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Linear", "Dense", "Conv"), LAYERS),
    "Conv2d": ('padding_mode="circular"', "dilation=2"),
    **dict.fromkeys(("adam", "adamw", "adamax", "Adam", "AdamW", "Adamax"), ADAMS),
    "Embed": ("embedding_init={0}.initializers.normal(1.0)", 'param_dtype="bfloat16"'),
    "Embedding": ("padding_idx=0", "max_norm=1.0"),
    "LayerNorm": ("eps=1e-4", "epsilon=1e-4", 'param_dtype="bfloat16"'),
    "BatchNorm": ("momentum=0.5", "eps=1e-3"),
    "BatchNorm2d": ("momentum=0.5", "eps=1e-3"),
    "sgd": ("accumulator_dtype='bfloat16'", "nesterov=True"),
    "SGD": ("dampening=0.1", "weight_decay=0.01", "maximize=True"),
    "rmsprop": ("centered=True", "momentum=0.9"),
    "RMSprop": ("centered=True", "momentum=0.9"),
    "trace": ("nesterov=True",),
    "mean": ("keepdims=True",),
    "cross_entropy": ("label_smoothing=0.1", "ignore_index=0"),
    "softmax_cross_entropy_with_integer_labels": ("axis=0",),
    "pmean": ("axis_index_groups=[[0], [1]]",),
}
# Keywords without which a port cannot be what it is, or that change nothing.
NEEDED = frozenset({"rngs", "key", "name", "strict", "params"})


def siblings_of(name: str, half: str) -> list[str]:
    """Return up to two functions for which one may be mistaken in a half of a port.

    >>> siblings_of("mean", "jax"), siblings_of("sgd", "torch")
    (['sum', 'max'], [])
    """
    groups = (*GROUPS, *(JAX_GROUPS if half == "jax" else TORCH_GROUPS))
    names: list[str] = []
    for group in groups:
        if name in group:
            at = group.index(name)
            names += (group[at + 1 :] + group[:at])[:2]
    return list(dict.fromkeys(names))[:2]
