"""Benchmark of layouts: a run in one process, in two, and torch's."""

import re

import pytest

from benchmarks import layouts
from benchmarks.layouts import LayoutOptions, main
from jaxddp.errors import InputError


@pytest.mark.large
def test_every_layout_trains(capsys: pytest.CaptureFixture[str]) -> None:
    main(LayoutOptions(models=("mlp",), epochs=2, rounds=1))
    header, _, row = capsys.readouterr().out.splitlines()
    assert header.count("|") == row.count("|") == 7
    assert re.fullmatch(r"\| mlp \| [\d,]+ \(1\.00\) (\| [\d,]+ \(\d+\.\d\d\) ){4}\|", row)


def test_a_process_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"error: --lr -1\.0: must be at least 0"):
        layouts.speed("1 process", ["--lr", "-1"])


def test_unknown_models_and_no_epochs_are_refused() -> None:
    with pytest.raises(InputError, match="model resnet: unknown"):
        LayoutOptions(models=("resnet",))
    with pytest.raises(InputError, match="--epochs 0: must be at least 1"):
        LayoutOptions(epochs=0)
