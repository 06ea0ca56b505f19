"""Import rules: jaxddp works without torch, torch_ref without jax, and pmap is used once."""

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import jaxddp
import torch_ref

JAXDDP, TORCH_REF = (Path(package.__file__).parent for package in (jaxddp, torch_ref))
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}
TORCH = {"torch"}


@cache
def sources(package: Path) -> dict[str, ast.Module]:
    """Return the modules of a package by their relative path."""
    return {path.relative_to(package).as_posix(): ast.parse(path.read_text()) for path in package.rglob("*.py")}


def imported_names(tree: ast.AST) -> set[str]:
    """Return the full names of the modules and objects that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported(tree: ast.AST) -> set[str]:
    """Return the top-level packages that a module imports, anywhere in it."""
    return {name.partition(".")[0] for name in imported_names(tree)}


def part_of_path(path: str, prefix: str = "") -> str | None:
    """Return the first folder or module of a path below `prefix`; None for a path outside of it."""
    if not path.startswith(prefix):
        return None
    return path.removeprefix(prefix).partition("/")[0].removesuffix(".py")


def part_of_name(name: str, prefix: str = "") -> str | None:
    """Return the first folder or module of a full name: "nn" for "jaxddp.nn.layers.Dropout"."""
    return part_of_path(name.removeprefix("jaxddp.").replace(".", "/"), prefix) if name.startswith("jaxddp.") else None


def violations(prefix: str, order: list[list[str]], modules: Mapping[str, ast.AST]) -> Iterator[str]:
    """Yield imports from the same row or a row below, as "nn/layers.py imports step"."""
    row = {name: number for number, names in enumerate(order) for name in names}
    for path, tree in modules.items():
        importer = part_of_path(path, prefix)
        if importer not in row:
            continue
        for imported_part in {part_of_name(name, prefix) for name in imported_names(tree)} & row.keys():
            if imported_part != importer and row[imported_part] >= row[importer]:
                yield f"{path} imports {imported_part}"


def unsafe(tree: ast.AST) -> list[str]:
    """Return imports and calls through which loaded data could run code; pickle's exceptions are allowed."""
    problems = sorted(imported(tree) & {"cloudpickle", "dill", "joblib", "shelve", "marshal"})
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "pickle":
            problems.append("pickle")
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            safe = options.get("weights_only") == "True" if name == "torch.load" else not name.startswith("pickle.")
            if not safe or name in ("eval", "exec") or options.get("allow_pickle", "False") != "False":
                problems.append(ast.unparse(node))
    return problems


def mentions(tree: ast.AST, name: str) -> int:
    """Count the occurrences of `name` as a name, an attribute or an import, but not in text."""
    return sum(
        name in (getattr(node, "id", None), getattr(node, "attr", None))
        or (isinstance(node, ast.alias) and node.name.rpartition(".")[2] == name)
        for node in ast.walk(tree)
    )


def test_pmap_is_used_once() -> None:
    counts = {path: mentions(tree, "pmap") for path, tree in sources(JAXDDP).items()}
    assert {path: count for path, count in counts.items() if count} == {"distributed/replicas.py": 1}


# A folder may import folders in the rows above its own, but none in its own row.
ORDER = [
    ["__main__", "errors", "state", "torch_layout"],
    ["files", "scripts", "signals"],
    ["config"],
    ["program"],
    ["data", "tracking", "distributed", "optim"],
    ["nn", "cli", "loader", "checkpoint"],
    ["models", "comm_hooks", "doctor"],
    ["step"],
    ["data_parallel"],
    ["train"],
    ["plan", "programs"],
    ["collectives", "layers", "losses", "schedules"],  # public names of modules in the folders
]
PARITY_ORDER = [
    ["deviation", "lazy_arrays", "operations", "private_parts", "replaced_functions"],
    ["graph", "stored_tensors", "sums", "quote", "idle_operations", "varied"],
    ["coverage", "held_types"],
    ["port", "records", "excerpts", "projections", "fingerprints", "catalogue", "environment", "family", "stopping"],
    ["user_code"],
    ["processes", "case_interface", "findings", "convert", "progress", "initial_draws", "rate_curves"],
    ["torch_side", "compare", "report"],
    ["jax_side", "recorder"],
    ["workers", "cases"],
    ["diagnosis"],
    ["runs", "recordings"],
    ["initialisation", "rates"],
    ["patch"],
    ["trials"],
    ["reporting"],
    ["checking"],
    ["preload"],
    ["command"],
    ["__main__"],
]
# The part of jaxddp that torch_ref may import, since it imports neither jax nor torch.
FRAMEWORK_FREE = {"errors", "files", "cli", "config", "data", "program", "scripts", "signals", "tracking"}
NEITHER = (
    "case_interface.py",
    "records.py",
    "lazy_arrays.py",
    "stored_tensors.py",
    "sums.py",
    "excerpts.py",
    "projections.py",
    "fingerprints.py",
    "operations.py",
    "idle_operations.py",
    "quote.py",
    "rate_curves.py",
    "coverage.py",
    "graph.py",
    "varied.py",
    "held_types.py",
    "family.py",
    "findings.py",
    "initial_draws.py",
    "progress.py",
    "private_parts.py",
    "replaced_functions.py",
    "stopping.py",
    "compare/",
    "report/",
    *(f"recorder/{name}.py" for name in ("__init__", "batches", "excerpt_grid", "files", "recorder")),
    *(f"recordings/{name}.py" for name in ("__init__", "clipping", "command", "run", "samples")),
)
NO_JAX = tuple(
    f"parity/{name}" for name in (*NEITHER, "processes.py", "torch_side/", "convert/twin_files.py", "recorder/torch_")
)
NO_TORCH = tuple(f"parity/{name}" for name in (*NEITHER, "jax_side/", "recorder/jax_loop.py"))


