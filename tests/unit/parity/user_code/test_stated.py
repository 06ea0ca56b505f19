"""Lines at which values stand: in a constant, in the call that makes a layer, or in the quoted line itself."""

from pathlib import Path

import pytest

from jaxddp.parity.deviation import Deviation, Statement, Value
from jaxddp.parity.operations import Lines, SourceLine
from jaxddp.parity.user_code.stated import (
    alias_of,
    call_in,
    called_at,
    made_at,
    named_at,
    renamed_at,
    stated_at,
    stating,
    where_stated,
)

FILE = """\
SLOPE, WIDTH = 0.2, 16
GROUPS = 4


def normalised(x):
    return LayerNorm(epsilon=1e-3)(x * 7)


class Block(Module):
    eps: float = 1e-6

    def __init__(self):
        self.norm, self.other = GroupNorm(2, 8), GroupNorm(4, 8)
        self.named = GroupNorm(GROUPS, 8)
        self.conv = Conv(
            3,
            padding_mode="zeros",
        )

    def forward(self, x):
        scale = 0.5
        x = self.norm(self.other(x)) * scale
        x = leaky_relu(self.named(x), SLOPE)
        x = rms_norm(x, self.eps) / WIDTH**-0.5
        x = where(
            x > 3,
            self.conv(x),
            0.25,
        )
        return normalised(x)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "model.py"
    file.write_text(FILE)
    return str(file)


def at(text: str) -> int:
    (number,) = (k for k, line in enumerate(FILE.splitlines(), start=1) if text in line)
    return number


def deviation(value: Value, where: str = "") -> Deviation:
    return Deviation("number", Statement(""), (value,), where)


@pytest.mark.parametrize(
    ("line", "value", "stands"),
    [
        ("leaky_relu", (Value("0.2", "0.01"), ""), "SLOPE, WIDTH"),
        ("* scale", (Value("0.5", "0.25"), ""), "scale = 0.5"),
        ("self.norm(self", (Value("2", "8"), "blocks.0.norm"), "self.norm, self.other"),
        ("leaky_relu", (Value("4", "8"), "named"), "GROUPS = 4"),
        ("rms_norm", (Value("1e-06", "1e-05"), ""), "eps: float"),
        ("self.conv(x)", (Value("'zeros'", "'circular'"), "conv"), "padding_mode="),
        ("return norm", (Value("0.001", "1e-05"), ""), "LayerNorm(epsilon"),
        ("x = where(", (Value("0.25", "0"), ""), "0.25,"),
        ("self.conv(x)", (Value("3", "4"), ""), "x > 3"),
    ],
)
def test_a_value_is_quoted_where_it_stands(line: str, value: tuple[Value, str], stands: str, path: str) -> None:
    found = where_stated(Lines(SourceLine(path, at(line)), None), deviation(*value))
    assert found == Lines(SourceLine(path, at(stands)), None)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("leaky_relu", (Value("0.3", "0.01"), "")),  # it stands nowhere
        ("rms_norm", (Value("0.25", "4"), "")),  # WIDTH**-0.5 is no number of the text
        ("self.norm(self", (Value("4", "2"), "blocks.0.norm")),  # that of another layer
        ("return norm", (Value(), "")),
        ("return norm", (Value("7", "8"), "")),  # no keyword in what the function returns
        ("return norm", (Value("in", "2d"), "conv")),  # words that are no code
        ("x > 3", (Value("3", "4"), "")),  # the line has it
    ],
)
def test_other_lines_stay(line: str, value: tuple[Value, str], path: str) -> None:
    lines = Lines(SourceLine(path, at(line)), None)
    assert where_stated(lines, deviation(*value)) == lines


def test_both_sides_are_followed_by_their_values(path: str) -> None:
    used = SourceLine(path, at("leaky_relu"))
    found = where_stated(Lines(used, used), deviation(Value("4", "0.2"), "named"))
    assert found == Lines(SourceLine(path, at("GROUPS = 4")), SourceLine(path, at("SLOPE, WIDTH")))


def test_a_layer_is_quoted_where_it_is_made(path: str) -> None:
    called = SourceLine(path, at("self.norm(self"))
    assert made_at(called, "other") == SourceLine(path, at("self.norm, self.other"))
    assert made_at(called, "conv") == made_at(called, "gone") == called  # the line does not call them
    assert made_at(None, "norm") is None


def test_a_file_that_is_gone_keeps_its_line(tmp_path: Path) -> None:
    line = SourceLine(str(tmp_path / "gone.py"), 3)
    assert where_stated(Lines(line, line), deviation(Value("1e-6", "1e-5"))) == Lines(line, line)


def test_a_schedule_is_quoted_where_it_is_made(tmp_path: Path) -> None:
    file = tmp_path / "port.py"
    file.write_text("rates = optax.cosine_decay_schedule(LR, 10)\nother = count(3)\ntx = optax.sgd(rates, other)\n")
    optimizer = SourceLine(str(file), 3)
    assert called_at(optimizer, ["cosine_decay_schedule"]) == SourceLine(str(file), 1)
    assert called_at(optimizer, ["constant_schedule"]) is called_at(None, ["count"]) is None


def test_a_schedule_is_quoted_in_the_function_that_makes_the_optimizer(tmp_path: Path) -> None:
    file = tmp_path / "port.py"
    file.write_text(
        "def adam(lr):\n    return optax.adam(optax.cosine_decay_schedule(lr, 10))\n\n\ntx = masked(adam(0.1))\n"
    )
    assert called_at(SourceLine(str(file), 5), ["cosine_decay_schedule"]) == SourceLine(str(file), 2)


def test_a_list_is_quoted_where_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "port.py"
    file.write_text(
        "WEIGHTS = [1.0, -0.5]\n\n\ndef loss(x):\n    scales = x.new_tensor(WEIGHTS)\n    return x * scales\n"
    )
    used = SourceLine(str(file), 5)
    assert stated_at(used, "new_tensor(x, [1, -0.5])") == stated_at(used, "[1.0, -0.5]") == SourceLine(str(file), 1)
    assert stated_at(used, "[1.0, 0.5]") == stated_at(used, "[1.0]") == used


def test_the_last_call_of_a_function_in_another_one(tmp_path: Path) -> None:
    file = tmp_path / "port.py"
    file.write_text("def step(p):\n    u = optimizer.update(p)\n    p = optax.apply_updates(p, u)\n    return p\n")
    step = SourceLine(str(file), 1)
    assert call_in(step, ("apply_updates", "update")) == SourceLine(str(file), 3)
    assert call_in(step, ("other",)) is call_in(None, ("update",)) is None


def test_a_layer_is_quoted_where_it_gets_its_name(tmp_path: Path) -> None:
    file = tmp_path / "port.py"
    file.write_text(
        "class Net:\n    def __init__(self):\n        self.torso = Linear(3)\n\n\np = {\n    'head': {'w': 1}\n}\n"
    )
    last = SourceLine(str(file), 6)
    found = [named_at(last, path) for path in ("torso.weight", "head.w", "torso.norm.scale", "other.w")]
    assert found == [SourceLine(str(file), 3), SourceLine(str(file), 7), SourceLine(str(file), 3), last]
    assert named_at(None, "torso.weight") is None


@pytest.mark.parametrize(
    ("last", "line"),
    [
        ("    h = time\n    return h", 3),
        ("    h = 2 * time\n    return h", 2),
        ("    h = time\n    k = time\n    return h + k", 2),
    ],
)
def test_another_name_of_a_value_is_quoted(last: str, line: int, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(f"def call(x):\n    time = silu(x)\n{last}\n")
    assert renamed_at(SourceLine(str(path), 2)) == SourceLine(str(path), line)


PORT = """\
def mask(params):
    return tree.map(lambda p: p.ndim > 1, params)


