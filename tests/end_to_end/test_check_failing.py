"""What a check must bear: sides that raise, hang, die, or do not fit cost their own part of the report, in a line."""

import contextlib
import gc
import math
import os
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from jaxddp.parity.checking import check
from jaxddp.parity.family import family
from jaxddp.parity.findings import Problem
from jaxddp.parity.port.port import Side
from tests.support.checks import FORGETS_MOMENTS, FROZEN, STEPS, Checked
from tests.support.small_port import RENAMED, Change, at_start_of, line_of, own_optimizers, step, write

# A bias that does not learn.
KINDS = (
    "self.fc1 = nnx.Linear(3, 5, rngs=rngs)",
    "self.fc1 = nnx.Linear(3, 5, rngs=rngs)\n            self.fc1.bias = nnx.Variable(self.fc1.bias[...])",
)
HANGING = 5.0  # seconds without a word
TIMEOUT = 25.0  # longer than what runs between two words on a busy machine, and than a start of both sides


def test_a_loss_that_raises_is_told_with_its_line(failing: Checked, tmp_path: Path) -> None:
    raises = 'raise ValueError("no such loss")'
    message = "{}: ValueError: no such loss"
    for function, side, where in (
        ("jax_loss(model, batch)", "jax", "jax_model or step 1"),
        ("torch_loss(model, batch)", "torch", "torch rank 0, step 1"),
    ):
        report = failing(at_start_of(function, raises))
        assert report.verdict == "incomplete" and not report.stages
        assert report.problems == (Problem(side, where, message.format(line_of(tmp_path / "port.py", raises))),)
        assert len(report.losses) == STEPS
        for torch, jax in report.losses:  # the other side has run
            assert math.isnan(jax if side == "jax" else torch) and math.isfinite(torch if side == "jax" else jax)


def waits(seen: Path) -> str:
    """Code that waits until a file is there."""
    return f"import time\n    while not os.path.exists({str(seen)!r}): time.sleep(0.1)"


@pytest.mark.parametrize(("fails", "other"), [("torch", "jax"), ("jax", "torch")])
def test_what_fails_on_one_side_is_said_before_the_other_ends(fails: Side, other: Side, tmp_path: Path) -> None:
    """The other side ends once the error was said."""
    seen, lines = tmp_path / "seen", list[str]()

    def tell(line: str) -> None:
        lines.append(line)
        if "no such model" in line:
            seen.touch()

    port = write(
        tmp_path,
        at_start_of(f"{fails}_model()", 'raise ValueError("no such model")'),
        at_start_of(f"{other}_model()", waits(seen)),
    )
    report = check(port, world_size=1, steps=1, platform="cpu", numerics=False, stall_timeout=TIMEOUT, tell=tell)
    assert [problem.side for problem in report.problems] == [fails]
    assert seen.exists() and sum("no such model" in line for line in lines) == 1


@pytest.mark.large
@pytest.mark.parametrize("function", ["jax_loss(model, batch)", "torch_loss(model, batch)", "jax_model()"])
def test_an_error_in_a_module_beside_the_port_is_told_with_its_own_line(
    function: str, failing: Checked, tmp_path: Path
) -> None:
    module = f"beside_{function.partition('(')[0]}"  # another for each test, since the processes keep modules
    (tmp_path / f"{module}.py").write_text("def fails():\n    return {}['gone']\n")
    report = failing(at_start_of(function, f"import {module}; {module}.fails()"))
    assert report.verdict == "incomplete"
    assert [p.message for p in report.problems] == [f"{tmp_path / module}.py: line 2: KeyError: 'gone'"]


