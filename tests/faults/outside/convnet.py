"""Faults of the convnet's port: padding, norms, pooling, resizing, channels, class weights, a frozen bias."""

from functools import partial

from .fault import OutsideFault

fault = partial(OutsideFault, "convnet")

FAULTS = {
    "padding_mode": fault(
        "call",
        (('padding="CIRCULAR"', 'padding="SAME"'),),
        ours="conv1 pads with zeros",
        reference="conv1 pads in a circle",
        expects=("circular|wrap", "zero", "pad"),
        place="conv1",
        jax_line='padding="SAME"',
        torch_line='padding_mode="circular"',
    ),
    "norm_after_relu": fault(
        "order of calls",
        (("nnx.relu(self.bn1(self.conv1(x)))", "self.bn1(nnx.relu(self.conv1(x)))"),),
        ours="bn1 follows relu",
        reference="bn1 precedes relu",
        expects=("relu", "bn1|norm", "before|after|precede|follow|order|swapped"),
        place="bn1",
        jax_line="self.bn1(nnx.relu(",
        torch_line="F.relu(self.bn1(",
    ),
    "mean_for_max_pool": fault(
        "call",
        (("nnx.max_pool(x, (2, 2), (2, 2))", "nnx.avg_pool(x, (2, 2), (2, 2))"),),
        ours="mean of each 2 x 2 block",
        reference="largest of each 2 x 2 block",
        expects=("max", "avg|average|mean", "pool"),
        place="conv2|max_pool",
        jax_line="nnx.avg_pool(x, (2, 2)",
        torch_line="F.max_pool2d(",
    ),
    "group_count": fault(
        "constant",
        (("num_groups=2", "num_groups=4"),),
        ours="4 groups",
        reference="2 groups",
        expects=("group", r"\b4\b", r"\b2\b"),
        place=r"\bgn\b",
        jax_line="num_groups=4",
        torch_line="nn.GroupNorm(2, 4)",
    ),
    "elu_alpha": fault(
        "constant",
        (("self.gn(self.conv2(low)), alpha=0.5)", "self.gn(self.conv2(low)))"),),
        ours="alpha 1",
        reference="alpha 0.5",
        expects=("alpha|elu", r"\b1(\.0)?\b", r"\b0\.5\b"),
        place=r"\bgn\b|elu",
        jax_line="nnx.elu(",
        torch_line="F.elu(",
    ),
    "hard_gate": fault(
        "call",
        (("nnx.sigmoid(", "jax.nn.hard_sigmoid("),),
        ours="hard_sigmoid",
        reference="sigmoid",
        expects=("hard_?sigmoid", r"(?<!hard_)(?<!hard)sigmoid"),
        place="squeeze|sigmoid",
        jax_line="jax.nn.hard_sigmoid(",
        torch_line="torch.sigmoid(",
    ),
    "squeeze_by_max": fault(
        "call",
        (("self.squeeze(low.mean((1, 2)))", "self.squeeze(low.max((1, 2)))"),),
        ours="the gate sees the largest value of each channel",
        reference="the gate sees the mean of each channel",
        expects=("max", "mean"),
        place="squeeze",
        jax_line="low.max((1, 2))",
        torch_line="low.mean((2, 3))",
    ),
    "bilinear_upsampling": fault(
        "call",
        (('"nearest")', '"bilinear")'),),
        ours="bilinear",
        reference="nearest",
        expects=("linear", "nearest"),
        place="fuse|interpolate",
        jax_line='"bilinear")',
        torch_line='mode="nearest"',
    ),
    "channels_swapped": fault(
        "order",
        (("jnp.concatenate([up, x], axis=-1)", "jnp.concatenate([x, up], axis=-1)"),),
        ours="x before up",
        reference="up before x",
        expects=("order|swapped|channels", "cat|concat|channels"),
        place="fuse",
        jax_line="jnp.concatenate([x, up]",
        torch_line="torch.cat([up, x]",
    ),
    "pool_without_padding": fault(
        "constant",
        (("((1, 1), (1, 1)))", "((1, 1), (1, 1)), count_include_pad=False)"),),
        ours="means leave the padding out",
        reference="means count the padding",
        expects=("pad", "count|include|mean|divi|average|avg"),
        place="head|avg_pool",
        jax_line="count_include_pad=False",
        torch_line="F.avg_pool2d(",
    ),
    "class_weights_squared": fault(
        "constant",
        (
            (
                "return (weights * losses).sum() / weights.sum()",
                "return (weights**2 * losses).sum() / (weights**2).sum()",
            ),
        ),
        ours="classes weigh 1, 4, 0.25",
        reference="classes weigh 1, 2, 0.5",
        expects=("weight", r"squared|square|\b4(\.0)?\b"),
        place="cross_entropy",
        jax_line="weights**2 * losses",
        torch_line="F.cross_entropy(",
    ),
    "divided_by_count": fault(
        "call",
        (("(weights * losses).sum() / weights.sum()", "(weights * losses).mean()"),),
        ours="divided by the number of examples",
        reference="divided by the sum of the weights",
        expects=("weight", "divid|mean|sum|normali"),
        place="cross_entropy",
        jax_line="(weights * losses).mean()",
        torch_line="F.cross_entropy(",
    ),
    "frozen_bias": fault(
        "tensor group",
        (
            (
                "jax_optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)",
                "def label(path, _):\n"
                '    return "frozen" if [key.key for key in path[:2]] == ["head", "bias"] else "trained"\n\n\n'
                "rules = {\n"
                '    "trained": optax.sgd(0.1, momentum=0.9, nesterov=True),\n'
                '    "frozen": optax.set_to_zero(),\n'
                "}\n"
                "jax_optimizer = optax.partition(rules, lambda p: jax.tree_util.tree_map_with_path(label, p))",
            ),
        ),
        ours="head.bias is frozen",
        reference="head.bias learns",
        expects=(r"head\.bias", r"frozen|not updated|stays|rate 0\b|0 times|rate of .* is 0|\b0\b"),
        place=r"head\.bias",
        jax_line='"frozen": optax.set_to_zero()',
        torch_line="torch.optim.SGD(parameters",
        stage="update",
        known="rate_of_some",
    ),
}