# Files of weights with the other side's names are converted as the check does; imported for such a file alone.
CONVERTS = {"train/build.py": {"jaxddp.parity.convert.twin_files.to_jax"}}


def test_the_table_names_every_folder() -> None:
    for package, order in ((JAXDDP, ORDER), (JAXDDP / "parity", PARITY_ORDER)):
        listed = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        assert listed - {"__init__", "parity"} == {name for row in order for name in row} - {"__init__"}


@pytest.mark.parametrize(("prefix", "order"), [("", ORDER), ("parity/", PARITY_ORDER)], ids=["jaxddp", "parity"])
def test_each_folder_imports_only_folders_in_rows_above(prefix: str, order: list[list[str]]) -> None:
    assert list(violations(prefix, order, sources(JAXDDP))) == []


def test_only_parity_imports_torch_and_torch_ref() -> None:
    for path, tree in sources(JAXDDP).items():
        if not path.startswith("parity/") or path.startswith(NO_TORCH):
            assert not imported(tree) & TORCH, path
        if not path.startswith(("parity/", "programs/")):  # a program has both sides, in functions
            assert not imported(tree) & {"torch_ref"}, path
            imports = {name for name in imported_names(tree) if name.startswith("jaxddp.parity")}
            assert imports <= CONVERTS.get(path, set()), path


def test_framework_free_folders_import_neither_framework() -> None:
    for path, tree in sources(JAXDDP).items():
        if part_of_path(path) in FRAMEWORK_FREE:
            assert not imported(tree) & (JAX | TORCH), path
            assert {part_of_name(name) for name in imported_names(tree)} - {None} <= FRAMEWORK_FREE, path
        if path.startswith(NO_JAX):
            assert not imported(tree) & JAX, path


def test_torch_ref_imports_no_jax_and_only_the_framework_free_folders_of_jaxddp() -> None:
    for path, tree in sources(TORCH_REF).items():
        assert not imported(tree) & JAX, path
        converts = {"jaxddp.parity.convert.twin_files.to_torch"} if path == "weights.py" else set()
        names = imported_names(tree) - converts
        assert {part_of_name(name) for name in names} - {None} <= FRAMEWORK_FREE, path


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("collectives", "distributed.collectives"),
        ("layers", "nn.layers"),
        ("layers", "nn.pooling"),
        ("losses", "nn.losses"),
        ("schedules", "optim.schedules"),
    ],
)
def test_public_names_have_what_their_modules_define(name: str, home: str) -> None:
    public, module = (import_module(f"jaxddp.{path}") for path in (name, home))
    defined = {node.name for node in sources(JAXDDP)[f"{home.replace('.', '/')}.py"].body if hasattr(node, "name")}
    constants = set(re.findall(r"^([A-Z]\w*)\b.* = [^T]", inspect.getsource(module), re.MULTILINE))
    assert {word for word in defined | constants if not word.startswith("_")} <= set(module.__all__)
    assert all(getattr(public, word) is getattr(module, word) for word in module.__all__)
    assert getattr(jaxddp, name) is public


def test_no_package_imports_tests() -> None:
    for path, tree in [*sources(JAXDDP).items(), *sources(TORCH_REF).items()]:
        assert not imported(tree) & {"tests", "benchmarks", "examples"}, path


