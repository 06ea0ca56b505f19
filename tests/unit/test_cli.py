"""Command lines become configurations, and errors one line with an exit code."""

import dataclasses
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tyro.conf import Positional

from jaxddp import cli
from jaxddp.config import TrainConfig
from jaxddp.config.choices import NAMED
from jaxddp.config.hints import OTHER_TRAINERS, VALUES
from jaxddp.errors import InputError, TrainingError
from jaxddp.tracking.run_folder import save_config
from tests.unit.config.test_config import NO_DEFAULT
from torch_ref.config import TorchConfig


def parse(*argv: str) -> TrainConfig:
    return cli.parse(TrainConfig, argv, "prog")


def test_flags_become_fields() -> None:
    argv = "--dataset names --model char_mlp --hidden-sizes 7 5 --optimizer adamw --lr 1e-1 --betas 0.8 0.9 --amsgrad"
    argv += " --clip-grad-norm 2 --no-shuffle --seed 18446744073709551586"
    assert parse(*argv.split(), "--output", "a folder") == TrainConfig(**NO_DEFAULT)
    assert parse() == TrainConfig()
    assert cli.parse(TorchConfig, ["--strategy", "single"], "prog").strategy == "single"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--mdoel mlp", "--mdoel: unknown flag; did you mean --model?"),
        ("--global-batch=8", "--global-batch: unknown flag; did you mean --global-batch-size?"),
        ("--strategy ddp", "--strategy: unknown flag"),
        ("--zzz", "--zzz: unknown flag; see --help"),
        ("mlp", "mlp: unexpected argument; see --help"),
        ("--nesterov True", "True: unexpected argument; see --help"),
        ("--lr fast", "--lr fast: expected FLOAT"),
        ("--epochs 1.5", "--epochs 1.5: expected INT"),
        ("--devices all", "--devices all: expected INT"),
        ("--betas 0.9", "--betas 0.9: expected FLOAT FLOAT"),
        ("--hidden-sizes 8 wide", "--hidden-sizes 8 wide: expected INT [INT ...]"),
        ("--lr", "--lr: needs a value, FLOAT"),
        ("--devices --lr 1", "--devices: needs a value, INT"),
        ("--learning-rate 1e-3", "--learning-rate: unknown flag; it is --lr here"),
        ("--learning_rate 1e-3", "--learning_rate: unknown flag; it is --lr here"),
        ("--bf16", "--bf16: unknown flag; it is --amp bf16 here"),
        ("--amp fp32", "--amp fp32: unknown; did you mean none? (one of none, bf16, fp16)"),
        ("--optimizer AdamW", "--optimizer AdamW: unknown; did you mean adamw? (one of sgd, adam, "),
        ("--platform tpu", "--platform tpu: unknown; did you mean "),
        ("--track tensorbord", "--track tensorbord: unknown; did you mean tensorboard?"),
        ("--lr -1", "--lr -1.0: must be at least 0"),
        ("--resume nowhere", "--resume nowhere: not a run folder (it has no config.json)"),
        ("--resume=nowhere", "--resume=nowhere: not a run folder (it has no config.json)".replace("=", " ")),
    ],
)
def test_a_bad_flag_is_an_error_of_one_line(argv: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(*argv.split())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_bad_flag_is_an_error_of_one_line_on_an_ascii_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(InputError, match=r"^--mdoel: unknown flag; did you mean --model\?$"):
        parse("--mdoel", "mlp")


@pytest.mark.parametrize("argv", ["--resume a --resume b", "--resume a --resume=b", "--output a --lr 1 --output a"])
def test_two_folders_are_refused(argv: str) -> None:
    with pytest.raises(InputError, match=f"^{argv.split()[0]}: given twice; must be given once$"):
        parse(*argv.split())


def test_of_other_flags_the_last_counts() -> None:
    assert parse("--lr", "1", "--epochs", "2", "--lr", "3").lr == 3


@dataclasses.dataclass(frozen=True)
class Words:
    """A dataclass with a positional argument and flags."""

    path: Positional[Path]
    steps: int
    quiet: bool = False


def test_any_dataclass_is_parsed_from_positional_arguments_and_flags() -> None:
    expected = Words(Path("a"), 3, quiet=True)
    assert cli.parse_plain(Words, ["a", "--steps", "3", "--quiet"], "prog") == expected
    assert cli.parse_plain(Words, ["--no-quiet"], "prog", default=expected) == Words(Path("a"), 3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "PATH, --steps: missing; see --help"),
        ("a", "--steps: missing; see --help"),
        ("a b --steps 3", "b: unexpected argument; see --help"),
        ("a --steps 3 --quite", "--quite: unknown flag; did you mean --quiet?"),
    ],
)
def test_missing_and_superfluous_arguments_are_errors_of_one_line(argv: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        cli.parse_plain(Words, argv.split(), "prog")
    assert str(caught.value) == message


def test_resume_takes_the_saved_config_and_further_flags_override_it(tmp_path: Path) -> None:
    save_config(TrainConfig(epochs=3, lr=0.5), tmp_path)
    expected = TrainConfig(epochs=9, lr=0.5, resume=str(tmp_path))
    assert parse("--resume", str(tmp_path), "--epochs", "9") == parse(f"--resume={tmp_path}", "--epochs=9") == expected
    for broken in ("broken", "[" * 100_000, '{"epochs": ' + "9" * 5000 + "}"):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(InputError, match=rf"^{tmp_path}/config.json: not a run's config"):
            parse("--resume", str(tmp_path))


@pytest.mark.parametrize("package", ["jaxddp", "torch_ref"])
@pytest.mark.parametrize("word", ["--help", "-h", "--help-all"])
def test_help_lists_the_flags_that_most_people_use_and_with_all_every_flag(
    package: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config_class = {"jaxddp": TrainConfig, "torch_ref": TorchConfig}[package]
    with pytest.raises(SystemExit) as stop:
        cli.parse(config_class, ["--lr", "1", word], "prog")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    left_out = getattr(config_class, "LEFT_OUT", ())
    names = {f.name for f in dataclasses.fields(config_class)} - {*left_out}
    negated = {f.name for f in dataclasses.fields(config_class) if f.type is bool and f.default is True}
    flags = {f"--{'no-' * (name in negated)}{name.replace('_', '-')}" for name in names}
    common = {f"--{name.replace('_', '-')}" for name in config_class.COMMON}
    expected = flags if word == "--help-all" else common
    assert {line.split()[0] for line in shown.splitlines() if line.startswith("  --") and line[4] != "-"} == expected
    assert max(map(len, shown.splitlines())) <= 80
    assert "None" not in shown and " | " not in shown


def test_the_help_of_a_program_shows_its_options_with_what_is_said_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Below an option or after it, as dataclasses are documented."""
    options = "import dataclasses\n@dataclasses.dataclass\nclass Options:\n    layers: int = 2  # depth\n"
    options += '    width: int | None = None\n    """Channels. None: 4 per head."""\ntrain_data = dict\n'
    (tmp_path / "run.py").write_text(options)
    with pytest.raises(SystemExit):
        cli.program_and_flags([str(tmp_path / "run.py"), "--help"], TrainConfig, "prog")
    shown = capsys.readouterr().out.split("run options")[1]
    assert "--layers INT              depth (default: 2)" in shown
    assert "--width INT               Channels. (default: 4 per head)" in shown


@pytest.mark.parametrize("trainer", [TrainConfig, TorchConfig])
def test_the_names_of_other_trainers_lead_to_flags(trainer: type) -> None:
    fields = {f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(trainer)}
    of_checks = {"--time-limit"}
    for name, meant in OTHER_TRAINERS.items():
        assert name not in fields and re.split("[ ,]", meant)[0] in fields | of_checks
    for name, values in VALUES.items():
        assert {*values.values()} <= {*NAMED[name]} and not values.keys() & {*NAMED[name]}


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("--lr"), 2, "error: --lr"),
        (InputError("--model a\nb\x1b[1m\udcff"), 2, r"error: --model a\nb\x1b[1m\udcff"),
        (TrainingError("loss is nan"), 2, "error: loss is nan"),
        (OSError(28, "No space left on device", "run/a"), 2, "error: run/a: no space left on device: make room"),
        (MemoryError(), 2, "error: not enough memory: MemoryError; choose smaller sizes"),
        (MemoryError("Unable to allocate 9 GiB"), 2, "error: not enough memory: Unable to allocate 9 GiB; choose "),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore"), 2, "error: not enough memory: RESOURCE_EXHAUSTED: "),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=str,
)
def test_errors_become_a_line_and_an_exit_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop, cli.one_line_errors(show_traceback=False):
        raise error
    assert stop.value.code == code
    printed = capsys.readouterr().err
    assert printed.startswith(line) and printed.count("\n") == 1


def test_a_programming_error_is_not_caught() -> None:
    with pytest.raises(ZeroDivisionError), cli.one_line_errors(show_traceback=False):
        1 / 0  # noqa: B018
    with pytest.raises(RuntimeError), cli.one_line_errors(show_traceback=False):
        raise RuntimeError("a mistake")


def test_streams_that_are_closed_or_lack_a_character_end_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(narrow, encoding="ascii"))
    monkeypatch.setattr("sys.stderr", None)
    with pytest.raises(SystemExit) as stop, cli.one_line_errors(show_traceback=False):
        print("mlp · digits", flush=True)
        raise InputError("--lr")
    sys.stderr.close()
    assert (stop.value.code, narrow.getvalue()) == (2, b"mlp ? digits\n")


@pytest.mark.large
@pytest.mark.parametrize("traceback", [False, True])
def test_a_bad_flag_ends_the_program_with_one_line_and_exit_code_2(traceback: bool) -> None:
    command = [sys.executable, "-m", "jaxddp.train", "--epochs", "-1", *["--traceback"] * traceback]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    *before, line = result.stderr.splitlines()
    assert line == "error: --epochs -1: must be at least 0"
    assert bool(before) == traceback == ("Traceback" in result.stderr)


def test_an_error_has_its_exit_code_though_nobody_reads_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    with pytest.raises(SystemExit) as stopped, cli.one_line_errors(show_traceback=False):
        raise InputError("--lr x: expected FLOAT")
    assert stopped.value.code == 2
