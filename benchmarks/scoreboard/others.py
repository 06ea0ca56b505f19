"""Alarms that the thresholds of other projects would raise on the same run.

Each method applies the comparison of a published test to the float64 traces of a check, and returns whether the
test would have raised an alarm; none of them names a cause. If a method compares something that a trace does not
have, the nearest thing in the trace takes its place, as the method's docstring says. Tensors that only one side
has are ignored.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxddp.parity.records import Record, Tensors, stage_norm

ALGOPERF_STEPS, ALGOPERF_RTOL = 10, 1.0
PADIFF_RTOL, PADIFF_README_ATOL = 1e-7, 1e-4
TRANSFORMERS_TOLERANCE = 1e-5
TTRACE_BOUND = 0.1


@dataclass(frozen=True)
class Traces:
    """Records of both sides over the same steps, in float64.

    A record has the stages "local_loss" (world_size,), "local_gradients" (world_size, ...), "gradients" (reduced)
    and "params" (after the step), with tensors under torch's names. A stage that a port does not show is missing.

    Attributes:
        torch: the reference, running freely.
        free: jax running freely; only "local_loss" and "params" are read.
        forced: jax, set to the parameters of the reference before each step.
    """

    torch: Sequence[Record]
    free: Sequence[Record]
    forced: Sequence[Record]


def alarms(traces: Traces) -> dict[str, bool]:
    """Return, for each method, whether it would have raised an alarm.

    >>> def record(weight):
    ...     return {"local_loss": {"loss": np.ones(2)}, "gradients": {"w": np.ones(3)}, "params": {"w": weight}}
    >>> right, wrong = record(np.ones(3)), record(np.array([1.0, 1.0, 1.001]))
    >>> [name for name, alarm in alarms(Traces([right], [wrong], [wrong])).items() if alarm]
    ['means', 'means_1e4', 'allclose']
    """
    return {name: method(traces) for name, method in METHODS.items()}


def rtol_1(traces: Traces) -> bool:
    """Compare the loss and the gradient norm after 10 steps, with a relative tolerance of 1.

    |jax - torch| <= 1e-8 + 1 |torch|. A shorter run is compared at its last step. The test also compares the loss
    over an evaluation set, which a trace does not have. The gradient is that of the forced step.

    Source: mlcommons/algorithmic-efficiency, tests/test_traindiffs.py.
    """
    step = min(ALGOPERF_STEPS, len(traces.torch), len(traces.free), len(traces.forced)) - 1
    theirs, ours = traces.torch[step], traces.forced[step]
    pairs = [(np.mean(_losses(traces.free[step])), np.mean(_losses(theirs)))]
    if "gradients" in ours:
        pairs.append((stage_norm(ours["gradients"]), stage_norm(theirs["gradients"])))
    return not all(np.allclose(mine, reference, rtol=ALGOPERF_RTOL) for mine, reference in pairs)


def means(traces: Traces) -> bool:
    """Compare the mean of each tensor, with a relative tolerance of 1e-7 and no absolute one.

    PaDiff compares the outputs of layers, the gradients of the weights, and the weights after the optimizer; here
    these are the losses, reduced gradients and parameters of every forced step. A mean that is 0 on paper, such as
    that of the gradient of a classifier's last layer, is rounding on both sides, so correct ports raise alarms too.

    Source: PaddlePaddle/PaDiff, padiff/utils.py (`assert_tensor_equal` with its defaults: compare_mode "mean",
    rtol 1e-7, atol 0).
    """
    return _means_differ(traces, atol=0.0)


def means_1e4(traces: Traces) -> bool:
    """Compare as `means` does, with an absolute tolerance of 1e-4, which PaDiff's README and tutorial use."""
    return _means_differ(traces, atol=PADIFF_README_ATOL)


def forward_1e5(traces: Traces) -> bool:
    """Compare the forward pass before training, with an absolute tolerance of 1e-5; NaN on either side is ignored.

    The test compares all outputs of a model; here these are the losses of all replicas at the first step.

    Source: huggingface/transformers 4.x, tests/test_modeling_flax_common.py (`check_pt_flax_outputs`, tol=1e-5).
    """
    difference = np.abs(_losses(traces.free[0]) - _losses(traces.torch[0]))
    return bool(np.nanmax(difference, initial=0.0) > TRANSFORMERS_TOLERANCE)


def ten_percent(traces: Traces) -> bool:
    """Compare each local gradient, reduced gradient and parameter in every step: ||jax - torch|| <= 0.1 ||torch||.

    The paper derives bounds of this form from depth and precision; NVIDIA/bionemo-framework uses
    5 x 1.03^33 x 2^-7 = 0.10 for all tensors. A tensor that is 0 on paper, such as the gradient of a bias in front
    of BatchNorm, is rounding on both sides, so correct ports raise alarms too.

    Source: TTrace, https://arxiv.org/abs/2506.09280; NVIDIA/bionemo-framework,
    bionemo-recipes/recipes/evo2_megatron/tests/bionemo/evo2/run/test_train.py (`assert_grads_close`).
    """
    stages = ("local_gradients", "gradients", "params")
    return any(
        not np.linalg.norm(ours - theirs) <= TTRACE_BOUND * np.linalg.norm(theirs)
        for ours, theirs in _pairs(traces, stages)
    )


def allclose(traces: Traces) -> bool:
    """Compare each parameter after both sides have run freely, by numpy.allclose with its defaults.

    |jax - torch| <= 1e-8 + 1e-5 |torch|, element by element.
    """
    last = min(len(traces.torch), len(traces.free)) - 1
    ours, theirs = traces.free[last]["params"], traces.torch[last]["params"]
    return not all(np.allclose(ours[name], theirs[name]) for name in _common(ours, theirs))


METHODS: dict[str, Callable[[Traces], bool]] = {
    method.__name__: method for method in (rtol_1, means, means_1e4, forward_1e5, ten_percent, allclose)
}


def _means_differ(traces: Traces, atol: float) -> bool:
    return any(
        not np.allclose(ours.mean(), theirs.mean(), rtol=PADIFF_RTOL, atol=atol, equal_nan=True)
        for ours, theirs in _pairs(traces, ("local_loss", "gradients", "params"))
    )


def _pairs(traces: Traces, stages: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (jax, torch) for every tensor of these stages, in every forced step."""
    for theirs, ours in zip(traces.torch, traces.forced, strict=False):
        for stage in stages:
            if stage == "local_loss":
                yield _losses(ours), _losses(theirs)
            elif stage in ours:
                mine, reference = ours[stage], theirs[stage]
                yield from ((mine[name], reference[name]) for name in _common(mine, reference))


def _losses(record: Record) -> np.ndarray:
    """Return each replica's sum of losses; for a port with a custom step, that of its loss function alone."""
    losses = record["pure_local_loss" if "pure_local_loss" in record else "local_loss"]
    return np.asarray(sum(losses.values()))


def _common(ours: Tensors, theirs: Tensors) -> list[str]:
    return [name for name in theirs if name in ours]
