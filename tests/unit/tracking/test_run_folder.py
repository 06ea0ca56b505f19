"""Run folders: claiming one, and the config saved in it."""

import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxddp.config import TrainConfig
from jaxddp.errors import InputError
from jaxddp.files import UNFINISHED
from jaxddp.tracking import run_folder
from jaxddp.tracking.run_folder import check_same_data, claim_output, load_config, save_config, save_digests
from tests.unit.config.test_config import NO_DEFAULT
from torch_ref.config import TorchConfig

# ---- claiming


def claim(path: str | Path, resume: bool = False, space: int = 0) -> Path:
    """Claim a folder, and release it again."""
    with claim_output(path, resume, space) as folder:
        return folder


def test_claiming_creates_the_folder_or_accepts_an_empty_one(tmp_path):
    assert claim(str(tmp_path / "runs" / "a")) == tmp_path / "runs" / "a"
    assert claim(tmp_path / "runs" / "a").is_dir()


def test_claiming_to_resume_accepts_a_run(tmp_path):
    save_config(TrainConfig(), claim(tmp_path / "run"))
    before = sorted(tmp_path.rglob("*"))
    assert claim(tmp_path / "run", resume=True) == tmp_path / "run"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("target", "resume", "message"),
    [
        ("run", False, "--output {}: already holds a run; choose a new folder, or continue the run with --resume {}"),
        ("notes", False, "--output {}: holds other files (a, b, c, ...); choose a new or empty folder"),
        ("file", False, "--output {}: is a file; must be a folder"),
        ("file/run", False, "--output {}: not a directory; must be a writable folder"),
        ("new/" + 300 * "x", False, "--output {}: file name too long; must be a writable folder"),
        ("notes", True, "--resume {}: not a run folder (it has no config.json)"),
        ("missing", True, "--resume {}: not a run folder (it has no config.json)"),
    ],
)
def test_a_folder_that_cannot_be_claimed_is_refused_and_unchanged(tmp_path, target, resume, message):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()
    (tmp_path / "notes").mkdir()
    for name in "dcba":
        (tmp_path / "notes" / name).touch()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    path = tmp_path / target
    with pytest.raises(InputError) as error:
        claim(path, resume)
    assert str(error.value) == message.format(path, path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_lock_that_is_a_link_or_a_pipe_is_refused_and_the_target_unchanged(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match=r"run: its \.lock is a link, whose target would be overwritten; remove it$"):
        claim(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "precious"
    (tmp_path / "run" / ".lock").unlink()
    os.mkfifo(tmp_path / "run" / ".lock")
    with pytest.raises(InputError, match=r"run: its \.lock: is a pipe, a device or a socket; must be a regular file$"):
        claim(tmp_path / "run")


def test_a_path_that_is_not_utf8_is_refused_before_training(tmp_path):
    """Tensorstore cannot write there, which a run would learn at its first checkpoint."""
    (tmp_path / os.fsdecode(b"\xe4")).mkdir()
    for name in (b"l\xe4s", b"\xe4/run"):
        with pytest.raises(InputError, match=r"^--output .*: its path is not UTF-8, as checkpoints need it; choose an"):
            claim(tmp_path / os.fsdecode(name), False)
    assert [list(path.iterdir()) for path in tmp_path.iterdir()] == [[]]


def refusing(code):
    def refuse(*args):
        raise OSError(code, "Refused")

    return refuse


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_an_unwritable_folder_is_not_left_behind(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "open", refusing(code))
    path = tmp_path / "runs" / "a"
    with pytest.raises(InputError, match=r"^--output .*a: refused; must be a writable folder$"):
        claim(path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_for_a_checkpoint_is_told_before_anything_is_created(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**9, free=2_500_000))
    assert claim(tmp_path / "run", space=2_400_000).is_dir()
    with pytest.raises(InputError) as error:
        claim(tmp_path / "new" / "run", space=2_600_000)
    assert str(error.value) == (
        f"--output {tmp_path}/new/run: the disk has 2.5 MB free and the run needs 2.6 MB or more; "
        "free some, or choose a folder on another disk"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=0, free=0))  # it does not say
    assert claim(tmp_path / "new" / "run", space=2_600_000).is_dir()


# ---- one owner at a time

RACE = """
import sys
from jaxddp.errors import InputError
from jaxddp.config import TrainConfig
from jaxddp.tracking.run_folder import claim_output, save_config
resume = sys.argv[1] == "resume"
print("ready", flush=True)
for path in iter(sys.stdin.readline, ''):
    try:
        with claim_output(path.strip(), resume) as folder:
            save_config(TrainConfig(), folder)
            print("won", flush=True)
            sys.stdin.readline()
    except InputError as error:
        print(error, flush=True)
"""


@pytest.mark.parametrize("flag", ["output", "resume"])
def test_of_processes_that_start_at_once_exactly_one_owns_the_folder(tmp_path, flag):
    command = [sys.executable, "-c", RACE, flag]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for number in range(8):
        path = tmp_path / "runs" / str(number)
        if flag == "resume":
            path.mkdir(parents=True)
            save_config(TrainConfig(), path)
        for racer in racers:
            print(path, file=racer.stdin, flush=True)
        told = {racer: racer.stdout.readline() for racer in racers}
        (owner,) = [racer for racer, answer in told.items() if answer == "won\n"]
        owner.stdin.write("end\n")
        owners = "|".join(str(racer.pid) for racer in racers)
        refused = rf"--{flag} {path}: (in use by (process ({owners}) on \S+|another process)|already holds a run); .*\n"
        others = [answer for racer, answer in told.items() if racer is not owner]
        assert [answer for answer in others if not re.fullmatch(refused, answer)] == []
    for racer in racers:
        racer.communicate()


def test_a_run_that_started_and_ended_just_before_keeps_its_folder(tmp_path, monkeypatch):
    hold = run_folder.hold

    def hold_late(folder, where):
        save_config(TrainConfig(seed=3), folder)
        return hold(folder, where)

    monkeypatch.setattr(run_folder, "hold", hold_late)
    with pytest.raises(InputError, match=r"run: already holds a run; "):
        claim(tmp_path / "run")
    assert load_config(tmp_path / "run", TrainConfig).seed == 3


def test_a_killed_process_does_not_keep_the_folder(tmp_path):
    command = [sys.executable, "-c", RACE, "output"]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    print(tmp_path / "run", file=owner.stdin, flush=True)
    assert [owner.stdout.readline() for _ in range(2)] == ["ready\n", "won\n"]
    with pytest.raises(InputError, match=rf"run: in use by process {owner.pid} on .*; choose another folder, or wait"):
        claim(tmp_path / "run", resume=True)
    owner.kill()
    owner.communicate()
    claim(tmp_path / "run", resume=True)


def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOLCK))
    claim(tmp_path / "run")
    note = f"note: --output {tmp_path}/run: its file system has no locks; start no second run there\n"
    assert capsys.readouterr().err == note


