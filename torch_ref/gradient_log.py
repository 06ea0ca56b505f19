"""Metrics of gradients, as sums over the ranks: norms and histograms of the mean, and non-finite local gradients.

`jaxddp.tracking.gradient_metrics` defines the names of these metrics, and reads them.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jaxddp.config import TrainerConfig
from jaxddp.config.name_patterns import matching
from jaxddp.tracking.gradient_metrics import ANOMALY, BASE, CHUNK, EXAMPLE, LOG2, LOG2_BINS, NORM
from torch_ref.distributed import World
from torch_ref.losses import Sums


class GradientLog:
    """Metrics for `--log-gradients` and `--detect-anomaly`, step by step.

    Args:
        module: the model, not wrapped.
        world: the ranks that train together.
        config: configuration with `log_gradients` and `detect_anomaly`.

    Raises:
        InputError: a pattern matches no parameter that learns.
    """

    def __init__(self, module: nn.Module, world: World, config: TrainerConfig):
        self._world = world
        self._learning = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._logged = matching("--log-gradients", config.log_gradients, self._learning)
        self._detects = config.detect_anomaly
        self._places = {id(self._learning[name]): place for place, name in enumerate(sorted(self._learning))}
        self._digits = torch.zeros(-(-len(self._places) // CHUNK) * CHUNK, dtype=torch.float64, device=world.device)

    def look(self, bucket: dist.GradBucket) -> None:
        """Record which gradients of a bucket that DDP is about to send are not finite."""
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._digits[self._places[id(parameter)]] = _digit(gradient)

    def sums(self, example: Tensor | None = None) -> Sums:
        """Return this rank's metrics of the step, between backward pass and clipping; `example`: its `EXAMPLE`."""
        columns: Sums = {}
        for name in self._logged:
            gradient = self._learning[name].grad
            assert gradient is not None, "every parameter that learns has one"
            columns[f"{NORM}{name}"] = gradient.norm()
            columns |= {f"{LOG2}{name}/{k}": count for k, count in zip(LOG2_BINS, _log2_counts(gradient), strict=True)}
        shares = {name: value / self._world.world_size for name, value in columns.items()}  # the same on each rank
        return shares | (self._anomalies(example) if self._detects else {})

    def _anomalies(self, example: Tensor | None) -> Sums:
        powers = float(BASE) ** torch.arange(CHUNK, dtype=torch.float64, device=self._digits.device)
        mine = {f"{ANOMALY}{{}}/{chunk}": value for chunk, value in enumerate(self._digits.view(-1, CHUNK) @ powers)}
        mine |= {} if example is None else {f"{EXAMPLE}/{{}}": example}
        return {
            column.format(rank): value if rank == self._world.rank else torch.zeros_like(value)
            for rank in range(self._world.world_size)
            for column, value in mine.items()
        }


def _log2_counts(gradient: Tensor) -> Tensor:
    """Count the elements by floor(log2 |g|), clipped to the range of `LOG2_BINS`."""
    _, exponents = torch.frexp(gradient)  # |g| = mantissa 2^exponent with 1/2 <= mantissa < 1
    lowest, highest = LOG2_BINS[0], LOG2_BINS[-1]
    bins = torch.where(gradient == 0, lowest, exponents - 1).clamp(lowest, highest) - lowest
    return torch.bincount(bins.flatten(), minlength=len(LOG2_BINS)).to(torch.float64)


def _digit(gradient: Tensor) -> Tensor:
    """Return 2 if an element is NaN, else 1 if one is infinite, else 0."""
    return torch.where(gradient.isnan().any(), 2.0, torch.where(gradient.isfinite().all(), 0.0, 1.0))
