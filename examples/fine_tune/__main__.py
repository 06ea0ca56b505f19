"""Fine-tune in both frameworks and compare them."""

import dataclasses
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from examples.claims import report
from examples.fine_tune import claims, in_jax, in_torch, material
from examples.fine_tune.job import Job, Run
from examples.fine_tune.options import Options
from jaxddp import Replicas, prepare
from jaxddp.cli import one_line_errors, parse_plain
from torch_ref.devices import check_devices

LINES = 12  # of a table


def main(options: Options) -> int:
    """Print losses and claims; return the number of claims that do not hold."""
    config = options.training()
    check_devices(config)
    replicas = Replicas(prepare(options.devices, options.platform))
    config = dataclasses.replace(config, devices=replicas.world_size)  # torch may see a different number
    with tempfile.TemporaryDirectory() as folder:
        model = material.put(options, Path(folder))
        jobs = [Job(material.sizes(model), folder, options.dtype)]
        if options.proof_steps:
            jobs = [Job(material.sizes(model), folder, "float64", options.proof_steps, whole=True), *jobs]
        jax = [in_jax.run(config, model, job, replicas) for job in jobs]
        torch = in_torch.run(config, jobs)
        labels = load_file(f"{folder}/test.safetensors")["labels"]
    for job, ours, theirs in zip(jobs, jax, torch, strict=True):
        show(job, ours, theirs)
    return report(_claims(options.dtype, max(np.mean(labels == label) for label in (0, 1)), jax, torch))


def show(job: Job, jax: Run, torch: Run) -> None:
    """Print both losses in at most `LINES` lines: those of single steps, or means over several."""
    group = -(-len(jax.losses) // LINES)
    print(f"{job.dtype:12}{'JAX':>20}{'transformers':>20}")
    for first in range(0, len(jax.losses), group):
        ours, theirs = (np.mean(run.losses[first : first + group]) for run in (jax, torch))
        last = min(first + group, len(jax.losses))
        print(f"step {f'{first + 1} to {last}' if group > 1 else last:<12}{ours:>15.10f}{theirs:>20.10f}")
    print("" if job.whole else f"held-out accuracy {jax.accuracy:>14.4f}{torch.accuracy:>20.4f}\n")


def _claims(dtype: str, common: float, jax: list[Run], torch: list[Run]) -> list[claims.Claim]:
    learned = claims.learning(dtype, common, jax[-1], torch[-1])
    if len(jax) == 1:
        return learned
    return [*claims.proof(jax[0], torch[0]), claims.rounding(dtype, jax[1], torch[1], torch[0]), *learned]


if __name__ == "__main__":
    with one_line_errors(show_traceback=False):
        sys.exit(1 if main(parse_plain(Options, sys.argv[1:], "python -m examples.fine_tune")) else 0)
