"""Sample reports of every kind."""

import dataclasses
import math

import numpy as np

from jaxddp.parity.deviation import Deviation, Statement, Value
from jaxddp.parity.findings import ORDER, Cause, Difference, Layer, NextBest, Numerics, Problem, Segment, StageResult
from jaxddp.parity.quote import Quote
from jaxddp.parity.report.report import Report

EXACT = ("samples", "hyperparameters")
SHAPES = {
    "conv1.weight": (16, 1, 3, 3),
    "conv1.bias": (16,),
    "norm1.weight": (16,),
    "norm1.bias": (16,),
    "fc.weight": (10, 784),
    "fc.bias": (10,),
}
HOSTILE = '<script>alert("&\'")</script>\x1b[2J\x00\ud800'


def floor(stage: str, steps: int, seed: int = 0) -> tuple[float, ...]:
    """Return residuals of the size that two equal sides leave."""
    if stage in EXACT:
        return (0.0,) * steps
    exponents = np.random.default_rng([seed, ORDER.index(stage)]).uniform(-16.4, -15.2, steps).tolist()
    return tuple(0.0 if stage == "buffers" and step == 0 else 10.0**e for step, e in enumerate(exponents))


def stages_of(steps: int, shapes: dict[str, tuple[int, ...]] = SHAPES, **changed: tuple[float, ...]) -> dict:
    """Return results of all stages, equal except for the stages given."""
    results = {}
    for stage in ORDER:
        residuals = changed.get(stage, floor(stage, steps))
        worst = max(residuals)
        tensors = {} if stage in (*EXACT, "local_loss") else {
            name: (shape, worst if i == len(shapes) - 2 else worst / (3 + i) if worst < 1e-12 else 4e-16)
            for i, (name, shape) in enumerate(shapes.items())
        }  # fmt: skip
        results[stage] = StageResult(0.0 if stage in EXACT else 1e-12, residuals, tensors)
    return results


def losses_of(steps: int, drift: float = 0.0) -> tuple[tuple[float, float], ...]:
    losses = [2.302585 * 0.93**step + 0.04 * math.sin(2.1 * step) for step in range(steps)]
    return tuple((loss, loss * (1 + drift * step + 2e-16 * (step % 3))) for step, loss in enumerate(losses))


ENVIRONMENT = {
    "date": "2026-11-21",
    "hardware": "2 CPU cores",
    "python": "3.11.2",
    "jax": "0.10.2",
    "flax": "0.12.8",
    "optax": "0.2.8",
    "torch": "2.13.0",
}
RUN = {"port": "my_port.py", "world_size": 2, "steps": 10, "dtype": "float64", "environment": ENVIRONMENT}

