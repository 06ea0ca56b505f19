"""The evaluation of a port, its outputs, losses and metrics, is compared with the weights after torch's run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jaxddp.parity import checking, reporting
from jaxddp.parity.checking import check
from jaxddp.parity.coverage import Aspect
from jaxddp.parity.report.report import Report
from jaxddp.parity.report.sentences import sentences
from jaxddp.parity.workers import Workers
from tests.support.evaluated_ports import LINEN, NNX, PLAIN, PORTS
from tests.support.small_port import PORT, Change, replaced, write

Evaluated = Callable[..., Report]
PREDICT = "def predict(model, batch):\n"
METRICS = "def metrics(logits, batch):\n"


class Nothing:
    def __init__(self, *_: object): ...

    def compare(self) -> tuple[tuple[()], tuple[()]]:
        return (), ()


@pytest.fixture
def evaluated(tmp_path: Path, single: Workers, monkeypatch: pytest.MonkeyPatch) -> Evaluated:
    monkeypatch.setattr(reporting, "BeyondRun", Nothing)  # which has tests of its own
    monkeypatch.setattr(checking, "initialisation", lambda runs: None)

    def of_text(text: str, *changes: Change, more: str = "") -> Report:
        path = write(tmp_path, *changes, more=more, text=text)
        return check(path, world_size=1, steps=2, workers=single, numerics=False)

    return of_text


def in_jax(*lines: str) -> Change:
    """Return the change that puts lines at the start of predict, for the jax model alone."""
    code = "".join(f"        {line}\n" for line in lines)
    return PREDICT, f"{PREDICT}    if not isinstance(model, torch.nn.Module):\n{code}"


def of(report: Report) -> Aspect:
    return report.aspects["evaluation"]


def cause_of(report: Report) -> str:
    (difference,) = report.differences
    assert (report.verdict, difference.stage, of(report).verdict) == ("different", "evaluation", "differs")
    return sentences(difference.cause)[0] if difference.cause else difference.detail


@pytest.mark.one_in(3)
@pytest.mark.parametrize("style", PORTS)
def test_a_right_file_of_each_style_has_an_equal_evaluation(evaluated: Evaluated, style: str) -> None:
    report = evaluated(PORTS[style])
    assert (report.verdict, of(report).verdict, of(report).says) == ("equal", "equal", ())


TRAINS = [
    (NNX, in_jax("model.norm.use_running_average = False"), "BatchNorm takes the batch's statistics"),
    (NNX, in_jax("model.drop.deterministic = False"), "dropout is on in jax's evaluation"),
    (NNX, in_jax("model.train()"), "jax's model is in training mode"),
    (PLAIN, ('batch["x"], train=False', 'batch["x"], train=True'), "BatchNorm takes the batch's statistics"),
    (
        LINEN,
        in_jax("import jax", 'return model(batch["x"], train=True, rngs={"dropout": jax.random.key(0)})'),
        "dropout is on in jax's evaluation",
    ),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("text", "change", "says"), TRAINS, ids=["norm", "dropout", "both", "tree", "linen"])
def test_a_mode_of_training_in_evaluation_is_named(evaluated: Evaluated, text: str, change: Change, says: str) -> None:
    report = evaluated(text, change)
    assert says in cause_of(report) and of(report).tensor == "predict"
    assert "predict" in report.differences[0].cause.jax.itself  # type: ignore[union-attr]


def test_a_loss_that_is_in_training_mode_in_the_test_is_a_difference(evaluated: Evaluated) -> None:
    report = evaluated(LINEN, ("train=train", "train=True"), more="\n\npredict = metrics = None\n")
    assert "dropout is on in jax's evaluation" in cause_of(report) and of(report).tensor == "loss"


def test_a_torch_model_that_always_trains_is_named(evaluated: Evaluated) -> None:
    trains = f"{PREDICT}    if isinstance(model, torch.nn.Module):\n        model.train()\n"
    assert "the reference's model computes in evaluation" in cause_of(evaluated(NNX, (PREDICT, trains)))


def test_outputs_that_do_not_depend_on_the_weights_are_named(evaluated: Evaluated) -> None:
    begin = "    params, state, batch = arguments\n"
    says = cause_of(evaluated(PLAIN, (begin, f"{begin}    params, state = jax_model()\n")))
    assert "depend on none of the weights" in says


DROPPED = ['x = batch["x"][: len(batch["x"]) // 8 * 8]', "return model(x)"]
ZEROED = ['y = model(batch["x"])', "return y.at[len(y) // 8 * 8 :].set(0)"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("lines", [DROPPED, ZEROED], ids=["dropped", "zeroed"])
def test_a_last_batch_that_is_cut_off_is_named(evaluated: Evaluated, lines: list[str]) -> None:
    assert "only the last batch differs, which has 13 examples" in cause_of(evaluated(NNX, in_jax(*lines)))


BY_SIZE = '    return {"accuracy": (logits.argmax(-1) == batch["y"]).sum() / 16}\n\n\n'
OF_MEANS = """    right, weights = logits.argmax(-1) == batch["y"], batch["y"] + 1
    return {"accuracy": (right * weights).sum() / weights.sum()}


def torch_metrics(logits, batch):
    return {"accuracy": (logits.argmax(-1) == batch["y"]) * (batch["y"] + 1) / 1.4}


