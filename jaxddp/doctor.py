"""`jaxddp doctor`: what is installed, what is missing for what, which devices there are, where programs are kept."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jaxddp.cli.errors import one_line_errors
from jaxddp.cli.flags import parse_plain
from jaxddp.config.ulimits import LEAST_FOR_JAX, ulimits
from jaxddp.errors import INSTALLED_BY

CORE = ("jax", "flax", "optax", "numpy")
# Extra -> its packages, and what needs them.
EXTRAS = {
    "plots": (("matplotlib",), "the picture of a run with --output"),
    "hub": (("transformers", "tokenizers", "pyarrow"), "checkpoints and data of Hugging Face"),
    "track": (("wandb", "mlflow"), "--track"),
}
DISTRIBUTIONS = {"mlflow": "mlflow-skinny"}


@dataclass(frozen=True)
class DoctorOptions:
    """Say what is installed, which devices there are, what is missing for what, and whether programs are kept.

    Exit code 0: nothing is wrong; 1: a line begins with "problem".
    """


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        name: what it is about.
        text: what was found.
        wrong: whether training is slower than it could be, or impossible.
    """

    name: str
    text: str
    wrong: bool = False

    def __str__(self) -> str:
        return f"{'problem' if self.wrong else self.name:9} {f'{self.name}: ' if self.wrong else ''}{self.text}"


def findings() -> Iterator[Finding]:
    """Yield the lines of the report."""
    yield Finding("jaxddp", f"{version('jaxddp')} in {Path(__file__).parent}")
    yield Finding("python", f"{platform.python_version()} in {sys.prefix}, {platform.system()} {platform.machine()}")
    yield Finding("packages", ", ".join(f"{name} {version(name)}" for name in CORE))
    yield _torch()
    for extra, (packages, needs) in EXTRAS.items():
        versions = {name: _version(name) for name in packages}
        found = [f"{name} {number}" for name, number in versions.items() if number]
        missing = [f'"{INSTALLED_BY[name]}"' for name, number in versions.items() if not number]
        install = [f"missing for {needs}: pip install {' '.join(missing)}"] if missing else []
        yield Finding(extra, "; ".join([*filter(None, [", ".join(found)]), *install]))
    yield from _devices()
    yield _memory()
    yield _cache()


def _torch() -> Finding:
    """Return torch's version, if it can be imported; another process tries, since a broken installation may crash."""
    command = [sys.executable, "-c", "import torch; print(torch.__version__)"]
    tried = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if tried.returncode == 0:
        return Finding("torch", tried.stdout.strip())
    last = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
    if last.startswith("ModuleNotFoundError: No module named 'torch'"):
        needs = "jaxddp check, jaxddp convert and python -m torch_ref.train"
        return Finding("torch", f'missing for {needs}: pip install "{INSTALLED_BY["torch"]}"')
    return Finding("torch", f"cannot be imported: {last[:200]}", wrong=True)


def _version(name: str) -> str:
    """Return the version of an optional package; "" if it is missing."""
    if importlib.util.find_spec(name) is None:
        return ""
    try:
        return version(DISTRIBUTIONS.get(name, name))
    except PackageNotFoundError:
        return "installed"


def _devices() -> Iterator[Finding]:
    """Yield the devices on which jax would train, and GPUs that it cannot use."""
    gpus = _nvidia_gpus()
    try:
        import jax

        devices = jax.devices()
    except Exception as error:  # of many types, by the plugin that fails
        yield Finding("devices", f"jax does not start: {' '.join(str(error).split())[:200]}", wrong=True)
        return
    if gpus and devices[0].platform != "gpu":
        install = 'pip install "jax[cuda12]"'
        yield Finding("devices", f"jax does not use {len(gpus)} x {gpus[0]}: {install}", wrong=True)
        return
    kind = devices[0].device_kind
    if devices[0].platform == "gpu":
        yield Finding("devices", f"{len(devices)} x {kind}")
    else:
        yield Finding("devices", "no GPU; --devices N makes N CPU devices, by default 2")


def _nvidia_gpus() -> list[str]:
    """Return the names of this machine's NVIDIA GPUs."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return listed.stdout.splitlines() if listed.returncode == 0 else []


def _memory() -> Finding:
    """Return the cores and the memory that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{cores} cores, {memory / 2**30:.0f} GiB of memory"
    if (limit := ulimits().get("ulimit -v", LEAST_FOR_JAX)) < LEAST_FOR_JAX:
        least = f"must be at least {LEAST_FOR_JAX // 1024} or unlimited"
        return Finding("machine", f"{text}; ulimit -v {limit // 1024}: {least}", wrong=True)
    return Finding("machine", text)


def _cache() -> Finding:
    """Return where compiled programs are kept, if they can be."""
    import jax

    from jaxddp.distributed.compile_cache import keep_programs

    folder = keep_programs() or jax.config.values["jax_compilation_cache_dir"]
    if folder is None:
        where = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Finding("cache", f"{where}/jaxddp cannot be written: every run compiles its programs again", wrong=True)
    kept = sum(path.stat().st_size for path in Path(folder).glob("*") if path.is_file())
    return Finding("cache", f"{folder}, {kept / 2**20:.0f} MiB of compiled programs")


def run(argv: Sequence[str]) -> None:
    """Run the command line."""
    with one_line_errors("--traceback" in argv):
        parse_plain(DoctorOptions, [word for word in argv if word != "--traceback"], "jaxddp doctor")
        wrong = False
        for finding in findings():
            print(finding, flush=True)
            wrong |= finding.wrong
    sys.exit(1 if wrong else 0)
