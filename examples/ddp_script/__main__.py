"""Run the script in torch and in JAX, and print their output side by side."""

import sys
from dataclasses import dataclass

from examples.claims import report
from examples.ddp_script import measure, script_jax, script_torch
from examples.ddp_script.problem import TRAIN, Settings
from jaxddp import cli
from jaxddp.config.options import Platform
from jaxddp.data.sampler import epoch_indices, shard_table


@dataclass(frozen=True)
class Options:
    """Compare the DDP script in JAX and in torch, and check its claims."""

    platform: Platform = "cpu"
    """cpu | gpu; two devices"""


def main(options: Options) -> int:
    """Print everything; return the number of claims that do not hold."""
    settings = Settings(platform=options.platform, dtype="float64")
    ours, theirs = script_jax.run(settings), script_torch.run(settings)
    print("JAX, and the loss of the same step in torch (float64):\n")
    print(measure.side_by_side(ours, theirs, settings))
    print(f"\nThe sampler's first epoch, in batches of {settings.batch_size}:\n")
    print(shard_table(epoch_indices(len(TRAIN), settings.devices), settings.batch_size, len(TRAIN)))
    print(
        "\nEach replica's second batch is smaller than its first, and drop_last drops it: the copy of the repeated row,"
        "\nand a row that no replica trains on. JAX holds all replicas in one process, so it works in a notebook too.\n"
    )
    claims = measure.of_runs(ours, theirs) + measure.of_orders(settings) + measure.of_rows(ours, theirs, settings)
    return report(claims + measure.of_accuracy(ours, theirs) + measure.of_processes(ours, theirs))


if __name__ == "__main__":
    with cli.one_line_errors(show_traceback=False):
        sys.exit(main(cli.parse_plain(Options, sys.argv[1:], "python -m examples.ddp_script")) > 0)