def test_loaded_data_cannot_run_code() -> None:
    for path, tree in [*sources(JAXDDP).items(), *sources(TORCH_REF).items()]:
        # Batches are read in processes that get the user's source from the trainer, not from a file.
        assert unsafe(tree) == ["cloudpickle"] * (path == "data/sources/workers.py"), path


def test_a_planted_import_of_a_lower_row_is_detected() -> None:
    planted = {"nn/layers.py": ast.parse("from jaxddp.step import zero\nfrom jaxddp import errors")}
    assert list(violations("", ORDER, planted)) == ["nn/layers.py imports step"]
    planted = {"parity/compare/judge.py": ast.parse("def f():\n    from jaxddp.parity.diagnosis.samples import x")}
    assert list(violations("parity/", PARITY_ORDER, planted)) == ["parity/compare/judge.py imports diagnosis"]


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (imported, "import torch.nn as nn"),
        (imported, "def f():\n    from torch import nn"),
        (lambda tree: mentions(tree, "pmap"), "jax.pmap(f)"),
        (lambda tree: mentions(tree, "pmap"), "from jax import pmap as p"),
        (lambda tree: mentions(tree, "pmap"), "g = functools.partial(jax.pmap, axis_name='i')"),
        (unsafe, "from pickle import load"),
        (unsafe, "pickle.load(file)"),
        (unsafe, "torch.load(path)"),
        (unsafe, "torch.load(path, weights_only=False)"),
        (unsafe, "np.load(path, allow_pickle=True)"),
    ],
)
def test_planted_faults_are_seen(check: Callable[[ast.AST], object], source: str) -> None:
    assert check(ast.parse(source))


def test_similar_text_and_safe_calls_are_not_reported() -> None:
    tree = ast.parse("'''jax.pmap and torch'''\nimport torchless\nfrom jaxddp import torch_random\nnp.load(path)")
    assert not imported(tree) & TORCH
    assert not mentions(tree, "pmap")
    assert not unsafe(tree)
    assert not unsafe(ast.parse("torch.load(path, weights_only=True)\nnp.load(path, allow_pickle=False)"))


def modules_after(code: str, *argv: str) -> set[str]:
    """Return the top-level modules that are loaded after `code` ran in a fresh process."""
    report = "import sys; print('loaded', *{name.partition('.')[0] for name in sys.modules})"
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", f"import atexit\natexit.register(lambda: exec({report!r}))\n{code}", *argv]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split()[1:])


def test_training_with_jax_loads_no_torch(tmp_path: Path) -> None:
    run = "import runpy; runpy.run_module('jaxddp.train', run_name='__main__')"
    flags = "--platform cpu --dataset linear --model linear --epochs 1 --output"
    loaded = modules_after(run, *flags.split(), str(tmp_path / "run"))
    assert {"jax", "google"} <= loaded
    assert not loaded & (TORCH | {"torch_ref", "tensorboardX", "sklearn"})


def test_torch_ref_and_torchs_side_of_the_parity_check_load_no_jax() -> None:
    names = [f"torch_ref.{path[:-3].replace('/', '.')}" for path in sources(TORCH_REF) if "__" not in path]
    names += ["jaxddp.parity.torch_side.pool", "jaxddp.parity.torch_side.layers"]
    loaded = modules_after("; ".join(f"import {name}" for name in names))
    assert {"torch", "jaxddp"} <= loaded
    assert not loaded & JAX


def test_the_recorder_of_either_side_loads_only_its_own_framework(tmp_path: Path) -> None:
    begin = (
        "import sys; from pathlib import Path; from jaxddp.parity import Recorder; recorder = Recorder(sys.argv[1], 1)"
    )
    in_torch = "import torch; model = torch.nn.Linear(1, 1)"
    rest = "recorder.watch(model, torch.optim.SGD(model.parameters(), lr=1.0))"
    assert not modules_after(f"{begin}; {in_torch}; {rest}", str(tmp_path / "torch")) & JAX
    in_jax = (
        "import jax; recorder.watch({'w': jax.numpy.ones(2)}); recorder.step([], 0.0, params={'w': jax.numpy.ones(2)})"
    )
    loaded = modules_after(f"{begin}; {in_jax}", str(tmp_path / "jax"))
    assert "jax" in loaded and not loaded & TORCH


@pytest.mark.parametrize("module", ["compare.judge, jaxddp.parity.compare.layers", "command"])
def test_comparing_records_and_reading_the_checks_flags_load_neither_framework(module: str) -> None:
    loaded = modules_after(f"import jaxddp.parity.{module}")
    assert "numpy" in loaded and not loaded & (JAX | TORCH)