# ---- files


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_run_killed_while_it_writes_its_first_config_does_not_block_the_next(tmp_path, call):
    program = f"""
import os, signal
from jaxddp.config import TrainConfig
from jaxddp.tracking.run_folder import claim_output, save_config
with claim_output({str(tmp_path / "run")!r}) as folder:
    os.{call} = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    save_config(TrainConfig(), folder)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert left == [".lock", f"config.json{UNFINISHED}"]
    save_config(TrainConfig(), claim(tmp_path / "run"))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "config.json"]


def test_a_folder_called_program_is_a_user_s_where_no_run_was(tmp_path):
    (tmp_path / "program").mkdir()
    with pytest.raises(InputError, match=r"holds other files \(program\)"):
        claim(tmp_path)
    (tmp_path / ".lock").touch()
    claim(tmp_path)


# ---- the config


@pytest.mark.parametrize(
    "config",
    [TrainConfig(), TrainConfig(**NO_DEFAULT), TorchConfig(strategy="manual")],
    ids=["defaults", "no default", "torch"],
)
def test_a_saved_config_is_loaded_unchanged(config: TrainConfig, tmp_path: Path) -> None:
    save_config(config, tmp_path)
    loaded = load_config(tmp_path, type(config))
    assert loaded == config
    assert isinstance(loaded.hidden_sizes, tuple | None)
    assert dataclasses.replace(config, seed=1) != loaded


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "not a run's config ([Errno 2] No such file"),
        ("{", "not a run's config (Expecting property name"),
        ("[1]", "not a run's config (unknown: list)"),
        ('{"learning_rate": 1, "b": 2}', "not a run's config (unknown: ['b', 'learning_rate'])"),
        ('{"lr": "fast"}', 'not a run\'s config (wrong type: lr is "fast")'),
        ('{"epochs": 1.5, "seed": true}', "not a run's config (wrong type: epochs is 1.5, seed is true)"),
        ('{"epochs": null}', "not a run's config (wrong type: epochs is null)"),
        ('{"betas": [0.9]}', "not a run's config (wrong type: betas is [0.9])"),
        ('{"hidden_sizes": [8, "8"]}', 'not a run\'s config (wrong type: hidden_sizes is [8, "8"])'),
        ('{"lr": NaN}', "--lr nan: must be at least 0"),
        ('{"model": "mpl"}', "--model mpl: unknown; did you mean mlp?"),
    ],
)
def test_a_bad_config_file_is_named_with_the_wrong_field(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_config(tmp_path, TrainConfig)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_an_integer_is_accepted_as_a_float(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"lr": 1, "hidden_sizes": [], "betas": [0, 0.9]}))
    assert load_config(tmp_path, TrainConfig) == TrainConfig(lr=1, hidden_sizes=(), betas=(0, 0.9))


# ---- the data


@pytest.mark.parametrize(
    ("digests", "which"),
    [
        ({"train": "a", "test": "x"}, "test"),
        ({"train": "x", "test": "b"}, "training"),
        ({"train": "b", "test": "a"}, "training and test"),
    ],
)
def test_other_data_are_refused_and_named(tmp_path, digests, which):
    save_digests({"train": "a", "test": "b"}, tmp_path)
    check_same_data(tmp_path, {"test": "b", "train": "a"})
    with pytest.raises(InputError) as error:
        check_same_data(tmp_path, digests)
    assert str(error.value) == (
        f"--resume {tmp_path}: the {which} data are not those that the run started with; "
        "restore the file, or give its new place by --data-path"
    )


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"train": "a"}', "[" * 100_000])
def test_a_bad_file_of_digests_is_named(tmp_path, text):
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(InputError, match=r"data\.json: .*; remove it to resume with any data$"):
        check_same_data(tmp_path, {"train": "a", "test": "b"})
    (tmp_path / "data.json").unlink()
    os.mkfifo(tmp_path / "data.json")
    with pytest.raises(InputError, match=r"data\.json: is a pipe, a device or a socket; must be a regular file$"):
        check_same_data(tmp_path, {"train": "a", "test": "b"})
    (tmp_path / "data.json").unlink()
    check_same_data(tmp_path, {"train": "a", "test": "b"})  # as in a run that was killed at its start