JAX, NAMES, FILE, TORCH = "jax_model or step 1", "names", "file", "torch rank 0, the port's file or torch_model"
SHOWS_OTHERS = step(("{name: every[name] for name in SHOWS}", '{"grads": 0}'))
LOSES_FC2 = step(("optax.apply_updates(state.params, updates)", '{"fc1": updates["fc1"]}'))
WIDER = [("nnx.Linear(3, 5", "nnx.Linear(3, 6"), ("nnx.Linear(5, 4", "nnx.Linear(6, 4")]
ENTRIES: Change = ("def jax_loss(model, batch)", "def jax_loss(model, x, y)")
NEEDS_Y = "jax_loss(model, x, y): missing a required argument: 'y'; the batch is one argument, the last"
IMPORT: Change = ("import os, time\n", "import os, tim\n")
ON_A_GPU: Change = ("return TorchNet()", 'return TorchNet().to("cuda:99")')
COMPLEX: Change = ("return TorchNet()", "return TorchNet().to(torch.complex128)")
# Changes, more of the port; the part of the check that fails, and what is said; HERE: the line of the first change.
UNUSABLE = {
    "kinds": ([KINDS], "", JAX, "names: torch's fc1.bias is a parameter, and jax's fc1.bias is none"),
    "restore": ([], FORGETS_MOMENTS.replace("2", "3"), JAX, "restore_at 3: must be within the run, 1 to 2 for 3 steps"),
    "frozen": ([FROZEN], "clip_grad_norm = 0.5\n", JAX, "torch's norm leaves out fc1.weight, which is frozen"),
    "shown": ([], SHOWS_OTHERS, JAX, "jax_step: shows grads; known are"),
    "params": ([], LOSES_FC2, JAX, "must return all params of the state: missing fc2.bias; missing fc2.kernel"),
    "shapes": (WIDER, "", NAMES, "jax's fc1.kernel (3, 6) cannot be torch's fc1.weight (5, 3);"),
    "entries": ([ENTRIES], "", JAX, NEEDS_Y),
    "names": (RENAMED, "", NAMES, "jax's inner.kernel (3, 5) has no twin in torch"),
    "import": ([IMPORT], "", FILE, "HERE: ModuleNotFoundError: No module named 'tim'"),
    "GPU": ([ON_A_GPU], "", TORCH, "HERE: "),  # builds of torch use other words
    "complex": ([COMPLEX], "", TORCH, "torch_model: fc1.weight is complex128;"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("changes", "more", "where", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_half_that_cannot_be_used_is_told_with_advice(
    changes: list[Change], more: str, where: str, message: str, failing: Checked, tmp_path: Path
) -> None:
    report = failing(*changes, more=more)
    (problem,) = report.problems
    side = {JAX: "jax", NAMES: "port", FILE: "port", TORCH: "torch"}[where]
    assert (report.verdict, problem.side, problem.where) == ("incomplete", side, where)
    if message.startswith("HERE"):
        message = message.replace("HERE", line_of(tmp_path / "port.py", changes[0][1].strip()))
    assert message in problem.message and "\n" not in problem.message
    assert report.names == ({"inner": "fc1"} if "inner" in message else {})
    assert bool(report.losses) == (side == "jax") and not report.stages  # torch has run, or nothing has
    assert all(math.isfinite(torch) and math.isnan(jax) for torch, jax in report.losses)


def test_gradients_for_which_ddp_waits_are_told_at_the_step_that_lacks_them(failing: Checked) -> None:
    detached = ("torch.tanh(self.fc1(x))", "torch.tanh(self.fc1(x).detach())")
    report = failing(detached, more=step())
    message = (
        "torch_loss: does not depend on fc1.weight, fc1.bias, for whose gradients DDP waits; freeze these, or set "
        "find_unused_parameters = True"
    )
    assert report.problems == (Problem("torch", "torch rank 0, step 1", message),)
    assert report.verdict == "incomplete" and not report.stages


@pytest.mark.large
@pytest.mark.parametrize("more", ["", step()], ids=["jaxddp's step", "custom step"])
def test_a_batch_that_fails_later_costs_the_later_steps(more: str, failing: Checked, tmp_path: Path) -> None:
    raises = 'if step == 2: raise KeyError("gone")'
    report = failing(at_start_of("batch(step, rank)", raises), more=more)
    assert report.verdict == "incomplete" and not report.differences
    message = f"{line_of(tmp_path / 'port.py', raises)}: KeyError: 'gone'"
    assert report.problems == (
        Problem("torch", "torch rank 0, step 3", message),
        Problem("jax", "after step 2, running by itself", message),
    )
    assert {len(result.residuals) for result in report.stages.values()} == {2}
    assert len(report.losses) == 2


def test_a_batch_in_another_format_is_told_for_both_sides(failing: Checked) -> None:
    report = failing(('{"x": rng.normal(1, 1, (12, 3)), "y": rng.integers(0, 4, 12)}', "rng.normal(1, 1, (12, 3))"))
    assert {problem.side for problem in report.problems} == {"torch", "jax"}
    assert all(
        "batch(0, 0): must be a dictionary or tuple of arrays, and is ndarray" in p.message for p in report.problems
    )


OF_FLAX = """
def jax_batch(step, rank):
    found = torch_batch(step, rank)
    return found | {"x": found["x"] + np.random.default_rng().normal()}
"""


@pytest.mark.large
@pytest.mark.parametrize(
    ("change", "more", "side", "where"),
    [
        (("np.random.default_rng((step, rank))", "np.random.default_rng()"), "", "torch", "torch rank 0, batch(0, 0)"),
        (("def batch(", "def torch_batch("), OF_FLAX, "jax", "jax_batch(0, 0)"),
    ],
    ids=["both", "jax"],
)
def test_a_batch_that_cannot_be_made_twice_is_told_at_once(
    change: Change, more: str, side: str, where: str, failing: Checked
) -> None:
    report = failing(change, more=more)
    call = where.removeprefix("torch rank 0, ")
    message = f"{call}: returns other values at its second call; must depend only on step and rank"
    assert report.problems == (Problem(side, where, message),) and not report.stages


@pytest.mark.large
@pytest.mark.parametrize(
    ("side", "change"),
    [
        ("torch", ('["x"]), batch["y"])\n\ndef', '["x"]), batch["y"], reduction="none"), model(batch["x"])\n\ndef')),
        ("jax", ('batch["y"]).mean()', 'batch["y"]), model(batch["x"])')),
    ],
)
def test_weights_of_another_shape_than_the_losses_are_told(side: Side, change: Change, failing: Checked) -> None:
    message = f"{side}_loss: returns losses (12,) and weights (12, 4); must have one weight for each loss"
    report = failing(change)
    assert any(problem.side == side and message in problem.message for problem in report.problems)


@pytest.mark.large
def test_a_port_may_load_its_batches_in_processes_of_its_own(failing: Checked) -> None:
    loads = (
        "if step == 0:\n"
        "        loader = torch.utils.data.DataLoader(range(3), num_workers=1)\n"
        "        assert [int(n) for n in loader] == [0, 1, 2]"
    )
    assert failing(at_start_of("batch(step, rank)", loads)).verdict == "equal"


@pytest.mark.large
def test_a_start_of_something_else_than_the_parameters_is_refused(failing: Checked) -> None:
    report = failing(more="def jax_start(params, rank): return {}\n")
    (problem,) = report.problems
    assert (problem.side, problem.where) == ("jax", "jax_start")
    assert problem.message.startswith("jax_start(params, 0): must return the parameters: missing fc1.bias")
    assert report.verdict == "incomplete" and report.stages  # the steps were compared all the same


def children() -> set[int]:
    """Processes below this one, however far; Python's fork server, and what watches over resources, are none."""
    forkserver.ensure_running()  # else the check starts it, and it stays
    return {process for process in family(os.getpid()) if b"resource_tracker" not in command_of(process)}


def command_of(process: int) -> bytes:
    with contextlib.suppress(OSError):  # it has just ended
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


@pytest.mark.large
def test_sides_that_hang_are_told_and_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    sleeps = "time.sleep(1000)"
    port = write(tmp_path, at_start_of("torch_loss(model, batch)", sleeps), at_start_of("jax_model()", sleeps))
    report = check(port, world_size=1, steps=1, platform="cpu", stall_timeout=HANGING)
    assert report.verdict == "incomplete"
    assert report.problems == (Problem("torch", "torch rank 0, torch_loss", f"no answer for {HANGING:.0f} s"),)
    assert children() == before
    gc.collect()
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.large
@pytest.mark.parametrize("step", [0, 1])
def test_a_batch_that_hangs_takes_one_timeout(step: int, tmp_path: Path) -> None:
    """On both sides at once: neither is given a timeout of its own after the other's."""
    began = tmp_path / "began"
    hangs = f"if step == {step}:\n        open({str(began)!r}, 'a').close(); time.sleep(1000)"
    port = write(tmp_path, at_start_of("batch(step, rank)", hangs))
    report = check(port, world_size=1, steps=3, platform="cpu", stall_timeout=TIMEOUT, numerics=False)
    waited = time.time() - began.stat().st_mtime  # of the first call
    assert report.verdict == "incomplete" and not report.differences
    assert report.problems[0].side == "torch" and report.problems[0].message == f"no answer for {TIMEOUT:.0f} s"
    assert waited < 2 * TIMEOUT


@pytest.mark.large
def test_sides_that_die_are_told_and_the_workers_go_on(failing: Checked) -> None:
    dying = "optax.GradientTransformation(lambda params: os._exit(3), None)"
    report = failing(own_optimizers("SGD(parameters, lr=os._exit(3))", dying))
    assert report.verdict == "incomplete"
    # Without torch's weights, which are drawn beside the types of its optimizer, jax does not begin.
    assert report.problems == (Problem("torch", "torch rank 0, torch_optimizer", "ended with exit code 3"),)
    report = failing(own_optimizers("SGD(parameters, lr=0.1)", dying))
    assert report.problems == (Problem("jax", "jax_optimizer", "ended with exit code 3"),)
    assert failing().verdict == "equal"


@pytest.mark.large
@pytest.mark.parametrize(
    ("deed", "told"),
    {
        "bytearray(2**60)": "MemoryError: without a message",
        "sys.exit('enough')": "SystemExit: enough",
        "input('more? ')": "EOFError: EOF when reading a line",
        "(lambda f: f(f))(lambda f: f(f))": "RecursionError: maximum recursion depth exceeded",
        "raise KeyboardInterrupt": "KeyboardInterrupt",
    }.items(),
)
def test_what_a_loss_does_to_its_process_is_told_in_a_line(deed: str, told: str, failing: Checked) -> None:
    report = failing(at_start_of("jax_loss(model, batch)", f"import sys; {deed}"))
    assert report.verdict == "incomplete"
    assert [(problem.side, problem.message.endswith(told)) for problem in report.problems] == [("jax", True)]


@pytest.mark.large
def test_a_loss_that_prints_and_starts_processes_is_compared_and_leaves_nothing(tmp_path: Path) -> None:
    before = children()
    deeds = (
        "import subprocess; print('x' * 100_000)",
        "subprocess.Popen(['sleep', '1000'], start_new_session=True)",
        "os.chdir('/')",
    )
    changes = [at_start_of("jax_loss(model, batch)", "\n    ".join(deeds))]
    report = check(write(tmp_path, *changes), world_size=1, steps=2, platform="cpu", stall_timeout=TIMEOUT)
    assert (report.verdict, report.problems) == ("equal", ())
    assert children() == before
