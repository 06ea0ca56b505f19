"""Scripts in examples/: they run and print what they claim, and the guides show two of them."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECOND = 58  # characters before the README's column of JAX
# Lines of the README that are one line of the program, or end otherwise.
JOINED = {
    *("ddp = DistributedDataParallel(", "Curve(nnx.Rngs(0)), optim.adam(3e-2),", "squared_error, replicas=replicas)"),
    "ddp.verify(state)  # all replicas hold the same bits",
}


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def shown_in(page: str, heading: str, language: str = "python") -> str:
    """First program below a heading of a page."""
    section = (ROOT / page).read_text().partition(heading)[2]
    return section.partition(f"```{language}\n")[2].partition("```")[0]


def test_the_guide_shows_the_program(capsys):
    program = (ROOT / "examples" / "own_model.py").read_text()
    shown = shown_in("docs/library.md", "# As a library")
    assert program.endswith(shown) and "ddp.steps" in shown
    exec(compile(shown, "docs/library.md", "exec"), {"__name__": "__main__"})
    assert "mean squared error 0.00" in capsys.readouterr().out


def test_the_guide_shows_the_smallest_program():
    assert shown_in("docs/run.md", "# Programs") == (ROOT / "examples" / "mine.py").read_text()


def test_the_readme_shows_a_cut_of_the_program():
    program = {line.strip() for line in (ROOT / "examples" / "own_model.py").read_text().splitlines()}
    columns = [line[SECOND:].strip() for line in shown_in("README.md", "## DDP in JAX", "text").splitlines()]
    assert {
        line for line in columns[1:] if line
    } <= program | JOINED and "state, _ = ddp.steps(state, batches)" in columns


def test_a_difference_in_the_sixth_digit_is_reported(monkeypatch, capsys):
    side_by_side = load("side_by_side")
    monkeypatch.setattr(side_by_side, "losses", lambda module, flags: [f"{1e-6 * (module == 'jaxddp.train'):.6f}"])
    assert side_by_side.main(side_by_side.Options(models=("mlp",), optimizers=("sgd",))) == 1
    assert "DIFFERENT" in capsys.readouterr().out
