"""What a check found: plain data, from which the table, the JSON file and the page are made."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxddp.parity.catalogue import FAULTS

# The order in which a step makes them; a difference is reported at the first that shows it.
ORDER = (
    *("samples", "hyperparameters", "local_loss", "local_gradients", "gradients", "clipped_gradients"),
    *("update", "params", "buffers", "optimizer_state"),
)


@dataclass(frozen=True)
class Cause:
    """Why a stage differs.

    Attributes:
        names: of the catalogue; several where this run cannot tell them apart. Faults that are there at
            once are a `Difference` each.
        says: one line for each name, with values ("weight decay 0.0001, the reference has 0.01").
        fixes: what would be right, one for each name.
        residual: what the cause leaves unexplained.
        runner_up: the next best explanation and its residual; None: there was no other.
    """

    names: tuple[str, ...]
    says: tuple[str, ...]
    fixes: tuple[str, ...]
    residual: float
    runner_up: tuple[str, float] | None = None

    @classmethod
    def of(
        cls, names: Sequence[str], says: Sequence[str], residual: float, runner_up: tuple[str, float] | None = None
    ) -> "Cause":
        """A cause with the catalogue's advice."""
        return cls(tuple(names), tuple(says), tuple(FAULTS[name].fix for name in names), residual, runner_up)


@dataclass(frozen=True)
class Layer:
    """The first layer of the forward pass whose output differs.

    Attributes:
        flax, torch: its name in either framework.
        shapes: of its output, flax's and torch's.
        element: index of the largest difference in torch's layout.
        values: flax's and torch's value there.
        residual: ||flax - torch|| / ||torch|| of the output.
        input_residual: of its input, where known: at the floor, the layer itself differs; above, what
            lies between it and the layer before.
        before: the last layer that is equal; "" if it is the first.
    """

    flax: str
    torch: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    element: tuple[int, ...]
    values: tuple[float, float]
    residual: float
    input_residual: float | None
    before: str


@dataclass(frozen=True)
class Difference:
    """A stage that differs although what it was given does not.

    Attributes:
        stage: one of `ORDER`.
        step: the first step (from 1) that shows it.
        tensor: the one that differs most there.
        residual: ||jax - torch|| over the norm of the stage.
        allowed: the largest residual that counts as equal.
        kind: "semantic": the two mean different things; "numeric": they round differently.
        cause: None: unexplained.
        layer: where the forward pass parts; for "local_loss" and "local_gradients".
        nearest: where there is no cause, what came nearest and what it leaves unexplained.
        detail: one line more, where there is something to say ("replicas 1 and 3 differ from 0").
    """

    stage: str
    step: int
    tensor: str
    residual: float
    allowed: float
    kind: str = "semantic"
    cause: Cause | None = None
    layer: Layer | None = None
    nearest: tuple[str, float] | None = None
    detail: str = ""


@dataclass(frozen=True)
class Problem:
    """Something that kept a part of the check from being made.

    Attributes:
        side: "torch", "flax" or "port".
        where: what was being done ("step 3", "flax_model").
        message: one line.
    """

    side: str
    where: str
    message: str


@dataclass(frozen=True)
class StageResult:
    """A stage over all steps.

    Attributes:
        allowed: the largest residual that counts as equal.
        residuals: one per step, of its worst tensor; NaN where a step could not be compared.
        tensors: tensor -> (shape, worst residual over the steps).
    """

    allowed: float
    residuals: tuple[float, ...]
    tensors: dict[str, tuple[tuple[int, ...], float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Numerics:
    """How far float32 carries each side from its own float64 run, at the worst step.

    Attributes:
        jax, torch: ||x32 - x64|| / ||x64|| of the stage.
        allowed: the largest jax / torch that counts as equal.
    """

    jax: float
    torch: float
    allowed: float


@dataclass(frozen=True)
class Findings:
    """Everything that a check found.

    Attributes:
        port: the file, or the built-in model and optimizer.
        world_size, steps, dtype: of the run.
        stages: stage -> result, in the order of `ORDER`; those that both sides have shown.
        unseen: stages that the port does not show (its own `flax_step` makes them inside).
        losses: per step, (torch's, jax's) mean over the replicas, each side running by itself.
        differences: in the order of the stages; empty: equal.
        numerics: stage -> result; empty if float32 was not run.
        problems: what could not be done.
        rate_rounding: how far the port's learning rate is off because it is computed in float32, which is
            no difference.
        free_running: "jax" run by itself against torch: stage -> residual per step.
        seconds: that the check took.
        environment: versions, hardware, date.
    """

    port: str
    world_size: int
    steps: int
    dtype: str
    stages: dict[str, StageResult] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    losses: tuple[tuple[float, float], ...] = ()
    differences: tuple[Difference, ...] = ()
    numerics: dict[str, Numerics] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    free_running: dict[str, StageResult] = field(default_factory=dict)
    rate_rounding: float = 0.0
    seconds: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """equal, different, or "incomplete" where a problem left something uncompared."""
        if self.differences:
            return "different"
        return "incomplete" if self.problems or not self.stages else "equal"
