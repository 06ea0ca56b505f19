"""Prediction as text."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxddp.config.hardware import CONVOLUTION_SHARE, MATRIX_SHARE, MEMORY_SHARE, NETWORK_SHARE, NVLINK_SHARE
from jaxddp.errors import on_one_line
from jaxddp.plan.advice import advice, limit_of
from jaxddp.plan.batch import Largest
from jaxddp.plan.prediction import Prediction
from jaxddp.plan.timeline import Sent
from jaxddp.plan.workload import Workload, nbytes

NOTE = "predicted, not measured"
MOST_MESSAGES = 16  # in the table; the others are summed


@dataclass(frozen=True)
class PlanReport:
    """Everything that `jaxddp plan` reports about a run.

    Attributes:
        workload: the training step.
        before, after: predictions with XLA's defaults and with the trainer's options for GPUs.
        options: these options.
        largest: largest batch per GPU; None: not asked for.
        measured: measured seconds per step; None: there are none.
    """

    workload: Workload
    before: Prediction
    after: Prediction
    options: dict[str, object]
    largest: Largest | None = None
    measured: float | None = None

    @property
    def title(self) -> str:
        """Model, batch and GPUs."""
        at = self.after
        nodes = "1 node" if at.nodes == 1 else f"{at.nodes} nodes"
        size = at.compiled.batch_size
        name = on_one_line(self.workload.name)
        return f"{name}  ·  {size:,} examples per GPU  ·  {at.count:,} x {at.gpu.name}, {nodes}"

    def __str__(self) -> str:
        parts = (self._work(), self._memory(), self._messages(), self._options(), self._scaling(), self._advice())
        return "\n".join([f"{self.title}  ·  {NOTE}", *("\n".join(("", *part)) for part in parts)])

    def _work(self) -> Iterator[str]:
        cost, gpu, bounds, timeline = self.after.cost, self.after.gpu, self.after.bounds, self.after.timeline
        yield "work per GPU and step"
        yield (
            f"  {scaled(cost.flops, 'FLOP')}: matrix products {scaled(cost.matrix, 'FLOP')}, convolutions "
            f"{scaled(cost.convolution, 'FLOP')}, rest {scaled(cost.rest, 'FLOP')}"
        )
        yield f"  {scaled(cost.bytes, 'B')} of memory traffic, {cost.kernels:,} kernels"
        products = f"{MATRIX_SHARE:.0%} (convolutions {CONVOLUTION_SHARE:.0%}) of {_peak(self.after)}"
        bandwidth = f"{MEMORY_SHARE:.0%} of {gpu.memory_bandwidth / 1e12:.2f} TB/s"
        yield f"  {timeline.work * 1e3:.2f} ms by the roofline of {products} and {bandwidth}"
        yield (
            f"  arithmetic {bounds.arithmetic * 1e3:.2f}, memory {bounds.memory * 1e3:.2f}, launches "
            f"{bounds.launches * 1e3:.2f} ms; {self.after.utilisation:.0%} of the peak (MFU)"
        )

    def _memory(self) -> Iterator[str]:
        compiled, gpu = self.after.compiled, self.after.gpu
        state = self.workload.state(1)
        params, optimizer = nbytes(state.params), nbytes(state.opt_state)
        yield "memory per GPU"
        other = _bytes(compiled.arguments - params - optimizer)
        state_bytes = f"parameters {_bytes(params)}, optimizer state {_bytes(optimizer)}"
        rest = f"batch and other arguments {other}, temporaries {_bytes(compiled.temporaries)}"
        yield f"  {_bytes(compiled.memory)}: {state_bytes}, {rest}"
        fits = "fits" if compiled.memory <= gpu.usable_memory else "does not fit"
        yield f"  {fits}: the GPU has {_bytes(gpu.memory)}, of which jax takes {_bytes(gpu.usable_memory)} by default"
        if self.largest is not None:
            how = "compiled" if self.largest.confirmed else "estimated from smaller ones"
            yield f"  largest batch: {self.largest.size:,} examples per GPU, {_bytes(self.largest.memory)}, {how}"

    def _messages(self) -> Iterator[str]:
        timeline = self.after.timeline
        yield f"messages between {self.after.count:,} GPUs, in the order in which the compiled program waits for them"
        yield "        MB       ms  covered  exposed   kernels meanwhile"
        for sent in timeline.sent[:MOST_MESSAGES]:
            yield f"  {_row(sent)}"
        rest = timeline.sent[MOST_MESSAGES:]
        if rest:
            size, seconds = sum(one.message.bytes for one in rest), sum(one.seconds for one in rest)
            covered = sum(one.covered for one in rest)
            yield f"  {_columns(size, seconds, covered)}   ({len(rest)} more)"
        total = sum(one.message.bytes for one in timeline.sent)
        share = timeline.covered_share
        yield f"  {_bytes(total)} in {len(timeline.sent)} messages, {share:.1%} of the bytes covered"

    def _options(self) -> Iterator[str]:
        yield "compiler options, chosen from the bytes of the gradients"
        rows = (("XLA's defaults", self.before), ("the trainer's", self.after))
        for name, prediction in rows:
            timeline = prediction.timeline
            yield (
                f"  {name:15} {len(timeline.sent):3} messages  exposed {timeline.waiting * 1e3:.3f} ms  step "
                f"{timeline.seconds * 1e3:.2f} ms  efficiency {timeline.efficiency:.1%}"
            )
        fallback = self.after.compiled.fallback
        for name, value in {**self.options, **fallback}.items():
            why = ", without which XLA finds no tile sizes for a product of this step" * (name in fallback)
            yield f"  {name}={str(value).lower() if isinstance(value, bool) else value}{why}"

    def _scaling(self) -> Iterator[str]:
        yield f"scaling, {self.after.compiled.batch_size:,} examples per GPU"
        yield "    GPUs  ms per step  examples/s  efficiency  bubbles   efficiency by XLA's defaults"
        for count, timeline in self.after.scaling.items():
            rate = count * self.after.compiled.batch_size / timeline.seconds
            default = self.before.scaling[count].efficiency
            yield (
                f"  {count:6,}  {timeline.seconds * 1e3:11.2f}  {rate:10,.0f}  {timeline.efficiency:10.1%}  "
                f"{timeline.bubble:7.1%}   {default:.1%}"
            )
        yield (
            f"  links: {NVLINK_SHARE:.0%} of {self.after.gpu.nvlink / 1e9:.0f} GB/s NVLink, {NETWORK_SHARE:.0%} of "
            + (f"{self.after.gpu.network / 1e9:.0f} GB/s InfiniBand per GPU; jaxddp/config/hardware.py has the sources")
        )

    def _advice(self) -> Iterator[str]:
        yield f"limited by {limit_of(self.after)}"
        changes = list(advice(self.after, None if self.largest is None else self.largest.size))
        yield "would help:" if changes else "no change of flags is predicted to save 2 % or more"
        yield from (f"  {change}" for change in changes)
        if self.measured is not None:
            ratio = self.measured / self.after.timeline.seconds
            yield f"measured {self.measured * 1e3:.2f} ms per step: {ratio:.2f} times the prediction"


def _peak(prediction: Prediction) -> str:
    dtype = prediction.cost.dtype or "f32"
    return f"{prediction.gpu.flops_per_second(dtype) / 1e12:.0f} TFLOP/s {dtype}"


def _row(sent: Sent) -> str:
    products = scaled(sent.work.matrix + sent.work.convolution, "FLOP")
    work = f"{sent.work.kernels:4,}: {products:>11} of products, {scaled(sent.work.bytes, 'B'):>8}"
    return f"{_columns(sent.message.bytes, sent.seconds, sent.covered)}   {work}"


def _columns(size: float, seconds: float, covered: float) -> str:
    share = covered / seconds if seconds else 1
    return f"{size / 1e6:8.2f} {seconds * 1e3:8.3f} {share:8.0%} {(seconds - covered) * 1e3:8.3f}"


def scaled(number: float, unit: str) -> str:
    """Return a number with a unit and its prefix.

    >>> scaled(1.2e10, "B"), scaled(3, "FLOP")
    ('12.0 GB', '3.0 FLOP')
    """
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.1f} {prefix}{unit}"
    return f"{number:.1f} {unit}"


def _bytes(size: float) -> str:
    return scaled(size, "B")
