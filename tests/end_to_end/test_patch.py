"""`--patch`: edits of the JAX half that remove a difference, written only after a check of the edited port."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxddp.parity.checking import check
from jaxddp.parity.command import run
from jaxddp.parity.patch import proposals
from jaxddp.parity.progress import PATCHES
from jaxddp.parity.report.json_form import from_json
from jaxddp.parity.report.page import to_html
from jaxddp.parity.report.report import Report
from jaxddp.parity.stopping import Stop
from jaxddp.parity.workers import Workers
from tests.end_to_end.fixes.fix import between
from tests.support.schema import check_against
from tests.support.small_port import PORT, Change, own_optimizers, replaced, write

ROOT = Path(__file__).parents[2]
IMPORT = (
    "import os, time\n",
    "import os, time\nimport jax, optax\nfrom flax import nnx\nfrom jax import numpy as jnp\n",
)
LEAKY = "F.leaky_relu(self.fc1(x), 0.2)"
COSINE = "\ndef torch_scheduler(optimizer): return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)\n"
SCHEDULE = "lr, schedule = 0.1, optax.cosine_decay_schedule(0.1, 8)\n"


def scheduled(rate: str) -> Change:
    old, new = own_optimizers("SGD(parameters, lr=0.1, momentum=0.9)", f"optax.sgd(lambda t: {rate}, momentum=0.9)")
    return old, SCHEDULE + new


def optimizer(torch: str) -> tuple[Change, ...]:
    return (own_optimizers(torch, "@"),)


def loss(torch: str) -> tuple[Change, ...]:
    old = 'return cross_entropy(model(batch["x"]), batch["y"]).mean()'
    return (
        ('return F.cross_entropy(model(batch["x"]), batch["y"])', torch),
        (old, 'losses = cross_entropy(model(batch["x"]), batch["y"])\n    return @'),
    )


# Kind of fault -> changes with "@" in the place of the fault, the fault, the right code, appended code.
PATCHED: dict[str, tuple[tuple[Change, ...], str, str, str]] = {
    "gelu": (
        between("F.gelu(self.fc1(x))", "@"),
        "jax.nn.gelu(self.fc1(x))",
        "jax.nn.gelu(self.fc1(x), approximate=False)",
        "",
    ),
    "slope": (
        between(LEAKY, "@"),
        "jax.nn.leaky_relu(self.fc1(x))",
        "jax.nn.leaky_relu(self.fc1(x), negative_slope=0.2)",
        "",
    ),
    "decay": (optimizer("AdamW(parameters, lr=0.01)"), "optax.adamw(0.01)", "optax.adamw(0.01, weight_decay=0.01)", ""),
    "coupled": (
        optimizer("Adam(parameters, lr=0.01, weight_decay=0.1)"),
        "optax.adamw(0.01, weight_decay=0.1)",
        "optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.01))",
        "",
    ),
    "loss": (
        loss('return 0.5 * F.cross_entropy(model(batch["x"]), batch["y"])'),
        "0.25 * losses.mean()",
        "0.5 * losses.mean()",
        "",
    ),
    "rule": (
        optimizer("NAdam(parameters, lr=0.01)"),
        "optax.nadam(0.01)",
        "jaxddp.optim.nadam(0.01)",
        "",
    ),
    "eps": (
        between(
            "torch.tanh(self.middle(self.fc1(x)))", "nnx.tanh(self.middle(self.fc1(x)))", "torch.nn.LayerNorm(5)", "@"
        ),
        "nnx.LayerNorm(5, rngs=rngs)",
        "nnx.LayerNorm(5, rngs=rngs, epsilon=1e-05)",
        "",
    ),
    "gradient": (
        between("torch.tanh(self.fc1(x)) * self.fc1(x).detach()", "nnx.tanh(self.fc1(x)) * @"),
        "self.fc1(x)",
        "jax.lax.stop_gradient(self.fc1(x))",
        "",
    ),
    "schedule": ((scheduled("@"),), "schedule(t + 1)", "schedule(t)", COSINE),
    "residual": (
        between("F.silu(self.fc1(x)) + self.fc1(x)", "@"),
        "jax.nn.silu(self.fc1(x))",
        "jax.nn.silu(self.fc1(x)) + self.fc1(x)",
        "",
    ),
    "nesterov": (
        optimizer("SGD(parameters, lr=0.1, momentum=0.9)"),
        "optax.sgd(0.1, momentum=0.9, nesterov=True)",
        "optax.sgd(0.1, momentum=0.9, nesterov=False)",
        "",
    ),
}


def filled(kind: str, code: str) -> tuple[list[Change], str]:
    changes, _, _, more = PATCHED[kind]
    return [IMPORT, *((old, new.replace("@", code)) for old, new in changes)], more


def patched(port: Path, workers: Workers) -> Report:
    return check(port, world_size=1, steps=3, workers=workers, numerics=False, patch=True)


def applied(diff: str, folder: Path) -> None:
    (folder / "found.diff").write_text(diff)
    subprocess.run(["git", "apply", "found.diff"], cwd=folder, check=True)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kind", PATCHED)
def test_a_patch_makes_the_port_equal(kind: str, tmp_path: Path, single: Workers) -> None:
    _, wrong, right, _ = PATCHED[kind]
    changes, more = filled(kind, wrong)
    port = write(tmp_path, *changes, more=more)
    before = port.read_text()
    report = patched(port, single)
    assert port.read_text() == before
    patches = [one.patch for one in report.differences]
    assert [one and one.verdict for one in patches] == ["equal"], str(report)
    assert "  patch  verified: equal with this patch\n" in str(report)
    applied(report.patch, tmp_path)
    changes, more = filled(kind, right)
    assert port.read_text().replace("import jaxddp.optim\n", "") == replaced(PORT, *changes) + more
    check_against(json.loads((ROOT / "docs" / "parity.schema.json").read_text()), report)
    assert "verified: equal with this patch" in to_html(report)


def test_initialisers_are_patched_and_both_models_then_draw_alike(tmp_path: Path, single: Workers) -> None:
    def of(port: Path, patch: bool) -> Report:
        return check(port, world_size=1, steps=1, workers=single, numerics=False, patch=patch, causes=False)

    port = write(tmp_path, IMPORT)
    report = of(port, patch=True)
    aspect = report.aspects["initialisation"]
    assert (report.verdict, aspect.verdict) == ("equal", "differs")
    assert aspect.says[-1] == "With the patch, 4 of 4 tensors start as in torch, which draws have shown."
    assert 'kernel_init=nnx.initializers.variance_scaling(1/3, "fan_in", "uniform")' in report.patch
    applied(report.patch, tmp_path)
    assert of(port, patch=False).aspects["initialisation"].verdict == "equal"


def made(line: str) -> Change:
    """Return the change that has a line after torch's model is made."""
    return "    return TorchNet()", f"    net = TorchNet()\n    {line}\n    return net"


