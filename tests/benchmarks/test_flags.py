"""Bad flags of the benchmarks' commands."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.__main__ import main as race
from benchmarks.gpu import machine
from benchmarks.gpu.__main__ import main as gpu


@pytest.mark.parametrize(
    ("main", "flags", "message"),
    [
        (race, "--workloads mpl", "--workloads mpl: unknown; did you mean mlp?"),
        (race, "--parts rase", "--parts rase: unknown; did you mean race?"),
        (race, "--rounds 0", "--rounds 0: must be above 0"),
        (race, "--devices 0", "--devices 0: must be at least 1"),
        (race, "--round 3", "--round: unknown flag; did you mean --rounds?"),
        (race, "--devices 3 --workloads mlp", "--devices 3: 32 examples of mlp cannot be divided"),
        (gpu, "", "no GPU: nvidia-smi lists none here; --smoke tries everything on CPU devices"),
        (gpu, "--parts pariti", "--parts pariti: unknown; did you mean parity?"),
        (gpu, "--minutes 0", "--minutes 0: must be above 0"),
        (gpu, "--smoek", "--smoek: unknown flag; did you mean --smoke?"),
        (gpu, "--output pyproject.toml", "--output pyproject.toml: is a file; must be a folder"),
    ],
)
def test_a_bad_flag_gives_one_line_and_exit_code_2(
    main: Callable[[Sequence[str]], object],
    flags: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(machine, "smi", lambda *_: None)
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(SystemExit) as stop:
        main(flags.split())
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.out == ""
    assert printed.err.startswith(f"error: {message}") and printed.err.count("\n") == 1