EQUAL = Report(
    **RUN,
    stages=stages_of(10),
    losses=losses_of(10),
    numerics={
        "gradients": Numerics(2.1e-7, 2.4e-7, 3.0),
        "params": Numerics(6.2e-7, 4.4e-7, 3.0),
        "buffers": Numerics(0.0, 0.0, 3.0),
    },
    free_running={"params": StageResult(1e-8, floor("params", 10, seed=1))},
    seconds=21.4,
)
DECAY = Cause(
    (
        Deviation(
            "decay_value",
            Statement("decay", jax=0.0001, torch=(0.01,)),
            (Value("0.0001", "0.01", "AdamW", "weight_decay"),),
            fix="set it explicitly on both sides: optax.adamw(lr, weight_decay=1e-2)",
        ),
    ),
    2.1e-15,
    NextBest((Deviation("label_smoothing", Statement("label_smoothing", value=0.1)),), 3.1e-4),
)
SEMANTIC = dataclasses.replace(
    EQUAL,
    stages=stages_of(10, update=tuple(6.6e-4 * (1 + 0.1 * step) for step in range(10))),
    losses=losses_of(10, drift=2e-4),
    differences=(Difference("update", 1, "fc.weight", 6.6e-4, 1e-12, cause=DECAY),),
    free_running={"params": StageResult(1e-8, tuple(3e-4 * (step + 1) for step in range(10)))},
)
MEASURED, ALONE = (
    dataclasses.replace(SEMANTIC, differences=(dataclasses.replace(SEMANTIC.differences[0], cause=cause),))
    for cause in (
        dataclasses.replace(DECAY, measured="the replicas' start differs by 0.1 in fc.weight"),
        dataclasses.replace(DECAY, runner_up=None),
    )
)
LAYER = Layer(
    "blocks_0/gelu", "blocks.0.gelu", ((8, 14, 14, 32), (8, 32, 14, 14)), (3, 17, 0, 9),
    (-0.16991783, -0.17004082), 4.7e-4, 3e-16, "blocks.0.norm1",
)  # fmt: skip
UNEXPLAINED = dataclasses.replace(
    EQUAL,
    stages={
        stage: result
        for stage, result in stages_of(
            10, local_loss=(2e-5,) * 10, local_gradients=(3e-16, 3e-16, *(8e-4,) * 8), params=(2e-3,) * 10
        ).items()
        if stage not in ("gradients", "clipped_gradients")
    },
    differences=(
        Difference("local_loss", 1, "loss", 2e-5, 1e-12, layer=LAYER, detail="the replicas differ from each other"),
        Difference("local_gradients", 3, "fc.weight", 8e-4, 1e-12),
    ),
    unseen=("clipped_gradients", "gradients"),
)
SIDES = Quote("model.py", 19, 19, ("x = F.gelu(x)",)), Quote("port.py", 23, 23, ("x = nnx.gelu(x)",))
LOCATED = dataclasses.replace(
    UNEXPLAINED,
    differences=(
        dataclasses.replace(
            UNEXPLAINED.differences[0],
            segments=(
                Segment(("mul 0.5", "tanh", "mul"), ("gelu",), SIDES[1], SIDES[0], (3, 17), (-0.17004, -0.16992), 3),
                Segment((), ("mul 2.82843",), SIDES[1], SIDES[0], (), (0.0, 0.0), 1),
            ),
        ),
    ),
)
NUMERIC = dataclasses.replace(
    EQUAL,
    differences=(
        Difference(
            "gradients", 2, "norm1.weight", 3e-6, 3e-7, "numeric",
            Cause(
                (
                    Deviation(
                        "fast_variance", Statement("fast_variance", norm="LayerNorm"),
                        fix="set use_fast_variance=False",
                    ),
                    Deviation(
                        "reduced_precision_matmul",
                        Statement("inputs_rounded", of="products", dtype="TF32", by="hardware"),
                        fix='compare under jax.default_matmul_precision("highest")',
                    ),
                ),
                4e-8,
            ),
        ),
    ),
    numerics={"gradients": Numerics(4.9e-5, 2.4e-7, 3.0)},
)  # fmt: skip
INCOMPLETE = dataclasses.replace(
    EQUAL,
    stages={
        stage: dataclasses.replace(result, residuals=(*result.residuals[:2], *(math.nan,) * 8))
        for stage, result in EQUAL.stages.items()
        if stage != "optimizer_state"
    },
    losses=(*EQUAL.losses[:2], *((torch, math.nan) for torch, _ in EQUAL.losses[2:])),
    numerics={},
    free_running={},
    problems=(
        Problem("jax", "step 3", "hangs: no answer within 60 s"),
        Problem("port", "jax_restore", "ValueError: the saved state has no 'nu'"),
    ),
)
NOT_FINITE = dataclasses.replace(
    SEMANTIC,
    differences=(
        Difference(
            "local_gradients", 4, "all tensors", math.inf, 1e-12,
            detail="the loss is finite, so they arise in its derivative", not_finite="jax",
        ),
        *SEMANTIC.differences,
    ),
)  # fmt: skip
MANY = {f"transformer.h.{i // 8}.{('attn.c_attn', 'mlp.c_proj')[i % 2]}.{i % 8}.weight": (768, 768) for i in range(200)}
HUGE = dataclasses.replace(
    SEMANTIC,
    port="gpt2.py",
    world_size=8,
    steps=300,
    stages=stages_of(300, MANY, update=(*floor("update", 100), *(2e-6 * 1.03**step for step in range(200)))),
    differences=(dataclasses.replace(SEMANTIC.differences[0], step=101, tensor=list(MANY)[-2], residual=2e-6),),
    losses=tuple((10.8 * math.exp(-step / 40) + 0.01, 10.8 * math.exp(-step / 41) + 0.01) for step in range(300)),
    free_running={},
    seconds=1234.5,
)
HARSH = Report(
    f"{HOSTILE}.py", 1, 1, HOSTILE,
    stages={
        "samples": StageResult(0.0, (math.inf,), {HOSTILE: ((4,), math.inf)}),
        "params": StageResult(1e-12, (math.nan,), {HOSTILE: ((), math.nan)}),
        "update": StageResult(1e-12, (1e30,), {200 * "long.": ((1,), 1e30)}),
    },
    losses=((math.nan, math.inf),),
    differences=(
        Difference(
            "samples", 1, HOSTILE, math.inf, 0.0, detail=HOSTILE, layer=dataclasses.replace(LAYER, jax=HOSTILE),
            cause=Cause(
                tuple(
                    Deviation(x, Statement("other_values", entry=HOSTILE), fix=HOSTILE)
                    for x in (HOSTILE, "check_vma + nesterov")
                ),
                0.0, NextBest((), math.nan),
            ),
        ),
    ),
    problems=(Problem(HOSTILE, HOSTILE, f"{HOSTILE}\n{HOSTILE}"),),
    environment={HOSTILE: HOSTILE},
    numerics={"params": Numerics(math.nan, 0.0, 3.0)},
)  # fmt: skip
EMPTY = Report("mlp adam", 2, 0, "float64")
SAMPLES = {
    "equal": EQUAL, "semantic": SEMANTIC, "unexplained": UNEXPLAINED, "located": LOCATED, "numeric": NUMERIC,
    "incomplete": INCOMPLETE, "not finite": NOT_FINITE, "huge": HUGE, "harsh": HARSH, "empty": EMPTY,
}  # fmt: skip
