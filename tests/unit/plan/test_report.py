"""Prediction, report and picture of a short program that no compiler made."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest
from jax import numpy as jnp

from jaxddp import optim
from jaxddp.config.hardware import GPUS, KERNEL_SECONDS
from jaxddp.errors import InputError
from jaxddp.nn.losses import Sums
from jaxddp.plan import advice
from jaxddp.plan.batch import Largest
from jaxddp.plan.compiled import CompiledStep, Compiler
from jaxddp.plan.picture import draw
from jaxddp.plan.prediction import COUNTS, Prediction
from jaxddp.plan.report import PlanReport, scaled
from jaxddp.plan.workload import Workload
from jaxddp.state import Buffers, Params
from jaxddp.step.replica_step import ReplicaStep

TEXT = """
ENTRY %main (p: f32[250000000]) -> f32[250000000] {
  %p = f32[250000000]{0} parameter(0)
  %w = f32[4096,4096]{1,0} parameter(1)
  %dot = f32[4096,4096]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %start = f32[250000000]{0} all-reduce-start(%p), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  %copy = f32[250000000]{0} copy(%p)
  ROOT %done = f32[250000000]{0} all-reduce-done(%start)
}
"""
H100 = GPUS["h100"]


def prediction(text: str = TEXT, **changes: int) -> Prediction:
    compiled = CompiledStep(text, 16, 2_000_000_000, 1_000_000_000, 1_000_000_000, 3_000_000_000, seconds=1.0)
    return Prediction(compiled, H100, **{"per_node": 8, **changes})


def workload() -> Workload:
    def loss(params: Params, buffers: Buffers, batch: object) -> tuple[Sums, Buffers]:
        raise AssertionError("nothing runs")

    params = {"w": jnp.ones((10, 10))}
    example = {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}
    return Workload("short", ReplicaStep(loss, optim.adam(1e-3)), params, {}, example, 16)


def report(**changes: object) -> PlanReport:
    made = PlanReport(workload(), prediction(), prediction(), {"xla_gpu_x": True}, Largest(64, 50e9, True), 0.02)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_a_prediction_adds_kernels_and_the_wait() -> None:
    found = prediction()
    copy = 2e9 / (0.85 * 3.352e12)
    dot = 2 * 4096**3 / (0.7 * 494.7e12)
    assert found.timeline.work == pytest.approx(copy + dot + 2 * KERNEL_SECONDS)
    all_reduce = 2 * 7 / 8 * 1e9 / (0.8 * 450e9) + 8.4e-6 + 14 * 3.4e-6
    assert found.timeline.waiting == pytest.approx(all_reduce - copy - KERNEL_SECONDS)
    assert found.at(1).efficiency == 1
    assert found.bounds.memory == pytest.approx(copy) and found.bounds.arithmetic == pytest.approx(dot)
    assert found.utilisation == pytest.approx(2 * 4096**3 / 494.7e12 / found.timeline.seconds)


def test_efficiency_falls_with_the_number_of_gpus() -> None:
    shares = [timeline.efficiency for timeline in prediction().scaling.values()]
    assert len(shares) == len(COUNTS) and shares == sorted(shares, reverse=True) and shares[0] == 1
    small_nodes = prediction(per_node=2, nodes=4)
    assert small_nodes.at(8).waiting > prediction().at(8).waiting  # over InfiniBand


def test_the_report_has_every_part() -> None:
    text = str(report())
    assert text.startswith("short  ·  16 examples per GPU  ·  8 x NVIDIA H100 80GB HBM3, 1 node  ·  predicted, not")
    for part in (
        "5.0 GB: parameters 400.0 B, optimizer state 804.0 B, batch and other arguments 2.0 GB, temporaries 3.0 GB",
        "fits: the GPU has 85.0 GB, of which jax takes 63.7 GB by default",
        "largest batch: 64 examples per GPU, 50.0 GB, compiled",
        " 1000.00    4.917      14%    4.213      1:    0.0 FLOP of products,   2.0 GB",
        "xla_gpu_x=true",
        "limited by the links between the GPUs",
        "--comm-hook bf16_compress: half of the bytes: on 8 GPUs ",
        "a larger batch, up to 64 per GPU",
        "measured 20.00 ms per step: ",
    ):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 120


class Lowered:
    """Stand in for a lowered step that XLA cannot compile with its default products, or not at all."""

    def __init__(self, reason: str, always: bool = False):
        self.reason, self.always, self.asked = reason, always, []  # type: ignore[var-annotated]

    def compile(self, compiler_options: dict[str, object]) -> "Lowered":
        self.asked.append(compiler_options)
        if self.always or "xla_gpu_enable_triton_gemm" not in compiler_options:
            raise RuntimeError(self.reason)
        return self

    def as_text(self) -> str:
        return TEXT

    def memory_analysis(self) -> SimpleNamespace:
        sizes = dict.fromkeys(("argument", "output", "alias", "temp"), 0)
        return SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})


NO_TILES = "INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.48\nand more"


def compiler_of(lowered: Lowered) -> Compiler:
    return Compiler(SimpleNamespace(lower=lambda replicas, size: lowered), None)  # type: ignore[arg-type]


def test_a_product_that_triton_cannot_tile_is_left_to_cublas_and_the_report_says_so() -> None:
    lowered = Lowered(NO_TILES)
    compiler = compiler_of(lowered)
    first, second = (compiler.compile(16, {"xla_gpu_x": True}) for _ in range(2))
    assert [len(options) for options in lowered.asked] == [1, 2, 2]  # once without success
    assert first.fallback == second.fallback == {"xla_gpu_enable_triton_gemm": False}
    text = str(report(after=dataclasses.replace(prediction(), compiled=first), largest=None))
    assert "xla_gpu_enable_triton_gemm=false, without which XLA finds no tile sizes" in text
    assert "triton" not in str(report())


@pytest.mark.parametrize(("reason", "attempts"), [(NO_TILES, 2), ("RESOURCE_EXHAUSTED: shared memory", 1)])
def test_what_xla_cannot_compile_at_all_is_one_line(reason: str, attempts: int) -> None:
    lowered = Lowered(reason, always=True)
    with pytest.raises(InputError, match=r"^--batch-size 16: XLA cannot compile the step: ") as raised:
        compiler_of(lowered).compile(16, {})
    assert len(lowered.asked) == attempts and "\n" not in str(raised.value)


def test_too_large_programs_do_not_fit() -> None:
    large = prediction()
    large = dataclasses.replace(large, compiled=dataclasses.replace(large.compiled, temporaries=80_000_000_000))
    assert "does not fit: the GPU has" in str(report(after=large))
    assert "largest batch" not in str(report(after=large, largest=None))


def test_float32_products_ask_for_bf16() -> None:
    def asks(text: str) -> bool:
        return any(line.startswith("--amp bf16") for line in advice.advice(prediction(text), None))

    slow = TEXT.replace("4096", "16384")
    assert asks(slow) and not asks(slow.replace("f32[16", "bf16[16"))


def test_the_picture_is_a_png() -> None:
    assert draw(report())[:4] == b"\x89PNG"


def test_numbers_get_a_prefix() -> None:
    assert [scaled(number, "B") for number in (0, 999, 1500, 2.5e12)] == ["0.0 B", "999.0 B", "1.5 kB", "2.5 TB"]
