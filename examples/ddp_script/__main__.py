"""Runs the script in torch's form and in JAX's, and puts what they print side by side."""

import sys
from dataclasses import dataclass

from examples.claims import report
from examples.ddp_script import measure, script_jax, script_torch
from examples.ddp_script.problem import TRAIN, Settings
from jaxddp import cli
from jaxddp.data.sampler import epoch_indices, shard_table


@dataclass(frozen=True)
class Options:
    """Does the script do the same in JAX and in torch, and what of it is so?"""

    platform: str = "cpu"
    """cpu | gpu; two devices"""


def main(options: Options) -> int:
    """Print everything; return how many claims do not hold."""
    settings = Settings(platform=options.platform, dtype="float64")
    ours, theirs = script_jax.run(settings), script_torch.run(settings)
    print("JAX, and the loss of the same step in torch (float64):\n")
    print(measure.side_by_side(ours, theirs, settings))
    print(f"\nThe first epoch as the sampler deals it out, in batches of {settings.batch_size}:\n")
    print(shard_table(epoch_indices(len(TRAIN), settings.devices), settings.batch_size, len(TRAIN)))
    print(
        "\nA replica's second batch is smaller than its first; drop_last leaves it out: the copy of the repeated row,"
        "\nand one that nobody trains on then. JAX has all replicas in one process: it works in a notebook too.\n"
    )
    claims = measure.of_runs(ours, theirs) + measure.of_orders(settings) + measure.of_rows(ours, theirs, settings)
    return report(claims + measure.of_accuracy(ours, theirs) + measure.of_processes(ours, theirs))


if __name__ == "__main__":
    with cli.one_line_errors(show_traceback=False):
        sys.exit(main(cli.parse_plain(Options, sys.argv[1:], "python -m examples.ddp_script")) > 0)
