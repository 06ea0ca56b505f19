"""One device, many devices, DDP: the claims hold in both frameworks, which print what the document's program prints.

same_updates_printed.json has what that program (github.com/karlstratos/minGPU, 9d490e2) printed here with torch 2.13:

    python main.py FLAGS                                                  of one process
    torchrun --standalone --nnodes=1 --nproc_per_node=2 main.py FLAGS     of two

Three of its lines were changed, to run on CPUs: gloo for nccl, the CPU for the GPU of a rank, and no barrier where
there is no process group. As it stands, one process stops with a ValueError after its first step.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from examples.same_updates import in_jax, program, sharding, verdicts
from examples.same_updates.settings import DDP, ONE, WAYS, Case, Options, Record, Settings, same_updates
from jaxddp.cli import parse_plain
from jaxddp.data.torch_rng import Generator
from jaxddp.errors import InputError

pytestmark = pytest.mark.large

PRINTED = json.loads(Path(__file__).with_name("same_updates_printed.json").read_text())
OPTIONS = Options(opt="sgd", no_shuffle=True)  # of the document's first commands

# Relative, of what was printed with 8 to 10 digits of float32; at the first step and later.
TORCH = 1e-6, 1e-4  # measured: 4e-10 and 4e-10, the rounding of what was printed; elsewhere sums may have another order
JAX = 2e-6, 1e-4  # measured: 4.6e-7 and 1e-5; with torch's own examples, not its to 2 ulp, 4.6e-7 and 6e-6
PERCENT = 0.006  # of an accuracy, printed with two decimals


def case_of(printed: dict) -> Case:
    settings = parse_plain(Settings, printed["flags"].split(), "main.py")
    return Case(settings, DDP if printed["processes"] > 1 else ONE, printed["processes"])


RECORDED = {printed["flags"]: case_of(printed) for printed in PRINTED}
SHOWN = {way: same_updates(OPTIONS, way, 2) for way in WAYS}
FEW = [PRINTED[number] for number in (0, 1, 4)]  # of all kinds; the others by `make test-all`
MORE = [printed for printed in PRINTED if printed not in FEW]
Runs = dict[str, dict[str, Record]]


@pytest.fixture(scope="module", autouse=True)
def two_optimizers() -> Iterator[None]:
    """The others are `make test-all`'s."""
    plan = {run: names for run, names in verdicts.PLAN.items() if run[0] in ("sgd", "adam")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdicts, "PLAN", plan)
        yield


@pytest.fixture(scope="module")
def runs() -> Runs:
    few = {printed["flags"]: RECORDED[printed["flags"]] for printed in FEW[2:]}
    made = program.train(OPTIONS, SHOWN | few | verdicts.cases(2))
    for records in made.values():  # the document's first commands are those that are shown
        records |= {FEW[0]["flags"]: records[ONE], FEW[1]["flags"]: records[DDP]}
    return made


@pytest.fixture(scope="module")
def more_runs() -> Runs:
    return program.train(OPTIONS, {printed["flags"]: RECORDED[printed["flags"]] for printed in MORE})


def off(record: Record, printed: dict) -> tuple[float, float]:
    """By how much a run differs from what was printed: at the first step, and in the epochs' losses."""
    first = np.array(list(program.of_first_step(record).values()))
    losses = np.array([epoch.loss for epoch in record.epochs])
    expected = np.array([loss for _, loss, _ in printed["epochs"]])
    return np.max(np.abs(first / printed["first_step"] - 1)), np.max(np.abs(losses / expected - 1))


FRAMEWORKS = pytest.mark.parametrize(("framework", "allowed"), [("jax", JAX), ("torch", TORCH)])


def assert_printed(printed: dict, record: Record, allowed: tuple[float, float]) -> None:
    first, later = off(record, printed)
    assert first < allowed[0] and later < allowed[1]
    for epoch, (steps, _, accuracy) in zip(record.epochs, printed["epochs"], strict=True):
        assert epoch.steps == steps and abs(epoch.accuracy - accuracy) < PERCENT


@FRAMEWORKS
@pytest.mark.parametrize("printed", FEW, ids=lambda printed: printed["flags"])
def test_the_documents_program_prints_the_same(printed: dict, framework: str, allowed, runs: Runs) -> None:
    assert_printed(printed, runs[framework][printed["flags"]], allowed)


@pytest.mark.large
@FRAMEWORKS
@pytest.mark.parametrize("printed", MORE, ids=lambda printed: printed["flags"])
def test_it_does_so_with_more_flags(printed: dict, framework: str, allowed, more_runs: Runs) -> None:
    assert_printed(printed, more_runs[framework][printed["flags"]], allowed)