"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("body", [BY_SIZE, OF_MEANS], ids=["size", "means"])
def test_metrics_are_averaged_over_the_examples_as_the_trainers_do(evaluated: Evaluated, body: str) -> None:
    report = evaluated(NNX, (METRICS, f"def jax_metrics(logits, batch):\n{body}{METRICS}"))
    detail = cause_of(report)
    assert of(report).tensor == "accuracy" and ("only the last batch" in detail) == (body == BY_SIZE)


def test_a_metric_that_the_trainers_padding_changes_is_named(evaluated: Evaluated) -> None:
    above = '"spread": (logits[:, 0] - logits[:, 0].mean()) ** 2, "accuracy"'
    assert "fills up the last batch" in cause_of(evaluated(NNX, ('"accuracy"', above)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["predict", "metrics"])
def test_what_raises_on_one_side_is_not_compared_and_changes_no_verdict(evaluated: Evaluated, name: str) -> None:
    alone = f'def jax_metrics(logits, batch):\n    return batch["z"]\n\n\n{METRICS}'
    report = evaluated(NNX, in_jax('return batch["z"]') if name == "predict" else (METRICS, alone))
    assert (report.verdict, of(report).verdict) == ("equal", "not compared")
    assert f"Not compared in evaluation: {name}" in of(report).says[0] and "KeyError: 'z'" in of(report).says[0]


NOISE = """
def predict(model, batch):
    if isinstance(model, torch.nn.Module):
        return model(batch["x"]) + torch.randn(())
    import jax
    return model(batch["x"]) + jax.random.normal(jax.random.key(0), ())
"""


@pytest.mark.large
def test_draws_are_constants_and_those_that_cannot_be_leave_the_evaluation_out(evaluated: Evaluated) -> None:
    assert of(evaluated(NNX, more=NOISE)).verdict == "equal"
    report = evaluated(NNX, more=NOISE.replace("jax.random.normal", "jax.random.gumbel"))
    assert report.verdict == "equal" and "jax draws random numbers" in of(report).says[0]


OF_PORT = """
def predict(model, batch):
    return {"logits": model(batch["x"])}

def metrics(outputs, batch):
    return {"accuracy": outputs["logits"].argmax(-1) == batch["y"]}
"""


def test_a_port_without_test_data_is_evaluated_on_the_batches_of_its_run(evaluated: Evaluated) -> None:
    report = evaluated(PORT, more=OF_PORT)
    assert (of(report).verdict, of(report).tensor) == ("equal", "predict.logits")
    scaled = replaced(OF_PORT, ('model(batch["x"])', 'model(batch["x"]) * (1 + 1e-4 * hasattr(model, "eval_shape"))'))
    assert of(evaluated(PORT, more=scaled)).verdict == "equal"


def test_rounding_to_float32_in_an_output_is_no_difference(evaluated: Evaluated) -> None:
    """Only one side multiplies by a number in float32. A factor of 1.0001 is a difference."""
    for factor, verdict in (("np.float32(0.1)", "equal"), ("0.10001", "differs")):
        report = evaluated(NNX, in_jax(f'return model(batch["x"]) * {factor} * 10'))
        assert of(report).verdict == verdict and 1e-12 < of(report).residual < 1e-3


ROUNDED = """

def torch_metrics(logits, batch):
    return {"noise": logits[:, 0] * 0.1 / 0.1 > logits[:, 0]}


def jax_metrics(logits, batch):
    return {"noise": logits[:, 0] * 0.3 / 0.3 > logits[:, 0]}
"""


def test_a_metric_that_hangs_on_the_last_bit_is_no_difference(evaluated: Evaluated) -> None:
    report = evaluated(NNX, more=ROUNDED)
    assert report.verdict == "equal" and of(report).verdict == "not compared"
    assert "noise, since it changes with the last bit of the weights" in of(report).says[0]


def test_a_run_whose_losses_differ_has_no_second_difference(evaluated: Evaluated) -> None:
    report = evaluated(NNX, ("self.drop(nnx.tanh", "self.drop(1.01 * nnx.tanh"))
    assert {difference.stage for difference in report.differences} == {"local_loss"}
    assert of(report).says == ("The evaluation was not compared, since the loss of the run differs.",)


def test_a_port_without_an_evaluation_has_no_row(evaluated: Evaluated) -> None:
    assert evaluated(PORT).aspects.get("evaluation") is None


NONE = "\n\ntest_data = predict = metrics = None\n"


def test_losses_of_a_port_without_an_evaluation_are_compared_in_evaluation_mode(evaluated: Evaluated) -> None:
    report = evaluated(NNX, more=NONE)
    assert (of(report).verdict, of(report).tensor) == ("equal", "loss")
    only_in_training = ("self.drop(nnx.tanh(", "self.drop((1 if self.drop.deterministic is False else 2) * nnx.tanh(")
    report = evaluated(NNX, only_in_training, more=NONE)
    assert (report.verdict, of(report).verdict) == ("equal", "not compared")
    assert of(report).says[0].startswith("The losses differ in evaluation mode, residual")


@pytest.mark.large
def test_a_port_that_gives_its_modes_by_hand_has_no_row(evaluated: Evaluated) -> None:
    of_linen = ("train=train", "train=True")
    of_nnx = ("def jax_loss(model, batch):\n", "def jax_loss(model, batch):\n    model.train()\n")
    for text, change in ((LINEN, of_linen), (NNX, of_nnx)):
        report = evaluated(text, change, more=NONE)
        assert report.verdict == "equal" and "evaluation" not in report.aspects
