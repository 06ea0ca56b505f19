"""Notebook: it runs in its own kernel, and the claims of its last cell hold."""

from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient

from examples.from_scratch import in_jax
from examples.from_scratch.problem import PLAIN, ROUNDING, contiguous_steps

pytestmark = pytest.mark.large

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "ddp_from_scratch.ipynb"
CLAIMS = 8


def text_of(cell: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_the_notebook_runs_and_its_claims_hold() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    assert text_of(notebook.cells[-1]).count("  holds\n") == CLAIMS


def test_the_notebook_is_stored_with_its_output() -> None:
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert text_of(cells[-1]).count("  holds\n") == CLAIMS


@pytest.mark.parametrize(("real", "holds"), [(3e-16, True), (1e-9, False)])
def test_the_last_cell_fails_if_a_claim_does(real: float, holds: bool) -> None:
    equal, apart = SimpleNamespace(distance=0.0), SimpleNamespace(distance=0.9)
    loop = {"right": 1e-16, "never divided": 0.9, "stepped on the first": 0.1, "both": 0.6}
    known = {"in_jax": in_jax, "contiguous_steps": contiguous_steps, "PLAIN": PLAIN, "ROUNDING": ROUNDING}
    known |= {"fresh": lambda: equal, "apart": apart, "together": equal, "real": real, "loop": loop}
    cell = nbformat.read(NOTEBOOK, as_version=4).cells[-1]
    try:
        exec(compile(cell.source, NOTEBOOK.name, "exec"), known)
    except AssertionError:
        assert not holds
    else:
        assert holds
