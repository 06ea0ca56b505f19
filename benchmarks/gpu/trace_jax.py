"""Trace of a few steps of a job: `python -m benchmarks.gpu.trace_jax JOB FOLDER [--smoke]`.

The trace is kept in the folder, for ui.perfetto.dev. Prints one line of JSON: what `benchmarks.gpu.trace` reads in it.
"""

import gzip
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from benchmarks.gpu import part
from benchmarks.gpu.jobs import jobs
from benchmarks.gpu.jobs_jax import Training
from benchmarks.gpu.trace import analysis
from benchmarks.trace import STEPS, traced
from jaxddp import cli
from jaxddp.distributed.devices import prepare
from jaxddp.files import write_atomically


@dataclass(frozen=True)
class Options:
    """Trace a few steps of a job."""

    job: Positional[str]
    """decoder | convnet."""
    folder: Positional[Path]
    """Folder in which the trace is kept."""
    smoke: bool = False
    """CPU devices and tiny sizes."""


def main(options: Options) -> None:
    """Trace a job, keep the trace, and print what it shows."""
    job = jobs(options.smoke)[options.job]
    devices = prepare(1 if options.smoke else None, part.platform(options.smoke))
    training = Training(job, devices, job.profiled)
    with tempfile.TemporaryDirectory(prefix="gpu-trace-") as folder:
        trace = traced(training.steps, Path(folder))
    options.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(options.folder / f"{options.job}.json.gz", gzip.compress(json.dumps(trace).encode()))
    print(json.dumps({"steps": STEPS, "batch_per_gpu": job.profiled, "gpus": len(devices), **analysis(trace)}))


if __name__ == "__main__":
    main(cli.parse_plain(Options, sys.argv[1:], "python -m benchmarks.gpu.trace_jax"))
