"""Faults outside of the catalogue, in ports as their users write them: the examination itself is sound.

`python -m benchmarks.scoreboard --parts outside` scores what the check says of each fault.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scoreboard.document import to_markdown
from benchmarks.scoreboard.kept import Kept
from benchmarks.scoreboard.outside import OutsideScore, Place
from jaxddp.parity.catalogue import FAULTS
from jaxddp.parity.checking import check
from jaxddp.parity.findings import ORDER
from jaxddp.parity.port import load_port
from jaxddp.parity.report.sentences import sentences
from jaxddp.parity.workers import Workers
from tests.faults.outside import OUTSIDE, PORTS, STEPS, WORLD_SIZE, write_correct_port, write_port
from tests.faults.outside.fault import FOLDER, edited, line_of, source


@pytest.fixture(scope="module")
def pair() -> Iterator[Workers]:
    with Workers(WORLD_SIZE, "cpu") as workers:
        yield workers


@pytest.mark.parametrize("label", OUTSIDE)
def test_a_fault_is_an_edit_of_the_file_and_has_its_lines(label: str) -> None:
    fault = OUTSIDE[label]
    text = edited(fault.port, fault.edits)
    compile(text, fault.files[0], "exec")
    assert text != source(fault.files[0])
    ours, reference = fault.lines
    assert text.splitlines()[ours - 1].strip() and source(fault.files[1]).splitlines()[reference - 1].strip()


@pytest.mark.parametrize("label", OUTSIDE)
def test_a_fault_has_words_that_its_own_description_fits(label: str) -> None:
    fault = OUTSIDE[label]
    assert fault.expects and fault.place and fault.ours and fault.reference and fault.kind
    assert fault.ours != fault.reference
    for expression in (*fault.expects, fault.place):
        assert not re.search(expression, "")
    assert not fault.named_by("") and not fault.named_by("an unexplained difference")
    assert fault.stage in ORDER and 1 <= fault.step <= STEPS[fault.port]
    assert not fault.known or fault.known in FAULTS


def test_there_are_sixty_faults_that_the_catalogue_lacks_in_nine_ports() -> None:
    by_port = Counter(fault.port for fault in OUTSIDE.values() if not fault.known)
    assert by_port.total() >= 60
    assert by_port.keys() == {*PORTS} == {path.stem.removesuffix("_jax") for path in FOLDER.glob("*_jax.py")}
    assert min(by_port.values()) >= 8


@pytest.mark.parametrize("port", PORTS)
def test_a_port_file_joins_both_sources(port: str, tmp_path: Path) -> None:
    loaded = load_port(write_correct_port(port, tmp_path), WORLD_SIZE)
    assert loaded.micro_batches(0, 0)
    assert {path.name for path in tmp_path.glob("*.py")} == {"port.py", f"{port}_jax.py", f"{port}_torch.py"}


def test_an_edit_must_fit_once() -> None:
    with pytest.raises(ValueError, match=r"mlp_jax.py: has 'no such text' 0 times"):
        edited("mlp", (("no such text", ""),))
    with pytest.raises(ValueError, match="is in 2 lines"):
        line_of("a\na\n", "a")


SLOPE = OUTSIDE["mlp/slope"]


def scored(said: tuple[str, ...], place: Place, text: str = "") -> OutsideScore:
    return OutsideScore("mlp/slope", SLOPE, "different", said, (place,), text, 1.0)


def test_a_score_counts_words_places_and_lines() -> None:
    loss = Place("local_loss", 1, "loss")
    right = scored(("leaky_relu has slope 0.01, the reference has 0.2",), loss)
    assert right.named and right.located and not right.wrong and right.in_stage
    half = scored(("leaky_relu has slope 0.01",), loss)
    assert half.wrong and not half.named and not half.located
    silent = scored(("",), loss)
    assert not silent.wrong and not silent.located and silent.found
    assert scored(("",), Place("local_loss", 1, "loss", "fc1")).located
    between = scored(("",), Place("local_loss", 1, "loss", "norm", "fc1"))
    assert between.near and not between.located
    assert not scored(("",), Place("local_loss", 1, "loss", "head", "up")).near
    patched, unnamed = (replace(of, patches=("gone", "equal")) for of in (right, silent))
    assert patched.patched and patched.patchable and not right.patched and not unnamed.patchable
    assert not replace(right, patches=("equal", "gone")).patched
    ours, reference = SLOPE.lines
    assert scored(("",), loss, f"at mlp_jax.py:{ours}; mlp_torch.py, line {reference}").lines == (True, True)
    assert scored(("",), loss, f"at mlp_jax.py:{ours}0; mlp_torch.py:{reference - 1}").lines == (False, False)


def test_a_score_is_kept_and_is_a_row_of_the_scoreboard(tmp_path: Path) -> None:
    score = scored(("slope 0.01, the reference has 0.2",), Place("local_loss", 1, "loss", "norm", "fc1"))
    score = replace(score, patches=("equal",))
    key = "outside", "mlp/slope"
    Kept(tmp_path / "scores.jsonl").add(key, score)
    kept = Kept(tmp_path / "scores.jsonl")
    assert kept.outside(key, SLOPE) == score and kept.outside(("outside", "mlp/scale"), SLOPE) is None
    facts = dict.fromkeys(("command", "date", "hardware", "python", "jax", "flax", "optax", "torch"), "x")
    text = to_markdown({}, [score], [], facts, {})
    assert "1 found, 1 named, 0 named wrongly, 1 named or located, 0 more between two layers" in text
    assert "| of these, named ones of model, loss, optimizer and schedule | 1 | 1 with a patch after which" in text
    assert "| mlp/slope | constant | negative_slope 0.01; the reference: negative_slope 0.2 | local_loss 1 loss" in text


def test_faults_share_no_code_with_the_check() -> None:
    for path in FOLDER.glob("*.py"):
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom | ast.Import)
        ]
        assert not [node for node in nodes if "parity" in ast.unparse(node)], path


@pytest.mark.large
@pytest.mark.parametrize("port", PORTS)
def test_a_correct_port_is_equal(port: str, pair: Workers, tmp_path: Path) -> None:
    path = write_correct_port(port, tmp_path)
    report = check(path, world_size=WORLD_SIZE, steps=STEPS[port], numerics=False, workers=pair)
    assert report.verdict == "equal", str(report)


# Faults of which another line than the fault's is quoted, and what it contains; "": the fault's own is; None: no line.
MEAN, GAE = 'jax.lax.pmean(gradients, "replica")', "return jax.lax.scan(step, start,"
NEIGHBOURS: dict[str, tuple[str | None, str | None]] = {
    "mlp/momentum_reset": ("jax_optimizer = optax.chain(", ""),
    "mlp/rate_for_biases": ("optax.partition(rates,", ""),
    "mlp/labels_shifted": ("def jax_batch(", "def torch_batch("),
    "mlp/contiguous_shards": ("def jax_batch(", "def torch_batch("),
    "convnet/class_weights_squared": ("losses = optax.softmax_cross_entropy_with_integer_labels(", ""),
    "convnet/frozen_bias": ("optax.partition(rules,", ""),
    "gpt/mask_missing_in_one_layer": ("scores = jnp.einsum(", ""),
    "gpt/targets_two_ahead": ("", 'batch["tokens"][:, :-1]'),
    "gpt/last_rate": ("return LR * jnp.where(count < WARMUP", ""),
    "encoder/rates_reversed": ("optax.partition(", "torch.optim.Adam(groups"),
    "encoder/squared_decay": ("optax.partition(", ""),
    "recurrent/forget_bias": ("", "one, (h, c) = self.lstm(first)"),
    "recurrent/gate_order": ("c = jax.nn.sigmoid(f) * c", ""),
    "recurrent/reset_before_product": ("r_h, z_h, n_h = jnp.split(", ""),
    "recurrent/not_turned_back": ("both = jnp.concatenate(", ""),
    "recurrent/read_forwards_twice": ("x = jnp.concatenate([one, two]", ""),
    "recurrent/state_not_stopped": ("c = jax.nn.sigmoid(f) * c", ""),
    "recurrent/clip_by_value": (MEAN, ""),
    "recurrent/decay_after_update": ("jax_optimizer = optax.adam(LR)", ""),
    "recurrent/biases_not_averaged": ("", None),
    "vae/std_is_exp_logvar": ("jnp.clip(self.logvar(h)", ""),
    "vae/floor_after_mean": ("return (reconstruction + BETA", "return (reconstruction + BETA"),
    "vae/softplus_beta": ("jax.nn.softplus(beta * x) / beta", ""),
    "diffusion/ema_before_update": ('nnx.update(model["ema"]', "optimizer.step()"),
    "actor_critic/discount": ("carried = delta + 0.95", ""),
    "actor_critic/dones_a_step_early": ("deltas = rewards + 0.99", ""),
    "actor_critic/last_value_left_out": ("carried = delta + 0.99", ""),
    "actor_critic/gradient_of_returns": ("value_loss = optax.huber_loss(", "value_loss = F.smooth_l1_loss("),
    "actor_critic/gradient_of_advantages": ("advantages = (advantages", "advantages = (advantages"),
    "actor_critic/advantages_not_normalised": (GAE, ""),
}


# Faults whose words lack some of the exam's: what these have, or the code of their segments.
SAID = {
    "vae/logvar_taken_for_log_std": ("in exp times 2", "in add times 2", r"logvar, 0.2\) \* 2"),
    "vae/floor_after_mean": (r"maximum\(\(sum\(divergence\) / 8\), 0.125\)", r"clamp\(divergence, min=0.125\)"),
    "actor_critic/last_value_left_out": (
        r"left out of add in the loss \(call 1\)",
        r"\(going_on \* 0.99\) \* .*values",
    ),
}


# Faults that are located and not named: the floor hides nearly all values, so that many faults do the same.
NOT_NAMED = {"vae/free_bits"}


@pytest.mark.one_in(125, first=2)
@pytest.mark.parametrize("label", OUTSIDE)
def test_a_fault_is_named_where_it_first_shows_with_its_lines(label: str, pair: Workers, tmp_path: Path) -> None:
    fault = OUTSIDE[label]
    path = write_port(fault, tmp_path)
    report = check(path, world_size=WORLD_SIZE, steps=STEPS[fault.port], numerics=False, workers=pair)
    causes = [one.cause for one in report.differences if one.cause is not None]
    assert causes and not report.problems, str(report)
    words = "; ".join(says for cause in causes for says in sentences(cause))
    if label in SAID:
        code = "; ".join(f"{x.jax_code}; {x.torch_code}" for one in report.differences for x in one.segments)
        assert all(re.search(piece, f"{words}; {code}") for piece in SAID[label]), str(report)
    elif label not in NOT_NAMED:
        assert fault.named_by(words), str(report)
    first = min(report.differences, key=lambda one: ORDER.index(one.stage))
    assert (first.stage, first.step) == (fault.stage, fault.step)
    if label in NOT_NAMED:
        return
    quotes, other = (causes[0].jax, causes[0].torch), NEIGHBOURS.get(label, ("", ""))
    for quote, file, number, text in zip(quotes, fault.files, fault.lines, other, strict=True):
        if quote is None:
            assert text is None
            continue
        assert Path(quote.path).name == file
        assert quote.line == number or (text and text in quote.itself)


def test_most_faults_are_quoted_by_their_own_lines() -> None:
    assert {*NEIGHBOURS, *SAID, *NOT_NAMED} <= OUTSIDE.keys()
    assert len(NOT_NAMED) <= 5
    assert len(NEIGHBOURS) <= 0.25 * len(OUTSIDE)  # measured: 27 of 125


def test_a_port_with_a_fault_differs_from_the_correct_port_in_one_file(tmp_path: Path) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
    write_correct_port("mlp", tmp_path / "right")
    write_port(SLOPE, tmp_path / "wrong")
    texts = {path.name: path.read_text() for path in (tmp_path / "right").iterdir()}
    assert [path.name for path in (tmp_path / "wrong").iterdir() if path.read_text() != texts[path.name]] == [
        "mlp_jax.py"
    ]
