"""The benchmark of the recorder runs and returns what it prints; its ratios depend on the machine."""

import pytest

from benchmarks import recorder


def test_both_sides_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = recorder.main(["--width", "8", "--examples", "4", "--rounds", "3", "--steps", "10"])
    assert found.keys() == {"torch", "jax"}
    assert all(min(of_side.values()) > 0 for of_side in found.values())
    assert "with an idle recorder x" in capsys.readouterr().out


def test_sizes_must_be_positive() -> None:
    with pytest.raises(SystemExit, match="2"):
        recorder.main(["--steps", "0"])
