"""Without torch, training in JAX and every --help work, and any other command says in one line what to install.

`make test-without-torch` tries it where `pip install -e .` alone was run; other tests hide the installed torch.
"""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from jaxddp.__main__ import COMMANDS as COMMANDS_OF_JAXDDP
from jaxddp.errors import INSTALLED_BY

ROOT = Path(__file__).parents[2]
PYTHON = Path(sys.prefix, "without-torch", "bin", "python")  # of `make test-without-torch`
HIDDEN = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
Run = Callable[..., subprocess.CompletedProcess[str]]
INSTALL = 'torch is not installed: pip install "torch>=2.9"'
MINE = "examples/mine.py"
LINE = 1 + (ROOT / MINE).read_text().splitlines().index("import torch")
COMMANDS = {
    "jaxddp check examples/ports/first_draft.py": INSTALL,
    f"jaxddp.parity {MINE} --width 8": f"{MINE}: line {LINE}: {INSTALL}",
    "jaxddp check --only linear": INSTALL,
    "jaxddp compare docs docs": INSTALL,
    f"jaxddp convert {MINE} a.safetensors b.safetensors": INSTALL,
    "torch_ref.train": INSTALL,
    f"torch_ref.train {MINE}": INSTALL,
    f"jaxddp train {MINE}": f"{MINE}: line {LINE}: {INSTALL}",
    f"jaxddp.train {MINE} --help": f"{MINE}: line {LINE}: {INSTALL}",
}
HELPS = {
    **{f"jaxddp {name}": f"jaxddp {name}" for name in COMMANDS_OF_JAXDDP},
    **{"jaxddp": "jaxddp COMMAND", "jaxddp.train": "jaxddp train", "jaxddp.parity": "jaxddp check"},
    **{"jaxddp.parity compare": "jaxddp compare", "torch_ref.train": "python -m torch_ref.train"},
}


@pytest.fixture(scope="module", params=["hidden", "absent"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run `python -m ...` where there is no torch."""
    python, environment = sys.executable, {**os.environ, "JAX_PLATFORMS": "cpu"}
    if request.param == "absent":
        if not PYTHON.exists():
            pytest.skip("needs an environment without torch: make test-without-torch")
        python = str(PYTHON)
        assert subprocess.run([python, "-c", "import torch"], capture_output=True).returncode
    else:
        hidden = tmp_path_factory.mktemp("hidden") / "site-packages"  # or errors would quote it as the user's
        hidden.mkdir()
        (hidden / "torch.py").write_text(HIDDEN)
        environment["PYTHONPATH"] = f"{hidden}"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-m", *words]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)

    return run


@pytest.mark.one_in(3)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_needs_torch_says_in_one_line_what_to_install(command: str, run: Run) -> None:
    ended = run(*command.split())
    assert (ended.returncode, ended.stdout) == (2, "")
    first, *frames = ended.stderr.splitlines()
    assert first == f"error: {COMMANDS[command]}"
    assert "Traceback" not in ended.stderr and len(frames) <= command.count("mine.py")


@pytest.mark.one_in(3, first=2)
@pytest.mark.parametrize("command", HELPS)
def test_every_help_is_printed_without_torch(command: str, run: Run) -> None:
    ended = run(*command.split(), "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"usage: {HELPS[command]} ") and "--" in ended.stdout


def test_the_doctor_says_what_lacks_torch(run: Run) -> None:
    ended = run("jaxddp", "doctor")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "torch     missing for jaxddp check, " in ended.stdout and 'pip install "torch>=2.9"' in ended.stdout


def test_jax_trains_without_torch(run: Run, tmp_path: Path) -> None:
    ended = run(
        "jaxddp.train", *["--model", "linear", "--epochs", "1", "--devices", "2", "--output"], str(tmp_path / "run")
    )
    assert ended.returncode == 0 and "replicas identical" in ended.stdout, ended.stderr


def imports(path: Path) -> Iterator[str]:
    """Yield the top-level packages that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [f"{node.module}"] if isinstance(node, ast.ImportFrom) else []
        yield from (name.partition(".")[0] for name in names)


def distributions(*extras: str) -> set[str]:
    """Return the packages that an installation with these extras brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {"jaxddp"}
    for requirement in [*project["dependencies"], *(r for e in extras for r in project["optional-dependencies"][e])]:
        name, inner = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", requirement).groups()  # type: ignore[union-attr]
        names |= distributions(*inner.split(",")) if name == "jaxddp" else {name.lower()}
    return names


def test_the_install_line_of_the_readme_brings_what_its_next_commands_import() -> None:
    text = (ROOT / "README.md").read_text()
    extras = re.findall(r'pip install -e "\.\[([\w,]+)\]"', text)[0].split(",")
    files = {*re.findall(r"jaxddp \w+ (examples/[\w/]+\.py)", text)}
    assert files >= {MINE, "examples/ports/first_draft.py"}
    known = packages_distributions()
    for path in files:
        for package in {*imports(ROOT / path)} - sys.stdlib_module_names:
            assert {name.lower() for name in known[package]} & distributions(*extras), f"{path}: {package}"


def test_what_an_error_says_to_install_is_what_an_extra_brings() -> None:
    brought = distributions(*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for package, requirement in INSTALLED_BY.items():
        if package not in ("PIL", "ray"):
            assert re.split("[>=<]", requirement)[0] in brought, package