# Changes of a port, and of how many tensors the patch is; "": there is none.
INITIALISERS: dict[str, tuple[tuple[Change, ...], str]] = {
    "jax imported where the layers do not see it": (
        (("def jax_loss(model, batch):\n", "def jax_loss(model, batch):\n    import jax\n"),),
        "2 of 4 tensors",
    ),
    "layers that are initialised otherwise": (
        (IMPORT, made("torch.nn.init.normal_(net.fc1.weight, 0, 2)")),
        "4 of 4 tensors",
    ),
    "numbers that no initialiser draws": ((IMPORT, made("[p.data.exponential_() for p in net.parameters()]")), ""),
    "a difference beside it": ((IMPORT, ("nnx.tanh(", "nnx.relu(")), ""),
    "on purpose": (
        (IMPORT, ("import numpy as np\n", 'import numpy as np\nintended = {"initialisation": "as in the paper"}\n')),
        "",
    ),
}


@pytest.mark.large
@pytest.mark.parametrize("kind", INITIALISERS)
def test_only_initialisers_that_draws_have_verified_are_patched(kind: str, tmp_path: Path, single: Workers) -> None:
    changes, says = INITIALISERS[kind]
    port = write(tmp_path, *changes)
    report = check(port, world_size=1, steps=1, workers=single, numerics=False, patch=True, causes=False)
    assert report.aspects["initialisation"].verdict == "differs"
    assert ("_init=" in report.patch) == bool(says)
    assert not says or f"With the patch, {says} start" in report.aspects["initialisation"].says[-1]


@pytest.mark.large
def test_a_difference_that_no_step_shows_remains_beside_a_patch(tmp_path: Path, single: Workers) -> None:
    changes, _ = filled("slope", PATCHED["slope"][1])
    held = ("nnx.Linear(3, 5, rngs=rngs)", "nnx.Linear(3, 5, rngs=rngs, param_dtype=jnp.bfloat16)")
    types, slope = patched(write(tmp_path, *changes, held), single).differences
    assert types.stage == "types" and slope.patch is not None
    assert (slope.patch.verdict, slope.patch.others) == ("gone", 1)


