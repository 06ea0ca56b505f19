"""Train on 1, 2, 4, ... and all devices, and print the speeds."""

import os
import sys

from examples.multi_gpu.job import CLASSES, FEATURES, Options, table
from jaxddp.cli import one_line_errors, parse_plain
from jaxddp.errors import InputError
from torch_ref.devices import under_torchrun


def main(options: Options) -> dict[str, dict[int, float]]:
    """Print the table; return its examples per second, by framework and world size.

    Raises:
        InputError: there are fewer devices than --devices, or torchrun started processes for JAX.
    """
    if under_torchrun() and options.framework != "torch":
        raise InputError(
            f"--framework {options.framework}: must be torch under torchrun; JAX needs one process for all GPUs"
        )
    speeds = {}
    # torch first: its processes free the GPUs' memory when they end; jax would take most of it and keep it.
    if options.framework != "jax":
        from examples.multi_gpu import in_torch

        speeds["torch"] = in_torch.speeds(options)
    if options.framework != "torch":
        from examples.multi_gpu import in_jax

        speeds["JAX"] = in_jax.speeds(options)
    if os.environ.get("RANK", "0") == "0":
        print(title(options), table(speeds), sep="\n")
    return speeds


def title(options: Options) -> str:
    """Describe the job in one line."""
    widths = "-".join(map(str, (FEATURES, *options.hidden_sizes, CLASSES)))
    return (
        f"mlp {widths}, Adam, float32, {options.batch_per_replica} examples per replica; "
        f"median of {options.rounds} rounds of {options.steps} steps"
    )


if __name__ == "__main__":
    with one_line_errors(show_traceback=False):
        main(parse_plain(Options, sys.argv[1:], "python -m examples.multi_gpu"))
