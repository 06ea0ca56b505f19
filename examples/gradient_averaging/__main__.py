"""Print hand-written gradients beside autodiff's, and check the claims about averaging them."""

import sys
from dataclasses import dataclass

import jax

from examples.claims import report
from examples.gradient_averaging import measure
from examples.gradient_averaging.differences import Difference
from examples.gradient_averaging.problem import PER_REPLICA, parameters
from jaxddp import cli, prepare
from jaxddp.config.choices import PLATFORMS
from jaxddp.config.options import Platform
from jaxddp.errors import InputError, check_name

SHARES = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Options:
    """Compare the mean of N devices' gradients with the gradient of one device with N times the batch."""

    devices: tuple[int, ...] = (2, 4)
    """Values of N to try."""
    platform: Platform = "cpu"
    """cpu | gpu"""

    def __post_init__(self) -> None:
        check_name("--platform", self.platform, PLATFORMS)
        if min(self.devices, default=0) < 2:
            raise InputError(f"--devices {' '.join(map(str, self.devices))}: each must be at least 2")


def table(written: measure.Written) -> str:
    """Format a line for each intermediate and parameter, from the loss to the embedding."""

    def cells(difference: Difference) -> str:
        flags = ("yes" if flag else "no" for flag in (difference.exact, difference.close))
        return "".join(f"{flag:>7}" for flag in flags) + f"{difference.largest:>10.1e}"

    head = f"{'':15} {'JAX':>24}   {'torch':>24}\n{'d loss / d':15}" + " |  exact  close   largest" * 2
    lines = [f"{name:15} |{cells(written.jax[name])} |{cells(written.torch[name])}" for name in written.torch]
    return "\n".join([head, *lines])


def main(options: Options) -> int:
    """Print everything; return the number of claims that do not hold."""
    devices = prepare(max(options.devices), options.platform)
    size = sum(array.size for array in parameters().values())
    print(f"A character MLP of {size} parameters on names, {PER_REPLICA} examples per device.")
    print("The backward pass by hand against autodiff, float64:\n")
    with jax.default_device(devices[0]):
        written = {dtype: measure.written(dtype) for dtype in ("float64", "float32")}
        claims = [measure.of_draws()]
        claims += [claim for dtype in written for claim in measure.of_written(written[dtype], dtype)]
        claims += measure.of_one_over_n(options.devices)
    print(table(written["float64"]))
    for number in options.devices:
        claims += measure.of_replicas(measure.shared(devices[:number], options.platform))
    count = max(options.devices)
    far = measure.by_share(SHARES, count)
    print(
        "\nThe mean over the batch divides the derivative of the loss by n, and only there. But BatchNorm computes its"
        "\nmean and variance from one device's examples, in torch's DDP too, so the forward pass of N devices differs"
        f"\nfrom that of one. By hand, with {count} devices, the relative error of the mean of their gradients is:\n"
    )
    print("  examples per device " + "".join(f"{size:8}" for size in far))
    print("  relative error      " + "".join(f"{error:8.2f}" for error in far.values()))
    print(
        "\ntorch's SyncBatchNorm refuses CPU tensors. In the lines of synchronised BatchNorm, the torch column"
        "\ntherefore compares JAX's N devices with one torch process on the whole batch.\n"
    )
    return report(claims)


if __name__ == "__main__":
    with cli.one_line_errors(show_traceback=False):
        chosen = cli.parse_plain(Options, sys.argv[1:], "python -m examples.gradient_averaging")
        sys.exit(main(chosen) > 0)
