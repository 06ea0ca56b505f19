"""Speed of a job in jaxddp at the largest batch that fits: `python -m benchmarks.gpu.train_jax JOB`.

Prints one line of JSON.
"""

import json
import sys
from dataclasses import dataclass
from functools import partial

import jax
from tyro.conf import Positional

from benchmarks.gpu import part
from benchmarks.gpu.fitting import Measured, largest_that_fits
from benchmarks.gpu.jobs import Job, jobs
from benchmarks.gpu.jobs_jax import Training
from benchmarks.gpu.timing import median_seconds
from jaxddp import cli
from jaxddp.distributed.devices import prepare
from jaxddp.plan.presets import Attention


@dataclass(frozen=True)
class Options:
    """Measure the speed of a job in jaxddp."""

    job: Positional[str]
    """decoder | convnet."""
    attention: Attention = None
    """Implementation of the decoder's attention."""
    smoke: bool = False
    """CPU devices and tiny sizes."""
    seconds: float = 1.0
    """Seconds of a round."""


def measure(job: Job, devices: list[jax.Device], attention: Attention, seconds: float, batch_size: int) -> Measured:
    """Measure a batch size."""
    training = Training(job, devices, batch_size, attention)
    of_step = median_seconds(training.steps, seconds)
    statistics = devices[0].memory_stats() or {}
    return {
        "seconds_per_step": of_step,
        "seconds_per_step_with_loader": median_seconds(training.loaded_steps, seconds, rounds=3),
        "peak_bytes": statistics.get("peak_bytes_in_use"),
        "loss": training.loss,
    }


def main(options: Options) -> None:
    """Measure the largest batch size that fits, and print it."""
    job = jobs(options.smoke)[options.job]
    devices = prepare(1 if options.smoke else None, part.platform(options.smoke))
    one = partial(measure, job, devices, options.attention, options.seconds)
    measured = largest_that_fits(job.batches, one, jax.clear_caches)
    print(json.dumps({"gpus": len(devices), "device": devices[0].device_kind, **measured}))


if __name__ == "__main__":
    main(cli.parse_plain(Options, sys.argv[1:], "python -m benchmarks.gpu.train_jax"))