def test_it_counts_more_than_all_as_right() -> None:
    assert max(accuracy for printed in PRINTED for *_, accuracy in printed["epochs"]) == 111.11


def test_another_order_of_the_examples_is_noticed(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    printed = next(printed for printed in PRINTED if "shuffle" not in printed["flags"] and printed["processes"] == 1)
    monkeypatch.setattr(in_jax, "torch_random_order", lambda generator, size: generator.randperm(size))
    first, later = off(in_jax.train(RECORDED[printed["flags"]], program.local_devices(OPTIONS)), printed)
    assert first > 1e-2 and later > 1e-2


def test_all_claims_hold_and_all_is_shown(monkeypatch: pytest.MonkeyPatch, capsys, runs: Runs) -> None:
    monkeypatch.setattr(program, "train", lambda options, cases: runs)
    assert program.main(OPTIONS) == 0
    shown = capsys.readouterr().out
    assert "18 of 18 claims hold" in shown
    assert "DDP: batch 5, sgd, lr 2\n" in shown and f"{'0.145329118':>18}{'0.145329118':>18}" in shown
    assert shown.count("replica 1 | x2 x4 x6 | x8 x1*") == 2 and shown.count("replica 1 | x2 x4 x6 | x8\n") == 2


def test_sums_in_place_of_means_are_noticed(runs: Runs) -> None:
    found = verdicts.claims({"jax": runs["jax"] | {"sgd sum same": runs["jax"]["sgd sum many"]}}, 2)
    assert [claim.says for claim in found if not claim.holds] == ["sgd, sum: one device is not DDP at the same rate"]


def test_a_mean_needs_no_other_rate(runs: Runs) -> None:
    swapped = {"sgd mean times": runs["torch"]["sgd mean same"], "sgd mean same": runs["torch"]["sgd mean times"]}
    found = verdicts.claims({"torch": runs["torch"] | swapped}, 2)
    assert [claim.holds for claim in found if claim.says.startswith("sgd, mean")] == [False, False]


def test_repeated_examples_are_counted_once_only_if_they_are_told_apart(runs: Runs) -> None:
    odd = runs["jax"]["odd"]
    as_document = replace(odd, epochs=[epoch._replace(accuracy_once=epoch.accuracy) for epoch in odd.epochs])
    found = verdicts.claims({"jax": runs["jax"] | {"odd": as_document}}, 2)
    assert [claim.says for claim in found if not claim.holds] == [
        "accuracy in % with each example counted once: not beyond 100"
    ]


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_shards_are_those_of_the_document(framework: str) -> None:
    assert sharding.dealt(framework, 2, drop_last=False).tolist() == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 0]]
    assert sharding.dealt(framework, 2, drop_last=True).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_one_framework_alone(monkeypatch: pytest.MonkeyPatch, capsys, runs: Runs) -> None:
    monkeypatch.setattr(program, "train", lambda options, cases: {"torch": runs["torch"]})
    assert program.main(replace(OPTIONS, framework="torch")) == 0
    assert "14 of 14 claims hold" in capsys.readouterr().out


@pytest.mark.large
def test_with_every_optimizer_on_three_devices() -> None:
    command = [sys.executable, "-m", "examples.same_updates", "--devices", "3", "--platform", "cpu"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "20 of 20 claims hold" in run.stdout


def test_flags_are_those_of_the_document() -> None:
    words = "--num_examples 9 --batch-size 3 --no_shuffle --drop-last --eps 1e-8 --devices 4"
    options = parse_plain(Options, words.split(), "same_updates")
    assert options == Options(num_examples=9, batch_size=3, no_shuffle=True, drop_last=True, eps=1e-8, devices=4)


@pytest.mark.parametrize(
    "words",
    ["--opt adamw", "--devices 1", "--num-examples 1", "--dim 0", "--lr -1", "--seed 18446744073709551616"],
)
def test_bad_input_is_one_line(words: str) -> None:
    with pytest.raises(InputError, match=words.split()[-1]):
        parse_plain(Options, words.split(), "same_updates")


def test_the_order_of_a_data_loader_comes_from_a_seed_of_its_own() -> None:
    generator = Generator(0)
    order = in_jax.torch_random_order(generator, 10)
    assert sorted(order.tolist()) == list(range(10))
    assert not np.array_equal(in_jax.torch_random_order(generator, 10), order)
