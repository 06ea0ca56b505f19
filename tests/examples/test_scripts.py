"""Scripts in examples/: they run and print what they claim, and the guides show two of them."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def shown_in(page: str, heading: str) -> str:
    """First program below a heading of a page."""
    section = (ROOT / page).read_text().partition(heading)[2]
    return section.partition("```python\n")[2].partition("```")[0]


def test_the_guide_shows_the_first_draft_of_a_port():
    shown = shown_in("docs/parity.md", "## A first draft")
    assert (ROOT / "examples" / "ports" / "first_draft.py").read_text().endswith(shown) and "optax.adamw" in shown


def test_the_guide_shows_the_program(capsys):
    program = (ROOT / "examples" / "own_model.py").read_text()
    shown = shown_in("docs/library.md", "# As a library")
    assert program.endswith(shown) and "ddp.steps" in shown
    exec(compile(shown, "docs/library.md", "exec"), {"__name__": "__main__"})
    assert "mean squared error 0.00" in capsys.readouterr().out


def test_the_readme_shows_the_smallest_run_file():
    assert shown_in("README.md", "## A program of yours") == (ROOT / "examples" / "mine.py").read_text()


def test_the_readme_shows_a_cut_of_the_program():
    program = {line.strip() for line in (ROOT / "examples" / "own_model.py").read_text().splitlines()}
    shown = shown_in("README.md", "## As a library")
    assert {line.strip() for line in shown.splitlines()} <= program and "ddp.steps" in shown


def test_a_difference_in_the_sixth_digit_is_reported(monkeypatch, capsys):
    side_by_side = load("side_by_side")
    monkeypatch.setattr(side_by_side, "losses", lambda module, flags: [f"{1e-6 * (module == 'jaxddp.train'):.6f}"])
    assert side_by_side.main(side_by_side.Options(models=("mlp",), optimizers=("sgd",))) == 1
    assert "DIFFERENT" in capsys.readouterr().out
