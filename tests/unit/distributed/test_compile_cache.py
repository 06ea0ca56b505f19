"""Compiled programs are kept in the user's cache folder, by several processes at once, and never where others write."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import jax
import pytest

from jaxddp.distributed.compile_cache import _remove_oldest, keep_programs

# Prints the sum that it computed, and how many programs jax read and wrote.
PROGRAM = """
import jax
from jaxddp import prepare
counts = {"hits": 0, "misses": 0}
def count(event, **_):
    for name in counts:
        counts[name] += event == f"/jax/compilation_cache/cache_{name}"
jax.monitoring.register_event_listener(count)
prepare(1, "cpu")
jax.jit(jax.numpy.negative)(1.5)
print(jax.jit(lambda x: x + x)(1.5), counts["hits"] > 0, counts["misses"] > 0)
"""


def start(cache: Path, **environment: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    env = kept | {"XDG_CACHE_HOME": str(cache)} | environment
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    printed, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, complaints
    return printed.strip(), complaints


def programs(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*-cache") if path.is_file())


def test_a_second_run_compiles_nothing(tmp_path: Path) -> None:
    assert finish(start(tmp_path)) == ("3.0 False True", "")
    (first,) = {path.parent for path in programs(tmp_path)}
    assert first.parent == tmp_path / "jaxddp"
    assert first.stat().st_mode & 0o777 == 0o700
    assert finish(start(tmp_path)) == ("3.0 True False", "")


@pytest.mark.large
def test_processes_that_start_together_share_a_folder(tmp_path: Path) -> None:
    together = [start(tmp_path) for _ in range(3)]
    for process in together:
        assert finish(process)[0].startswith("3.0 ")
    assert finish(start(tmp_path)) == ("3.0 True False", "")


def halve(paths: list[Path]) -> None:
    for number, path in enumerate(paths):
        path.write_bytes(b"" if number % 2 else path.read_bytes()[: path.stat().st_size // 2])
    assert number > 0


def test_damaged_programs_are_compiled_again_once_and_told_in_a_line(tmp_path: Path) -> None:
    """Leave half of a program, as a kill does, and nothing of the next, as a full disk does; let them grow old."""
    finish(start(tmp_path))
    halve(programs(tmp_path))
    assert finish(start(tmp_path)) == ("3.0 False True", "")  # another process may be writing them
    for path in programs(tmp_path):
        os.utime(path, (1e9, 1e9))
    printed, complaints = finish(start(tmp_path))
    assert printed == "3.0 False True"
    line = rf"note: {tmp_path}/jaxddp/jaxlib-.*: a damaged program \(.*\) is compiled again\n"
    assert re.fullmatch(line, complaints)
    assert finish(start(tmp_path)) == ("3.0 True False", "")


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    finish(start(tmp_path))
    (folder,) = {path.parent for path in programs(tmp_path)}
    folder.chmod(0o777)
    assert finish(start(tmp_path)) == ("3.0 False False", "")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("setting", ["JAX_ENABLE_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"])
def test_the_users_own_settings_hold(tmp_path: Path, setting: str) -> None:
    values = {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_COMPILATION_CACHE_DIR": f"{tmp_path}/mine"}
    (tmp_path / "file").touch()  # no folder can be made in it
    values["XDG_CACHE_HOME"] = f"{tmp_path}/file"
    assert finish(start(tmp_path, **{setting: values[setting]}))[0].startswith("3.0 False")
    assert not (tmp_path / "jaxddp").exists()


def test_a_configured_folder_is_kept() -> None:
    settings: Any = jax.config
    before = settings.jax_compilation_cache_dir
    assert before is not None
    assert keep_programs() is None
    assert settings.jax_compilation_cache_dir == before


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    before = cast(Any, jax.config).jax_compilation_cache_dir
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert keep_programs() is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_files_read_least_recently_are_removed_first(tmp_path: Path) -> None:
    for age, name in enumerate(["newest", "middle", "oldest"]):
        (tmp_path / name).write_bytes(b"x" * 10)
        os.utime(tmp_path / name, (1e9 - age, 1e9))
    _remove_oldest(tmp_path, 30)
    assert len(list(tmp_path.iterdir())) == 3
    _remove_oldest(tmp_path, 19)
    assert [path.name for path in tmp_path.iterdir()] == ["newest"]
