"""Profile of a few steps of a job in jaxddp; its trace is kept, for ui.perfetto.dev."""

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import jobs, platform
from benchmarks.gpu.trace import analysis
from benchmarks.gpu.train_jax import Training
from benchmarks.trace import STEPS, traced
from jaxddp.distributed.devices import prepare
from jaxddp.files import write_atomically


def measure(job: str, folder: str, smoke: bool) -> dict[str, Any]:
    """Trace a job, keep the trace as JOB.json.gz, and return what it shows."""
    chosen = jobs(smoke)[job]
    devices = prepare(1 if smoke else None, platform(smoke))
    training = Training(chosen, devices, chosen.profiled)
    with tempfile.TemporaryDirectory(prefix="gpu-trace-") as temporary:
        trace = traced(training.steps, Path(temporary))
    write_atomically(Path(folder, f"{job}.json.gz"), gzip.compress(json.dumps(trace).encode()))
    return {"steps": STEPS, "batch_per_gpu": chosen.profiled, "gpus": len(devices), **analysis(trace)}
