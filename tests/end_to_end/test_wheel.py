"""A wheel built from the project works outside of the checkout: it trains, checks a port and draws its report."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run `python ...` in an empty folder, with the wheel's packages in front of the checkout's."""
    source, wheels, site, work = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "site", "work"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in ("jaxddp", "torch_ref"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, source], check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=300)

    shutil.copy(ROOT / "examples" / "ports" / "first_draft.py", work)
    packages = run("-c", "import jaxddp, torch_ref; print(*jaxddp.__path__, *torch_ref.__path__)").stdout.split()
    assert packages == [str(site / "jaxddp"), str(site / "torch_ref")]
    return run


@pytest.mark.large
@pytest.mark.parametrize("package", ["jaxddp", "torch_ref"])
def test_the_wheel_trains(package: str, run: Run) -> None:
    flags = "--dataset names --model char_mlp --epochs 1 --devices 2 --platform cpu --output"  # names: package data
    trained = run("-m", f"{package}.train", *flags.split(), f"run_{package}")
    assert trained.returncode == 0, trained.stderr
    assert "replicas identical" in trained.stdout


@pytest.mark.large
def test_the_wheel_checks_a_port_and_draws_its_report(run: Run) -> None:
    checked = run("-m", "jaxddp.parity", "first_draft.py", "--steps", "3", "--report", "report.html")
    assert checked.returncode == 1, checked.stderr
    assert "[gelu_approximation]" in checked.stdout
    read = run("-c", "from pathlib import Path; print(Path('report.html').read_text())").stdout
    assert "<style>" in read and "<svg" in read


@pytest.mark.large
def test_the_wheel_holds_the_packages_and_nothing_else(run: Run) -> None:
    listed = run("-c", "import jaxddp, os; print(*sorted(os.listdir(os.path.dirname(jaxddp.__path__[0]))))").stdout
    names = {name for name in listed.split() if not name.endswith(".dist-info")}
    assert names == {"bin", "jaxddp", "torch_ref"}  # bin has the console script
