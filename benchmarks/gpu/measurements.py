"""List of all measurements: what each calls, in which time; needs neither jax nor torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import CONTENDERS, FLOPS, jobs, row_name
from benchmarks.workloads import workloads

PARTS = ("machine", "parity", "precision", "tests", "benchmark", "utilisation", "profile")
CPU = {"JAX_PLATFORMS": "cpu"}
# jax takes three quarters of a GPU's memory when it starts, unless told not to; torch needs some beside it.
SHARED_GPU = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

PORT = str(Path("examples", "ports", "residual_convnet.py"))
EQUIVALENCE = [f"tests/equivalence/test_{name}.py" for name in ("matrix", "equivalence", "accumulation", "buffers")]
CORE = ["tests/unit/step", "tests/unit/nn", *EQUIVALENCE]
SMALL_CORE = ["tests/unit/nn/test_torch_weights.py"]  # what XLA compiles differs in a smoke run
# Workloads that tell the most come first.
ORDER = ("decoder", "residual", "wide_mlp", "mlp", "convnet", "llama", "two_convs", "decoder_dropout", "char_mlp")
# Each contender once in a smoke run; cuDNN's needs a GPU.
SMOKE_PAIRS = (("decoder", "jaxddp"), ("decoder", "torch"), ("convnet", "jaxddp"), ("convnet", "torch_compile"))


@dataclass(frozen=True)
class Measurement:
    """A function that runs in a child process and returns a row of a part.

    Attributes:
        part: the part.
        name: name of the row.
        seconds: time that it should take; what it leaves goes to the measurements after it.
        module: module in `benchmarks`.
        function: name of the function.
        arguments: arguments of the function.
        env: variables of the child.
    """

    part: str
    name: str
    seconds: float
    module: str
    function: str = "measure"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


def measurements(folder: Path, smoke: bool, gpus: int) -> list[Measurement]:
    """Return all measurements in their order.

    Args:
        folder: folder of the results.
        smoke: measure tiny sizes on CPU devices.
        gpus: number of GPUs.
    """
    small = {"smoke": smoke}
    return [
        Measurement("machine", "hardware", 20, "gpu.machine"),
        Measurement("machine", "rates", 160, "gpu.rates", arguments=small),
        *_parity(folder, smoke, gpus),
        *(
            Measurement("precision", name, 90, f"gpu.precision_{name}", arguments={"folder": str(folder), **small})
            for name in ("jax", "torch")
        ),
        Measurement("tests", "core, on CPU devices", 150, "gpu.suite", "core", small, CPU),
        Measurement("tests", "GPU against CPU", 150, "gpu.suite", "gpu", env=CPU if smoke else {}),
        *_benchmark(smoke),
        *_utilisation(smoke),
        *(
            Measurement("profile", name, 90, "gpu.profile", arguments={"job": name, "folder": str(folder), **small})
            for name in jobs(smoke)
        ),
    ]


def _parity(folder: Path, smoke: bool, gpus: int) -> Iterator[Measurement]:
    """Yield the checks of the built-in models and, on GPUs, of a port in float64 and float32."""
    device = "cpu" if smoke else "gpu"
    flags = ["--platform", device, "--torch-platform", device]
    if smoke:
        checks = {"models": ["--devices", "1", "--only", "mlp sgd x?", "--steps", "1"]}
    else:
        checks = {"models": selection(gpus), "port": [PORT, "--devices", str(world_size(gpus))]}
    for name, words in checks.items():
        output = str((folder / f"parity-{name}.json").absolute())
        yield Measurement(
            "parity", name, 150, "gpu.parity", arguments={"flags": [*words, *flags], "output": output}, env=SHARED_GPU
        )


def world_size(gpus: int) -> int:
    """Return the replicas of a check: jax needs a GPU for each."""
    return min(2, gpus)


def selection(gpus: int) -> list[str]:
    """Return the flags that select the built-in cases which fit on so many GPUs; some have twice the replicas.

    >>> selection(1), selection(8)
    (['--devices', '1', '--only', '* x1'], ['--devices', '2'])
    """
    size = world_size(gpus)
    return ["--devices", str(size), *([] if gpus >= 2 * size else ["--only", f"* x{size}"])]


def _benchmark(smoke: bool) -> Iterator[Measurement]:
    """Yield `python -m benchmarks` for one workload after another, so that none is lost with another, and growth."""
    flags = ["--platform", "cpu" if smoke else "gpu", *(["--smoke"] if smoke else [])]
    names = ["wide_mlp"] if smoke else [*ORDER, *(name for name in workloads() if name not in ORDER)]
    chosen = {
        # The default job, and what surrounds a step, are measured beside the default workload.
        name: ["--workloads", name, "--parts", *(["race", "measures"] if name == "mlp" else ["race"])]
        for name in names
    }
    if not smoke:
        chosen["growth"] = ["--parts", "growth"]
    for name, words in chosen.items():
        yield Measurement("benchmark", name, 66, "__main__", "main", {"argv": [*flags, *words]}, SHARED_GPU)


def _utilisation(smoke: bool) -> Iterator[Measurement]:
    """Yield the count of the models' operations, and the speed of every contender in every job."""
    yield Measurement("utilisation", FLOPS, 60, "gpu.flops", arguments={"smoke": smoke}, env=CPU)
    every = [(job, name) for job in jobs(smoke) for name in CONTENDERS if (job, name) != ("convnet", "jaxddp_cudnn")]
    for job, name in SMOKE_PAIRS if smoke else every:
        contender = CONTENDERS[name]
        arguments = {"job": job, "smoke": smoke, **contender.arguments}
        yield Measurement("utilisation", row_name(job, name), 70, contender.module, arguments=arguments)