def softplus(x, beta):
    return log1p(exp(beta * x)) / beta


def loss(model, batch):
    h = softplus(model(batch), 2.5)
    u = h
    targets = smooth_labels(batch, 0.3)
    return cross_entropy(u, targets)


def groups(model):
    depths = {
        "embedding": 0,
        "layers.0": 1,
    }
    parts = [{"params": model[name], "lr": 0.1} for name, depth in depths.items()]
    return Adam(parts)


tx = adamw(0.1, weight_decay=0.2, mask=mask)
"""


@pytest.fixture
def port(tmp_path: Path) -> Path:
    file = tmp_path / "port.py"
    file.write_text(PORT)
    return file


def of_port(port: Path, text: str) -> SourceLine:
    (number,) = (k for k, line in enumerate(PORT.splitlines(), start=1) if text in line)
    return SourceLine(str(port), number)


def test_a_value_that_a_call_before_states_is_quoted_there(port: Path) -> None:
    lines = Lines(of_port(port, "return cross_entropy"), None)
    assert where_stated(lines, deviation(Value("0.3", "0.1"))).jax == of_port(port, "smooth_labels")


def test_a_number_that_a_caller_gives_a_function_is_quoted_there(port: Path) -> None:
    lines = of_port(port, "log1p"), of_port(port, "h = softplus")
    assert stating(lines, "2.5") == lines[1]
    assert stating(lines, "7.5") is None


def test_the_name_by_which_a_line_uses_a_value_is_quoted(port: Path) -> None:
    assert alias_of(of_port(port, "return cross_entropy")) == of_port(port, "u = h")
    assert alias_of(of_port(port, "u = h")) == of_port(port, "u = h")
    assert alias_of(None) is None


@pytest.mark.parametrize(("kind", "key"), [("decay_mask", ""), ("decay_value", "weight_decay")])
def test_a_mask_is_quoted_where_it_is_computed(kind: str, key: str, port: Path) -> None:
    made = Lines(of_port(port, "adamw"), None)
    fault = Deviation(kind, Statement(""), (Value("0", "0.1", key=key),))
    assert where_stated(made, fault).jax == of_port(port, "tree.map")
    assert where_stated(made, Deviation("betas", Statement(""))) == made


def test_the_rates_of_groups_are_quoted_where_they_are_listed(port: Path) -> None:
    made = Lines(of_port(port, "adamw"), of_port(port, "Adam(parts)"))
    assert where_stated(made, Deviation("rate_of_some", Statement(""))).torch == of_port(port, '"lr": 0.1')


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("layers.0.up.weight", "layers.0.up.bias"), '"layers.0": 1'),
        (("layers.0.up.weight", "embedding.weight"), '"lr": 0.1'),
        (("layers.01.weight",), '"lr": 0.1'),
    ],
)
def test_the_rate_of_one_group_is_quoted_where_its_module_is_listed(
    names: tuple[str, ...], text: str, port: Path
) -> None:
    made = Lines(of_port(port, "adamw"), of_port(port, "Adam(parts)"))
    fault = Deviation("rate_of_some", Statement("rates_of_tensors", each=((names, 2.0),), alone=()))
    assert where_stated(made, fault).torch == of_port(port, text)


def test_the_references_value_of_a_factor_is_looked_for_nowhere(port: Path) -> None:
    made = Lines(None, of_port(port, "return cross_entropy"))
    factor, number = Value("2", "0.3", is_factor=True), Value("2", "0.3")
    assert where_stated(made, Deviation("factor", Statement(""), (factor,))) == made
    assert where_stated(made, Deviation("number", Statement(""), (number,))) != made