def test_patches_of_several_causes_are_written_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = [*filled("slope", PATCHED["slope"][1])[0], *filled("decay", PATCHED["decay"][1])[0][1:]]
    port, found, kept = write(tmp_path, *two), tmp_path / "found.diff", tmp_path / "report.json"
    argv = [port, "--devices", 1, "--steps", 2, "--dtype", "float64", "--platform", "cpu", "--patch", found]
    with pytest.raises(SystemExit) as stop:
        run([*map(str, argv), "--json", str(kept)])
    assert stop.value.code == 1
    printed = capsys.readouterr().out
    assert "patch  verified: this difference is gone; 1 other remains" in printed
    assert "patch  verified: equal with 2 patches together" in printed
    assert f"patch: {found}; apply it with: patch -p1 -d {tmp_path} < {found}" in printed
    report = from_json(kept.read_text())
    assert found.read_text() == f"# jaxddp.parity --patch\n{report.patch}" and report.patch.count("@@") == 4
    subprocess.run(["git", "apply", "found.diff"], cwd=tmp_path, check=True)
    right = [*filled("slope", PATCHED["slope"][2])[0], *filled("decay", PATCHED["decay"][2])[0][1:]]
    assert port.read_text() == replaced(PORT, *right)


def test_edits_that_do_not_help_or_make_something_worse_are_rejected(
    tmp_path: Path, single: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = replaced(PORT, *filled("slope", PATCHED["slope"][1])[0])
    right = replaced(PORT, *filled("slope", PATCHED["slope"][2])[0])
    edits = [
        text.replace("leaky_relu(self.fc1(x))", "leaky_relu(self.fc1(x), 0.3)"),  # another difference
        text.replace("leaky_relu(self.fc1(x))", "leaky_relu(self.fc1(x), no_such_name)"),  # raises
        right.replace(
            'optimizer = "sgd"', own_optimizers("SGD(parameters, lr=0.05)", "optax.sgd(0.1)")[1]
        ),  # a new one
        right.replace("return TorchNet()", "torch.manual_seed(5); return TorchNet()"),  # another reference
    ]
    monkeypatch.setattr(proposals, "candidates", lambda *args: iter(edits))
    port = tmp_path / "port.py"
    port.write_text(text)
    report = patched(port, single)
    patch = report.differences[0].patch
    assert report.patch == "" and patch is not None
    assert patch.why_not == proposals.NO_EDIT.format(4) and "  patch  none: none of the 4 edits" in str(report)


@pytest.mark.large
def test_a_check_that_ends_while_edits_are_tried_says_so(
    tmp_path: Path, single: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Stop()

    def ending(*args: object) -> Iterator[str]:
        stop.why = "Ctrl-C"
        yield PORT

    monkeypatch.setattr(proposals, "candidates", ending)
    port = write(tmp_path, *filled("slope", PATCHED["slope"][1])[0])
    report = check(port, world_size=1, steps=2, workers=single, numerics=False, patch=True, time_limit=stop)
    patch = report.differences[0].patch
    assert patch is not None and patch.why_not == proposals.ENDED
    assert (report.patch, report.ended, report.untried) == ("", "Ctrl-C", (PATCHES,))


def test_a_cause_without_a_line_says_so(tmp_path: Path, single: Workers) -> None:
    shifted = """
class Shifted:
    def __call__(self, step, rank):
        found = torch_batch(step, rank)
        return found | {"y": np.roll(found["y"], -1)}

jax_batch = Shifted()
"""
    report = patched(write(tmp_path, ("def batch(", "def torch_batch("), more=shifted), single)
    (patch,) = [one.patch for one in report.differences]
    assert report.patch == "" and patch is not None and patch.why_not == proposals.NO_LINE, str(report)
    assert f"  patch  none: {proposals.NO_LINE}" in str(report)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--patch", "found.diff"], "--patch found.diff: must be given with PROGRAM.py"),
        (["PORT", "--patch", "nowhere/found.diff"], "--patch nowhere/found.diff: folder nowhere does not exist"),
    ],
)
def test_wrong_flags_are_errors_of_one_line(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run([str(write(tmp_path)) if word == "PORT" else word for word in argv])
    assert stop.value.code == 2
    assert capsys.readouterr().err.strip() == f"error: {message}"
