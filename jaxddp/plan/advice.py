"""Report what limits a run, and what would help, each with its predicted effect."""

import dataclasses
from collections.abc import Iterator

from jaxddp.config.hardware import MEMORY_SHARE
from jaxddp.plan import roofline
from jaxddp.plan.attention import score_bytes
from jaxddp.plan.costs import Cost
from jaxddp.plan.prediction import Prediction

WORTH = 0.02  # smallest share of the step's time for which a change is proposed
_LIMITS = {
    "arithmetic": "arithmetic of matrix products and convolutions",
    "memory": "memory bandwidth",
    "launches": "the launches of small kernels",
}


def limit_of(prediction: Prediction) -> str:
    """Name what takes the largest part of the step's time."""
    bounds, waiting = prediction.bounds, prediction.timeline.waiting
    largest = bounds.largest
    seconds = getattr(bounds, largest)
    name = _LIMITS[largest]
    if waiting > seconds:
        name, seconds = "the links between the GPUs", waiting
    return f"{name}: {seconds * 1e3:.2f} of {prediction.timeline.seconds * 1e3:.2f} ms"


def advice(prediction: Prediction, largest: int | None) -> Iterator[str]:
    """Yield changes that shorten the step or the wait, with the predicted time.

    Args:
        largest: largest batch per GPU; None: unknown.
    """
    yield from _fused_attention(prediction)
    yield from _bf16(prediction)
    yield from _compression(prediction)
    yield from _larger_batch(prediction, largest)


def _fused_attention(prediction: Prediction) -> Iterator[str]:
    moved = score_bytes(prediction.compiled.program)
    saved = moved / (MEMORY_SHARE * prediction.gpu.memory_bandwidth)
    now = prediction.timeline.seconds
    if saved > WORTH * now:
        call = 'jax.nn.dot_product_attention(..., implementation="cudnn")'
        yield f"fused attention, {call}: saves {moved / 1e9:.0f} GB of traffic, up to {saved * 1e3:.1f} ms"


def _bf16(prediction: Prediction) -> Iterator[str]:
    gpu = prediction.gpu

    def in_bf16(cost: Cost) -> float:
        wide = cost.dtype in ("f32", "tf32")
        return roofline.seconds(dataclasses.replace(cost, dtype="bf16") if wide else cost, gpu)

    now, then = prediction.timeline.seconds, prediction.at(prediction.count, work_seconds=in_bf16).seconds
    if now - then > WORTH * now:
        yield f"--amp bf16: float32 products on tensor cores: {now * 1e3:.2f} -> {then * 1e3:.2f} ms, or less"


def _compression(prediction: Prediction) -> Iterator[str]:
    """Propose 16-bit gradients at the fewest GPUs for which they matter."""
    for count in (prediction.count, *(count for count in prediction.scaling if count > prediction.count)):
        now = prediction.at(count)
        then = prediction.at(count, per_byte=0.5)
        if now.waiting - then.waiting > WORTH * now.seconds:
            yield (
                f"--comm-hook bf16_compress: half of the bytes: on {count:,} GPUs "
                f"{now.efficiency:.1%} -> {then.efficiency:.1%} efficiency"
            )
            return


def _larger_batch(prediction: Prediction, largest: int | None) -> Iterator[str]:
    size, bounds = prediction.compiled.batch_size, prediction.bounds
    fixed = bounds.launches + prediction.timeline.waiting
    if largest is not None and largest >= 2 * size and fixed > WORTH * prediction.timeline.seconds:
        share = f"launches and waits, {fixed / prediction.timeline.seconds:.0%} of the step, do not grow with it"
        yield f"a larger batch, up to {largest:,} per GPU: {share}"
