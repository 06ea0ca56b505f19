"""docs/pitfalls.md: its code gives the numbers that it says, and the page is what docs/pitfalls.py writes."""

import doctest
import gc
import math
import multiprocessing
import re
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from docs import pitfalls
from docs.pitfalls import (
    FAULTS,
    JAX_IMPORTS,
    PAGE,
    PITFALLS,
    SECTIONS,
    TORCH_IMPORTS,
    WIDTH,
    Pitfall,
    anchor,
    number,
    page,
)
from tests.support.pitfall_setups import SETUPS, program

TOLERANCE = 1e-12  # of the right code in float64; measured: 2.1e-14 (decay_mask, an update), 9.6e-16 (align_corners)
# Some right code is as good as it says (`within`); measured: 1.3e-5 (fast_variance, float32), 1.4e-7 (attention, whose
# softmax is float32), 1.1e-7 (running mean in float32), 5.4e-7 (clipping without torch's 1e-6), 1.4e-3 (drawn numbers).
APART = 50  # the obvious code is off by so many times the error of the right one; measured: 131 (truncated normal)
ROUNDED = 0.5  # share by which the page's error of one digit may be wrong
MOST_LINES = 900
ON_RANKS = [pitfall for pitfall in PITFALLS if SETUPS[pitfall.setup].ranks > 1]


def in_torch(pitfall: Pitfall, rank: int = 0) -> np.ndarray:
    """Return the numbers of the PyTorch code."""
    setup, default = SETUPS[pitfall.setup], torch.get_default_dtype()
    arrays = {name: torch.from_numpy(x) for name, x in arrays_of(setup.arrays).items()}
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        result = executed(TORCH_IMPORTS, program(setup.torch, pitfall.torch), {"np": np, "rank": rank, **arrays})
    finally:
        torch.set_default_dtype(default)
    return np.array(result.detach().numpy() if isinstance(result, torch.Tensor) else result, np.float64)


def in_jax(pitfall: Pitfall, snippet: str) -> np.ndarray:
    """Return the numbers of JAX code."""
    import jax  # torch's ranks, which import this module, start faster without
    import jax.numpy as jnp

    setup = SETUPS[pitfall.setup]
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        arrays = {name: jnp.asarray(x) for name, x in arrays_of(setup.arrays).items()}
        return np.array(executed(JAX_IMPORTS, program(setup.jax, snippet), {"seed": 0, **arrays}), np.float64)


def arrays_of(code: str) -> dict[str, np.ndarray]:
    """Return the arrays that code makes."""
    names: dict[str, Any] = {"np": np, "normal": np.random.default_rng(0).normal}
    exec(code, names)
    return {name: np.array(x) for name, x in names.items() if isinstance(x, np.ndarray)}


def executed(imports: str, code: str, names: Mapping[str, Any]) -> Any:
    """Return the `result` of code."""
    space = dict(names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of what it deprecates
        exec(f"{imports}\n{code}", space)
    return space["result"]


def difference(result: np.ndarray, torch_result: np.ndarray) -> float:
    """Return the largest difference relative to torch's largest number; of another shape it is infinite."""
    if result.shape != torch_result.shape:
        return math.inf
    return float(np.abs(result - torch_result).max() / np.abs(torch_result).max())


def in_torch_on_rank(rank: int, ranks: int, store: str) -> list[np.ndarray]:
    """Return the numbers of one of torch's ranks for each pitfall of `ON_RANKS`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    results = [in_torch(pitfall, rank) for pitfall in ON_RANKS]
    gc.collect()  # models that are left would end gloo's thread with the GIL held, for which that thread may wait
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Numbers of the PyTorch code that runs in two processes, stacked, by the pitfall's title."""
    store = str(tmp_path_factory.mktemp("ranks") / "store")
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        ranks = pool.map(in_torch_on_rank, range(2), [2, 2], [store, store])
        return {pitfall.title: np.stack(results) for pitfall, *results in zip(ON_RANKS, *ranks, strict=True)}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("pitfall", PITFALLS, ids=lambda pitfall: anchor(pitfall.title))
def test_the_right_code_gives_torchs_numbers_and_the_obvious_code_does_not(
    pitfall: Pitfall, on_ranks: dict[str, np.ndarray]
) -> None:
    expected = on_ranks[pitfall.title] if pitfall in ON_RANKS else in_torch(pitfall)
    right = difference(in_jax(pitfall, pitfall.right), expected)
    obvious = difference(in_jax(pitfall, pitfall.obvious), expected)
    assert right <= (pitfall.within or TOLERANCE)
    assert obvious == pytest.approx(pitfall.off, rel=ROUNDED, nan_ok=True)
    assert not obvious < APART * max(right, TOLERANCE)  # it may be NaN


def test_the_page_is_what_the_generator_writes() -> None:
    assert PAGE.read_text() == page(), "run python docs/pitfalls.py"


def test_the_examples_of_the_generator_are_right() -> None:
    assert doctest.testmod(pitfalls).failed == 0


def test_the_page_has_every_fault_of_the_catalogue() -> None:
    named = {pitfall.fault for pitfall in PITFALLS} - {""}
    rows = re.findall(r"^\| `(\w+)` \| ", PAGE.read_text(), re.MULTILINE)
    assert named <= FAULTS.keys() and sorted([*named, *rows]) == sorted(FAULTS)
    assert all(f"`jaxddp check`: `{name}`." in " ".join(PAGE.read_text().split()) for name in named)


def test_symptoms_lead_to_their_entries() -> None:
    text = PAGE.read_text()
    links = re.findall(r"^- \[(.+)\]\(#(.+)\)$", text, re.MULTILINE)
    headings = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert [link for _, link in links] == [anchor(title) for title in headings]
    assert len(set(links)) == len({symptom for symptom, _ in links}) == len(PITFALLS) >= 30
    assert not any("--" in link for _, link in links)  # GitHub and MkDocs make other anchors of that


def test_the_page_is_short() -> None:
    lines = PAGE.read_text().splitlines()
    assert len(lines) <= MOST_LINES
    assert [line for line in lines if len(line) > WIDTH and not line.startswith("|")] == []


def test_every_setup_is_used_and_every_issue_is_one() -> None:
    assert {pitfall.setup for pitfall in PITFALLS} == SETUPS.keys()
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", pitfall.issue) for pitfall in PITFALLS if pitfall.issue)
    assert all(float(number(pitfall.off)) == pitfall.off for pitfall in PITFALLS if math.isfinite(pitfall.off))
    assert all(SECTIONS.values())
