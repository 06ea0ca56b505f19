"""Candidates of a patch: the right text is among them, all other bytes stay, and each is Python."""

import ast
from itertools import islice
from pathlib import Path

import pytest

from jaxddp.parity.catalogue import EDITS, FAULTS, TorchOptimizer
from jaxddp.parity.deviation import Deviation, Statement, Value
from jaxddp.parity.findings import Cause
from jaxddp.parity.patch.candidates import candidates
from jaxddp.parity.user_code.file_text import FileText
from jaxddp.parity.user_code.homes import home_of

ADAM = TorchOptimizer("Adam", [{"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}])
ADAMW = TorchOptimizer("AdamW", [{"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}])
SGD = TorchOptimizer("SGD", [{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.03}])
MASKED = TorchOptimizer("AdamW", [{"lr": 0.1, "weight_decay": x} for x in (0.01, 0.0)])
MODEL = "class Net(nnx.Module):\n    def __init__(self, rngs):\n        self.norm = {}\n\n    def __call__(self, x):\n"


def cause(name: str, *values: Value, optimizer: TorchOptimizer | None = None) -> Cause:
    return Cause.of([Deviation(name, Statement(""), values)], 0.0, optimizer=optimizer)


def made(text: str, line: int, found: Cause, torch: tuple[str, int] | None = None) -> list[str]:
    return [*candidates(text, line, found, torch)]


# Name, value, the wrong line, the right one.
OF_A_LINE = [
    ("number", Value("0.3", "0.2", "leaky_relu", "negative_slope"), "leaky_relu(x, 0.3)", "leaky_relu(x, 0.2)"),
    (
        "number",
        Value("0.01", "0.2", "leaky_relu", "negative_slope"),
        "jax.nn.leaky_relu(x)",
        "jax.nn.leaky_relu(x, negative_slope=0.2)",
    ),
    ("number", Value("0.25", "0.5"), "x / 4", "x / 2.0"),
    ("number", Value("3", "1 / 3"), "x / 3", "x / (1 / 3)"),
    ("number", Value("-0.2", "-0.3", "clamp", "min"), "jnp.clip(x, -0.2, 0.2)", "jnp.clip(x, -0.3, 0.2)"),
    ("number", Value("1", "0"), "x[1]", "x[0]"),
    (
        "other_option",
        Value("'bilinear'", "'nearest'", "interpolate", "mode"),
        'resize(x, "bilinear")',
        'resize(x, "nearest")',
    ),
    ("other_function", Value("sigmoid", "silu"), "2 * jax.nn.sigmoid(x)", "2 * jax.nn.silu(x)"),
    ("other_function", Value("avg_pool2d", "max_pool2d"), "nnx.avg_pool(x, (2, 2))", "nnx.max_pool(x, (2, 2))"),
    ("other_function", Value("mul", "add"), "a * b * (c - d)", "a * b + (c - d)"),
    ("gelu_approximation", Value(), "jax.nn.gelu(x)", "jax.nn.gelu(x, approximate=False)"),
    ("gelu_approximation", Value(), "apply(nnx.gelu)", "apply(lambda x: nnx.gelu(x, approximate=False))"),
    ("std_correction", Value("0", "1", "std", "correction"), "jnp.std(x, axis=0)", "jnp.std(x, axis=0, ddof=1)"),
    ("other_axis", Value("0", "1", "softmax", "dim"), "softmax(x, axis=0)", "softmax(x, axis=-1)"),
    ("other_order", Value(), "concatenate([a, b])", "concatenate([b, a])"),
    ("gradient_stopped", Value(), "jax.lax.stop_gradient(x) * 2", "x * 2"),
    ("gradient_not_stopped", Value(), "f(x) + b", "f(jax.lax.stop_gradient(x)) + b"),
    ("call_added", Value(), "2 * jnp.tanh(a + b)", "2 * (a + b)"),
    ("loss_scale", Value("sum", "mean", key="the batch"), "losses.sum()", "losses.mean()"),
    ("loss_scale", Value("0.5", "1", key="loss and gradients", is_factor=True), "0.25 * x.mean()", "0.5 * x.mean()"),
    ("loss_scale", Value("0.5", "1", key="loss and gradients", is_factor=True), "0.5 * x.mean()", "x.mean()"),
    ("other_function", Value("mean", "sum"), "(a - b).mean(axis=-1)", "(a - b).sum(axis=-1)"),
    ("no_sync", Value(), "update(x, a)", "update(jax.lax.pmean(x, 'replica'), a)"),
    ("sum_not_mean", Value(), 'jax.lax.psum(g, "replica")', 'jax.lax.pmean(g, "replica")'),
]


@pytest.mark.parametrize(("name", "value", "wrong", "right"), OF_A_LINE, ids=[x[2] for x in OF_A_LINE])
def test_the_line_of_a_cause_is_edited(name: str, value: Value, wrong: str, right: str) -> None:
    text = "def f(x, a, b):\n    return {}  # äöü\r\n"
    assert text.format(right) in made(text.format(wrong), 2, cause(name, value))


OPTIMIZERS = [
    (
        "decay_value",
        Value("0.0001", "0.01", "AdamW", "weight_decay"),
        ADAMW,
        "adamw(LR)",
        "adamw(LR, weight_decay=0.01)",
    ),
    (
        "decay_value",
        Value("0.1", "0.01", "AdamW", "weight_decay"),
        ADAMW,
        "adamw(LR, weight_decay=0.1)",
        "adamw(LR, weight_decay=0.01)",
    ),
    (
        "coupled_decay",
        Value(),
        ADAMW,
        "chain(optax.add_decayed_weights(0.01), optax.adam(LR))",
        "adamw(LR, weight_decay=0.01)",
    ),
    (
        "decay_value",
        Value("0", "0.03", "SGD", "weight_decay"),
        SGD,
        "sgd(LR, momentum=0.9)",
        "chain(optax.add_decayed_weights(0.03), optax.sgd(LR, momentum=0.9))",
    ),
    (
        "decay_mask",
        Value(),
        MASKED,
        "adamw(LR, weight_decay=0.01)",
        "adamw(LR, weight_decay=0.01, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params))",
    ),
    ("clip_norm", Value(), ADAM, "chain(optax.clip_by_global_norm(1.0), optax.adam(LR))", "chain(optax.adam(LR))"),
    (
        "nesterov",
        Value(),
        SGD,
        "sgd(LR, momentum=0.9, nesterov=True)",
        "sgd(LR, momentum=0.9, nesterov=False)",
    ),
    ("lr_scaled", Value("2", "1", key="lr", is_factor=True), ADAM, "adam(2 * LR)", "adam(LR)"),
    (
        "lr_off_by_one",
        Value(),
        SGD,
        "sgd(lambda t: rate(t + 1), momentum=0.9)",
        "sgd(lambda t: rate(t), momentum=0.9)",
    ),
    (
        "schedule",
        Value(),
        SGD,
        "sgd(lambda t: rate((t // N) * N))",
        "sgd(lambda t: rate(t))",
    ),
    (
        "schedule",
        Value(),
        SGD,
        "sgd(lambda t: rate(LR * t // 4 * 4))",
        "sgd(lambda t: rate(LR * t))",
    ),
    (
        "rate_of_some",
        Value(),
        SGD,
        'partition({"a": optax.sgd(LR), "b": optax.set_to_zero()}, label)',
        'partition({"a": optax.sgd(LR), "b": optax.sgd(LR)}, label)',
    ),
]


@pytest.mark.parametrize(("name", "value", "optimizer", "wrong", "right"), OPTIMIZERS, ids=[x[3] for x in OPTIMIZERS])
def test_the_optimizer_is_edited_after_the_code_of_the_fix(
    name: str, value: Value, optimizer: TorchOptimizer, wrong: str, right: str
) -> None:
    text = "import jax\nimport optax\nLR, N = 0.1, 4\njax_optimizer = optax.{}\n"
    found = cause(name, value, optimizer=optimizer)
    assert text.format(right) in made(text.format(wrong), 4, found)


def test_a_module_that_the_code_of_a_fix_needs_is_imported() -> None:
    amsgrad = TorchOptimizer("Adam", [{"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": True}])
    text = '"""Port."""\nimport optax\n\njax_optimizer = optax.amsgrad(1e-3)\n'
    right = '"""Port."""\nimport jaxddp.optim\nimport optax\n\njax_optimizer = jaxddp.optim.adam(1e-3, amsgrad=True)\n'
    assert right in made(text, 4, cause("amsgrad", optimizer=amsgrad))


def test_a_layer_of_jaxddp_takes_the_place_of_one_of_the_same_name() -> None:
    text = "from flax import nnx\n\nlayer = nnx.BatchNorm(5, momentum=0.9, rngs=rngs)\n"
    right = "import jaxddp.nn.layers\nfrom flax import nnx\n\nlayer = jaxddp.nn.layers.BatchNorm(5)\n"
    assert right in made(text, 3, cause("biased_variance"))


def test_numbers_are_followed_to_constants_arguments_and_layers() -> None:
    slope = cause("number", Value("0.3", "0.2", "leaky_relu", "negative_slope"))
    text = "A, SLOPE = 1, 0.3\ndef f(x):\n    return leaky_relu(x, SLOPE)\n"
    assert text.replace("0.3", "0.2") in made(text, 3, slope)
    text = "def act(x, slope=0.3):\n    return leaky_relu(x, slope)\n\ndef f(x):\n    return act(x)\n"
    assert text.replace("0.3", "0.2") in made(text, 5, slope)
    text = MODEL.format("nnx.LayerNorm(8, rngs=rngs)") + "        return self.norm(x)\n"
    eps = cause("norm_epsilon", Value("1e-06", "1e-05", "layer_norm", "eps"))
    assert text.replace("rngs=rngs)", "rngs=rngs, epsilon=1e-05)") in made(text, 6, eps)


def test_options_are_added_to_all_alike_layers_at_once() -> None:
    text = "def f(x):\n    y = LayerNorm(name='a')(x)\n    return LayerNorm(name='b')(y)\n"
    eps = cause("norm_epsilon", Value("1e-06", "1e-05", "layer_norm", "eps"))
    added = sorted(x.count(", epsilon=1e-05)") for x in made(text, 3, eps))
    assert added[-1] == 2 and 1 in added


TWINS = [
    (
        "h = jax.nn.silu(self.gate(x)) * self.up(x)",
        "h = x + F.silu(self.gate(x)) * self.up(x)",
        "h = x + jax.nn.silu(self.gate(x)) * self.up(x)",
    ),
    ("h = x.mean(axis=1)", "h = (x * valid[..., None]).sum(dim=1)", "h = (x * valid[..., None]).sum(axis=1)"),
    ("h = jnp.tanh(x) / valid", "h = torch.tanh(x)", "h = jnp.tanh(x)"),
    ("h = x", "h = torch.tanh(x).detach()", "h = jax.lax.stop_gradient(jnp.tanh(x))"),
    ("h = jax.nn.swish(x)", "h = F.mish(x)", "h = jax.nn.mish(x)"),
    ("h = jnp.abs(x)", "h = x.pow(2)", "h = x ** 2"),
    ("h = Dense(4)(x)", "h = F.call(self.fc(x), 1, dim=0)", "h = call(Dense(4)(x), 1, axis=0)"),
    (
        "h = entropy(x, valid).mean()",
        "h = F.other(torch.clamp(x, -2, 2))",
        "h = entropy(jnp.clip(x, -2, 2), valid).mean()",
    ),
    ("h = Embed(4)(x)", "h = self.embed(x) * math.sqrt(8)", "h = Embed(4)(x) * jnp.sqrt(8)"),
    (
        "h = jax.nn.softmax(x)",
        "h = x.masked_fill(~valid, -1.0).softmax(dim=-1)",
        "h = jax.nn.softmax(jnp.where(~valid, -1.0, x), axis=-1)",
    ),
    (
        "h = jnp.concatenate([valid, x], axis=-1)",
        "h = torch.cat([x, valid], dim=-1)",
        "h = jnp.concatenate([x, valid], axis=-1)",
    ),
]


@pytest.mark.parametrize(("wrong", "torch", "right"), TWINS, ids=[x[2] for x in TWINS])
def test_a_line_is_made_to_say_what_the_torch_line_says(wrong: str, torch: str, right: str) -> None:
    text = "import jax\nfrom jax import numpy as jnp\ndef call(self, x, valid):\n    {}\n    return h\n"
    twin = f"def forward(self, x, valid):\n    {torch}\n    return h\n"
    found = cause("operand_left_out")
    assert text.format(right) in made(text.format(wrong), 4, found, (twin, 2))


def test_a_statement_that_torch_alone_has_is_inserted() -> None:
    text = "def f(x, y):\n    h = x + y\n    return h\n"
    twin = "def f(x, y):\n    h = x + y\n    h = h / h.sum(dim=-1, keepdim=True)\n    return h\n"
    right = "def f(x, y):\n    h = x + y\n    h = h / h.sum(axis=-1, keepdims=True)\n    return h\n"
    assert right in made(text, 3, cause("call_left_out"), (twin, 4))


def test_candidates_are_python_differ_and_leave_other_lines_alone() -> None:
    text = "x = 1  # ü\r\n\r\ndef f(a):\r\n    return leaky_relu(a, 0.3) * 0.3 - a / 2\r\n"
    every = made(text, 4, cause("number", Value("0.3", "0.2", "leaky_relu", "negative_slope")))
    assert len(every) == len({*every}) > 5 and text not in every
    for one in every:
        ast.parse(one)
        assert one.splitlines()[:3] == text.splitlines()[:3] and one.count("\r\n") == 4


def test_numbers_of_torch_code_that_jax_cannot_know_are_not_taken() -> None:
    found = cause("operand_left_out")
    every = made("def f(x):\n    return x\n", 2, found, ("def f(x):\n    return x + torch_only(x)\n", 2))
    assert not any("torch_only" in one for one in every)
    every = made("def f(x):\n    return x\n", 2, found, ("def f(x):\n    return F.bilinear(x, x)\n", 2))
    assert not any("bilinear" in one or "_unknown_" in one for one in every)


def test_operations_keep_their_parentheses() -> None:
    source = FileText("y = 2 * f(x)\nz = 3 * (n // 2)\n")
    calls = [x for x in ast.walk(source.tree) if isinstance(x, ast.Call)]
    assert source.edited((calls[0], "a + b")) == "y = 2 * (a + b)\nz = 3 * (n // 2)\n"
    floors = [x for x in ast.walk(source.tree) if isinstance(x, ast.BinOp) and isinstance(x.op, ast.FloorDiv)]
    assert source.edited((floors[0], "n")) == "y = 2 * f(x)\nz = 3 * n\n"


def test_a_function_is_found_in_the_file_that_defines_it(tmp_path: Path) -> None:
    port, module = tmp_path / "port.py", tmp_path / "halves" / "jax_half.py"
    module.parent.mkdir()
    port.write_text(
        "from halves.jax_half import loss as jax_loss\nimport os\n\ndef jax_step(): pass\njax_optimizer = 1\n"
    )
    module.write_text("x = 1\n\ndef loss(model):\n    y = 1\n    return y\n")
    assert home_of(port, "jax_loss") == (str(module), 5)
    assert home_of(port, "jax_step") == (str(port), 4) and home_of(port, "jax_optimizer") == (str(port), 5)
    assert home_of(port, "jax_model") is None and home_of(tmp_path / "none.py", "x") is None


def test_the_rate_is_made_torchs_schedule() -> None:
    rate = "def rate(t):\n    return 0.1 * (0.9 + 0.1 * f(t))\n"
    text = f"import optax\n\n{rate}jax_optimizer = optax.sgd(rate, momentum=0.9)\n"
    twin = "STEPS = 8\noptimizer = SGD(parameters, lr=0.1)\nscheduler = CosineAnnealingLR(optimizer, T_max=STEPS)\n"
    found = cause("schedule", Value("0.01", "0", key="lr"), optimizer=SGD)
    right = text.replace("import optax", "import jaxddp.schedules\nimport optax")
    right = right.replace("sgd(rate,", "sgd(jaxddp.schedules.cosine(0.1, T_max=8),")
    assert right in made(text, 5, found, (twin, 2))
    assert right in made(text, 4, found, (twin, 3))  # the schedule's own lines are quoted


def test_any_cause_at_any_line_has_candidates_that_are_python() -> None:
    halves = Path(__file__).parents[3] / "faults" / "outside"
    values = [of[1] for of in OF_A_LINE]
    values += [Value("0", "0.5", "batch_norm", "momentum"), Value("None", "True", "x", "y")]
    rows = [*FAULTS, *EDITS]
    for number in range(8):
        port = ("convnet", "gpt", "vae", "recurrent")[number % 4]
        text, twin = ((halves / f"{port}_{side}.py").read_text() for side in ("jax", "torch"))
        optimizer = (ADAM, SGD)[number % 2]
        found = cause(rows[7 * number % len(rows)], values[number % len(values)], optimizer=optimizer)
        line, other = (1 + 17 * number % (of.count("\n") + 2) for of in (text, twin))
        for one in islice(candidates(text, line, found, (twin, other)), 40):
            ast.parse(one)


def test_a_number_is_edited_in_all_statements_together() -> None:
    text = "def f(x):\n    y = {0} * x\n    return {0} * y\n"
    values = Value("0.95", "0.99"), Value("0.855", "0.891")
    assert text.format(0.99) in made(text.format(0.95), 2, cause("number", *values))


def test_the_factor_that_the_quoted_line_of_torch_has_comes_before_edits_of_other_lines() -> None:
    others = "".join(f"    x{k} = 0.3 * x + {k}\n" for k in range(1, 40))
    text = f"def f(x):\n{others}    return x + {{}}x1 - 0.01 * x2\n"
    torch = text.format("0.5 * "), 41
    found = candidates(text.format(""), 41, cause("auxiliary_loss_scaled", Value("2", "1", is_factor=True)), torch)
    assert text.format("0.5 * ") in islice(found, 20)
