"""The files of a run's program, kept in the run folder to be compared, and never executed.

    program/          run.py and the modules next to it that it has imported
    program.json      their digests, statement by statement, and the values of its flags and options

A digest is of the parsed statement, so that comments and layout do not count as changes.
"""

import ast
import contextlib
import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from jaxddp.config import TrainerConfig
from jaxddp.errors import InputError, listed
from jaxddp.files import read_json, write_atomically
from jaxddp.program import Program, default_config
from jaxddp.program.config import as_written
from jaxddp.scripts import import_root, users_file
from jaxddp.tracking.run_folder import CONFIG_FILE, PROGRAM_FILE, PROGRAM_FOLDER, load_config

Config = TypeVar("Config", bound=TrainerConfig)

Digests = dict[str, dict[str, str]]  # file -> name of a top-level statement -> digest


def keep_program(program: Program, folder: Path) -> None:
    """Copy the files of a program to a run folder, with their digests; a program without a file has none."""
    files = files_of(program)
    if program.path is None:
        return
    for name, path in files.items():
        copy = folder / PROGRAM_FOLDER / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(copy, path.read_bytes())
    _write({"file": program.path.name, "statements": digests(files)}, program, folder)


def keep_flags(program: Program, folder: Path) -> None:
    """Keep the values of a program's flags with which a run is resumed, next to the digests of its start."""
    if (saved := _saved(folder)) is not None:
        _write(saved, program, folder)


def resumed_configs(folder: Path, default: Config) -> tuple[Config, Config]:
    """Return the configuration of the run in a folder, and the one with which it continues if no flag is given.

    The second has the flags and options whose values have changed in the program since.

    Args:
        default: configuration of the file as it is now.

    Raises:
        InputError: the folder holds no run of this program, or the values contradict each other.
    """
    saved, program = load_config(folder, type(default)), getattr(type(default), "PROGRAM", None)
    if program is None:
        return saved, saved
    with as_written(program):
        return saved, dataclasses.replace(saved, **_edits(folder, program, default))


def check_resumes(config: TrainerConfig, saved: TrainerConfig, default: TrainerConfig) -> None:
    """Check that a run can continue; an error about a value that its file has set names the file.

    Args:
        saved, default: see `resumed_configs`.

    Raises:
        InputError: see `TrainerConfig.check_resumes`.
    """
    names = [f.name for f in dataclasses.fields(config) if getattr(default, f.name) != getattr(saved, f.name)]
    edited = {name for name in names if getattr(config, name) == getattr(default, name)}
    program = getattr(type(config), "PROGRAM", None)
    with contextlib.nullcontext() if program is None else as_written(program, edited):
        config.check_resumes(saved)


def _edits(folder: Path, program: Program, default: TrainerConfig) -> dict[str, Any]:
    """Return the values in `default` of the flags to which the file gave other values as the run was last started."""
    saved = None if program.path is None else _saved(folder)
    if saved is None or "flags" not in saved:
        return {}
    before, now = saved["flags"], json.loads(_to_json(_flags(program)))
    names = [f.name for f in dataclasses.fields(default) if before.get(f.name) != now.get(f.name)]
    return {name: getattr(default, name) for name in names}


def _flags(program: Program) -> dict[str, Any]:
    """Return the flags and options that a program's file sets, with their values."""
    default = default_config(program, TrainerConfig)
    return {name: getattr(default, name) for name in (*program.defaults, *program.option_kinds)}


def _write(about: dict[str, Any], program: Program, folder: Path) -> None:
    write_atomically(folder / PROGRAM_FILE, f"{_to_json(about | {'flags': _flags(program)})}\n".encode())


def _to_json(about: dict[str, Any]) -> str:
    return json.dumps(about, indent=2, default=str)


def files_of(program: Program) -> dict[str, Path]:
    """Return a program's file and the imported modules below its import root, by their paths there."""
    if program.path is None:
        return {}
    script = program.path.resolve()
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    real = (file for file in loaded if file is not None and file.endswith(".py") and Path(file).is_file())
    beside = (users_file(file, script) for file in real)
    paths = {script, *(path.resolve() for path in beside if path is not None)}
    return {path.relative_to(import_root(script)).as_posix(): path for path in sorted(paths)}


def digests(files: dict[str, Path]) -> Digests:
    """Return a digest of each top-level statement of each file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "run.py")
    ...     texts = ["lr = 1e-3", "lr = 0.001  # the same"]
    ...     one, other = (digests({"run.py": path}) for text in texts if path.write_text(text))
    >>> one == other, [*one["run.py"]]
    (True, ['lr'])
    """
    return {name: dict(_statements(path.read_bytes())) for name, path in files.items()}


def program_digest(program: Program) -> str:
    """Return a digest of all statements of a program's files; "" for a program without a file."""
    return json.dumps(digests(files_of(program)), sort_keys=True) if program.path is not None else ""


def check_program(folder: Path, program: Program) -> None:
    """Raise `InputError` if the run in a folder is one of another file, or of none.

    A run folder does not say where its program is: what is loaded must not choose which code runs.
    """
    saved = _saved(folder)
    if saved is not None and program.path is None:
        raise InputError(f"--resume {folder}: is a run of {saved['file']}; give that file too, as the first argument")
    if saved is None and program.path is not None and (folder / CONFIG_FILE).exists():
        raise InputError(f"--resume {folder}: is a run without a file; leave {program.name} out")
    if saved is not None and program.path is not None and saved["file"] != program.path.name:
        raise InputError(f"--resume {folder}: is a run of {saved['file']}, not of {program.path.name}")


def program_changes(folder: Path, program: Program) -> list[str]:
    """Describe the statements of a program that differ from those that the run in the folder started with.

    Returns:
        A line, or none if nothing has changed.
    """
    saved = _saved(folder)
    if saved is None:
        return []
    now, before = digests(files_of(program)), saved["statements"]
    changed = []
    for file in sorted({*now, *before}):
        one, other = before.get(file, {}), now.get(file, {})
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        if names:
            changed.append(f"{listed(names, joint=', ')} in {file}")
    return [f"changed since the run began: {'; '.join(changed)}"] if changed else []


def _saved(folder: Path) -> dict[str, Any] | None:
    path = folder / PROGRAM_FILE
    if not path.exists():
        return None
    saved = read_json(path)
    statements = saved.get("statements") if isinstance(saved, dict) else None
    right = isinstance(statements, dict) and all(isinstance(of_file, dict) for of_file in statements.values())
    if not right or not isinstance(saved.get("file"), str) or not isinstance(saved.get("flags", {}), dict):
        raise InputError(f"{path}: not the digests of a run's program")
    return saved


def _statements(text: bytes) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each top-level statement, without docstrings."""
    seen: dict[str, int] = {}
    for statement in _without_texts(ast.parse(text)).body:
        name = getattr(statement, "name", None) or ast.unparse(statement).partition("\n")[0].partition(" = ")[0][:40]
        seen[name] = seen.get(name, 0) + 1
        number = f" ({seen[name]})" if seen[name] > 1 else ""
        yield f"{name}{number}", hashlib.sha256(ast.dump(statement).encode()).hexdigest()[:16]


def _without_texts(tree: ast.Module) -> ast.Module:
    """Drop docstrings, also those of fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            node.body = [part for part in node.body if not _is_text(part)] or [ast.Pass()]
    return tree


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
