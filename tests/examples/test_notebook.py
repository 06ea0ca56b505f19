"""Notebooks: each runs in its own kernel, and the claims of its last cell hold."""

from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient

from examples.from_scratch import in_jax
from examples.from_scratch.problem import PLAIN, ROUNDING, contiguous_steps

pytestmark = pytest.mark.large

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
CLAIMS = {"check_a_port": 4, "ddp_from_scratch": 8}
LARGEST = 100_000  # bytes of a notebook with its outputs; measured: 64,000 and 12,000
every_notebook = pytest.mark.parametrize("name", CLAIMS)


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def text_of(cell: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_every_notebook_has_claims() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == CLAIMS.keys()


@every_notebook
def test_a_notebook_runs_and_its_claims_hold(name: str) -> None:
    notebook = read(name)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    assert text_of(notebook.cells[-1]).count("  holds\n") == CLAIMS[name]


@every_notebook
def test_a_notebook_is_stored_with_its_output(name: str) -> None:
    cells = [cell for cell in read(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert text_of(cells[-1]).count("  holds\n") == CLAIMS[name]
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < LARGEST


def test_the_notebook_of_the_check_shows_the_report_as_a_page() -> None:
    pages = [
        output.data["text/html"]
        for cell in read("check_a_port").cells
        for output in cell.get("outputs", [])
        if "text/html" in output.get("data", {})
    ]
    (page,) = pages
    assert "jaxddp-report" in page and "<svg" in page and "GELU by tanh" in page and str(Path.home()) not in page


@pytest.mark.parametrize(("real", "holds"), [(3e-16, True), (1e-9, False)])
def test_the_last_cell_fails_if_a_claim_does(real: float, holds: bool) -> None:
    equal, apart = SimpleNamespace(distance=0.0), SimpleNamespace(distance=0.9)
    loop = {"right": 1e-16, "never divided": 0.9, "stepped on the first": 0.1, "both": 0.6}
    known = {"in_jax": in_jax, "contiguous_steps": contiguous_steps, "PLAIN": PLAIN, "ROUNDING": ROUNDING}
    known |= {"fresh": lambda: equal, "apart": apart, "together": equal, "real": real, "loop": loop}
    try:
        exec(compile(read("ddp_from_scratch").cells[-1].source, "ddp_from_scratch", "exec"), known)
    except AssertionError:
        assert not holds
    else:
        assert holds


@pytest.mark.parametrize(("verdict", "holds"), [("equal", True), ("different", False)])
def test_the_last_cell_of_the_check_fails_if_the_patched_port_differs(verdict: str, holds: bool) -> None:
    difference = SimpleNamespace(cause="a cause")
    report = SimpleNamespace(verdict="different", differences=[difference])
    after = SimpleNamespace(verdict=verdict, differences=[], stages={"update": SimpleNamespace(residuals=(3e-14,))})
    known = {"report": report, "after": after}
    try:
        exec(compile(read("check_a_port").cells[-1].source, "check_a_port", "exec"), known)
    except AssertionError:
        assert not holds
    else:
        assert holds
