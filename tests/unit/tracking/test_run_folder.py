"""Run folders: claiming one, and the config saved in it."""

import dataclasses
import errno
import json
import tempfile
from pathlib import Path

import pytest

from jaxddp.config import TrainConfig
from jaxddp.errors import InputError
from jaxddp.files import write_atomically
from jaxddp.tracking.run_folder import claim_output, load_config, save_config
from tests.unit.config.test_config import NO_DEFAULT
from torch_ref.config import TorchConfig

# ---- claiming


def test_claiming_creates_the_folder_or_accepts_an_empty_one(tmp_path):
    assert claim_output(str(tmp_path / "runs" / "a")) == tmp_path / "runs" / "a"
    assert claim_output(tmp_path / "runs" / "a").is_dir()


def test_claiming_to_resume_accepts_a_run(tmp_path):
    save_config(TrainConfig(), claim_output(tmp_path / "run"))
    before = sorted(tmp_path.rglob("*"))
    assert claim_output(tmp_path / "run", resume=True) == tmp_path / "run"
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
        claim_output(path, resume)
    assert str(error.value) == message.format(path, path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_an_unwritable_folder_is_not_left_behind(tmp_path, monkeypatch, code):
    def refuse(dir):
        raise OSError(code, "Refused")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    path = tmp_path / "runs" / "a"
    with pytest.raises(InputError, match=r"^--output .*a: refused; must be a writable folder$"):
        claim_output(path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_atomic_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_atomically(path, b"old")
    write_atomically(path, b"newer")

    def refuse(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"newest")
    assert path.read_bytes() == b"newer"
    assert list(tmp_path.iterdir()) == [path]


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
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"lr": 1, "hidden_sizes": [], "betas": [0, 0.9]}))
    assert load_config(tmp_path, TrainConfig) == TrainConfig(lr=1, hidden_sizes=(), betas=(0, 0.9))
