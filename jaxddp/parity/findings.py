"""Findings of a check: plain data, from which the text, the page and the JSON file are made."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from jaxddp.parity.catalogue import EDITS, FAULTS, TorchOptimizer
from jaxddp.parity.coverage import ASPECTS, Aspect, Beyond, Trial, WithoutEffect
from jaxddp.parity.deviation import Deviating, Deviation
from jaxddp.parity.operations import Lines, SegmentText
from jaxddp.parity.quote import Quote

# Stages in the order in which a step computes them; a difference is reported at the first stage that shows it.
ORDER = (
    *("samples", "hyperparameters", "local_loss", "local_gradients", "gradients", "clipped_gradients"),
    *("update", "outside_changes", "params", "buffers", "optimizer_state"),
)
STAGE_NAMES = {stage: stage.replace("_", " ") for stage in (*ORDER, *ASPECTS)} | {"params": "parameters"}
EXIT_CODES = {"equal": 0, "beyond": 0, "different": 1, "incomplete": 2}


@dataclass(frozen=True)
class Patch:
    """An edit of the user's JAX file that removes a difference, tried on the run; or why there is none.

    Attributes:
        verdict: "equal" if nothing differs with this patch and those that go with it, "gone" if this difference is gone
            and others remain, "none" if no edit was found.
        diff: unified diff of this edit, with paths from the port's folder; "" without one.
        others: number of differences that remain.
        why_not: why there is no patch; "" if there is one.
        together: number of patches, this one among them, with which the verdict was reached.
    """

    verdict: str
    diff: str = ""
    others: int = 0
    why_not: str = ""
    together: int = 1


@dataclass(frozen=True)
class NextBest(Deviating):
    """The nearest explanation that is not the cause.

    Attributes:
        deviations: faults that are present at once; (): none.
        residual: the residual that it leaves.
    """

    deviations: tuple[Deviation, ...]
    residual: float


@dataclass(frozen=True)
class Cause:
    """Cause of a difference: one fault, or several that this run cannot tell apart.

    Attributes:
        deviations: the faults of which any explains the difference. Faults that are present together have a
            `Difference` each.
        residual: the residual that the cause leaves unexplained.
        runner_up: the next best explanation; None: there is no other.
        measured: what shows the cause, if it was not planted in the reference and replayed.
        jax, torch: the line of each side; None: unknown.
    """

    deviations: tuple[Deviation, ...]
    residual: float
    runner_up: NextBest | None = None
    measured: str = ""
    jax: Quote | None = None
    torch: Quote | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the catalogue, one for each deviation."""
        return tuple(one.kind for one in self.deviations)

    @property
    def fixes(self) -> tuple[str, ...]:
        """What the port should do instead, one line for each deviation."""
        return tuple(one.fix for one in self.deviations)

    @classmethod
    def of(
        cls,
        deviations: Iterable[Deviation],
        residual: float,
        runner_up: NextBest | None = None,
        optimizer: TorchOptimizer | None = None,
        measured: str = "",
        lines: Lines = Lines(),  # noqa: B008
    ) -> "Cause":
        """Return a cause with the fixes of the catalogue, for the reference's optimizer if that is known."""
        rows = FAULTS | EDITS
        fixed = (replace(one, fix=one.fix or rows[one.kind].fix_for(one, optimizer)) for one in deviations)
        return cls(tuple(fixed), residual, runner_up, measured, Quote.of(lines.jax), Quote.of(lines.torch))


@dataclass(frozen=True)
class Layer:
    """First layer of the forward pass whose output differs.

    Attributes:
        jax, torch: name of the layer in each framework.
        shapes: shapes of the output, in jax and in torch.
        element: index of the largest difference, in torch's layout.
        values: value at this index, in jax and in torch.
        residual: ||jax - torch|| / ||torch|| of the output.
        input_residual: the same of the input; None if unknown. At rounding level the layer itself differs;
            above it, the operations between the previous layer and this one.
        before: the last layer whose output is equal; "" if there is none.
        columns: if jax's input is torch's with its channels in another order: torch's channels in jax's order, as
            runs (first, last); else empty.
    """

    jax: str
    torch: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    element: tuple[int, ...]
    values: tuple[float, float]
    residual: float
    input_residual: float | None
    before: str
    columns: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Segment:
    """Operations of both losses that get equal inputs and give other outputs.

    Attributes:
        jax, torch: the operations, with the numbers that they are given; (): this side has none here.
        jax_line, torch_line: the last line of each side; None: unknown.
        element: index of the element of the output that differs most, in torch's layout.
        values: its value, in jax and in torch.
        places: number of places that have the same operations at the same lines.
        jax_code, torch_code: what each side computes, as code in the reference's names; "": too long.
    """

    jax: tuple[str, ...]
    torch: tuple[str, ...]
    jax_line: Quote | None
    torch_line: Quote | None
    element: tuple[int, ...]
    values: tuple[float, float]
    places: int
    jax_code: str = ""
    torch_code: str = ""

    @classmethod
    def of(cls, text: SegmentText) -> "Segment":
        """Return a segment with its lines as they are written in the user's files."""
        lines = Quote.of(text.lines.jax), Quote.of(text.lines.torch)
        return cls(text.jax, text.torch, *lines, text.element, text.values, text.places, *text.code)


@dataclass(frozen=True)
class Difference:
    """A stage that differs although its inputs are equal.

    Attributes:
        stage: one of `ORDER`.
        step: the first step (from 1) at which the stage differs.
        tensor: the tensor that differs most at this step.
        residual: ||jax - torch|| of the tensor over the norm of the stage.
        allowed: the largest residual that counts as equal.
        kind: "semantic" if the two sides compute different things, "numeric" if they round differently.
        cause: None if unexplained.
        layer: where the forward pass diverges; for "local_loss" and "local_gradients".
        nearest: without a cause, the nearest explanation.
        detail: one more line, if any ("replicas 1 and 3 differ from 0").
        not_finite: the only side, "torch" or "jax", with non-finite values; "": neither.
        jax, torch: without a cause, the first line of each side that computes something else; None: unknown.
        segments: operations of the loss that get equal inputs and give other values: of the cause, or without one, all.
        needs: what it takes to find the cause, if none was sought.
        patch: an edit that removes the difference, or why there is none; None: none was sought.
    """

    stage: str
    step: int
    tensor: str
    residual: float
    allowed: float
    kind: str = "semantic"
    cause: Cause | None = None
    layer: Layer | None = None
    nearest: NextBest | None = None
    detail: str = ""
    not_finite: str = ""
    jax: Quote | None = None
    torch: Quote | None = None
    segments: tuple[Segment, ...] = ()
    needs: str = ""
    patch: Patch | None = None


def groups(differences: Sequence[Difference]) -> list[list[Difference]]:
    """Group consecutive differences at the same place, which differ in their cause only."""
    grouped = itertools.groupby(differences, lambda d: (d.stage, d.step, d.tensor, d.kind))
    return [list(group) for _, group in grouped]


@dataclass(frozen=True)
class Problem:
    """An error that left a part of the check undone.

    Attributes:
        side: "torch", "jax" or "port".
        where: what was being done ("step 3", "jax_model").
        message: one line.
        leads: whether it precedes the differences, because these are of earlier steps.
        frames: lines of the user's code through which an error was raised, the innermost last.
        trace: traceback of the process that raised; "": none did.
    """

    side: str
    where: str
    message: str
    leads: bool = False
    frames: tuple[str, ...] = field(default=(), compare=False)
    trace: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.side}: {self.where}: {self.message}"


@dataclass(frozen=True)
class StageResult:
    """Residuals of a stage over all steps.

    Attributes:
        allowed: the largest residual that counts as equal.
        residuals: residual of the worst tensor, one per step; NaN if the step could not be compared.
        tensors: tensor -> (shape, worst residual over the steps).
    """

    allowed: float
    residuals: tuple[float, ...]
    tensors: dict[str, tuple[tuple[int, ...], float]] = field(default_factory=dict)

    @property
    def exceeds(self) -> bool:
        """Return whether a residual is larger than allowed."""
        return any(residual > self.allowed for residual in self.residuals)


@dataclass(frozen=True)
class LeftOut:
    """Stages that are not judged at some steps.

    Attributes:
        stages: of `ORDER`.
        steps: numbers of the steps.
        reason: why, as the end of a sentence ("the parameters have drifted apart").
    """

    stages: tuple[str, ...]
    steps: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Numerics:
    """Distance of a stage in float32 from the same side's float64 run, at the worst step that counts.

    Attributes:
        jax, torch: ||x32 - x64|| / ||x64|| of the stage on each side.
        allowed: the largest jax / torch that counts as equal.
    """

    jax: float
    torch: float
    allowed: float


@dataclass(frozen=True)
class Findings:
    """All results of a check.

    Attributes:
        port: the program, or the built-in model and optimizer.
        world_size, steps, dtype: settings of the run.
        stages: stage -> result, in the order of `ORDER`, for the stages that both sides show.
        aspects: of `ASPECTS`, those that were looked at -> result.
        trials: changes of the run under which both sides were compared, or why they were not.
        beyond: what differs in these trials.
        without_effect: operations of one side that no step exercised.
        intended: what the port means to differ in, of `ASPECTS` and `TRIALS` -> its reason.
        unseen: stages that the port does not show because its `jax_step` computes them inside.
        losses: (torch's, jax's) loss per step, the mean over the replicas, each side running on its own.
        differences: in the order of the stages; empty if equal.
        numerics: stage -> result; empty if float32 was not run.
        problems: errors that left parts of the check undone.
        names: proposed table of names, with rules as text; {}: none.
        no_twin: proposed constants; (): none.
        idle: options that the run did not exercise, each in a sentence; their agreement is not shown.
        rate_rounding: relative rounding error of a learning rate that the port computes in float32; it does not
            count as a difference.
        left_out: what the verdict does not rest on.
        free_running: stage -> residual per step of jax against torch, each running on its own.
        ended: what ended the check early, "Ctrl-C" for instance; "": nothing did.
        untried: what it had not done by then, each in a few words.
        patch: all patches as one unified diff, with paths from the port's folder; "": there is none.
        seconds: duration of the check.
        part_seconds: part of the check -> its duration; a part within another counts in both.
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
    aspects: dict[str, Aspect] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    beyond: tuple[Beyond, ...] = ()
    without_effect: tuple[WithoutEffect, ...] = ()
    intended: dict[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    no_twin: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    free_running: dict[str, StageResult] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    rate_rounding: float = 0.0
    ended: str = ""
    untried: tuple[str, ...] = ()
    patch: str = ""
    seconds: float = 0.0
    part_seconds: dict[str, float] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Return "equal", "beyond", "different", or "incomplete" if something was left uncompared.

        A residual larger than allowed excludes "equal", whether or not a difference was made of it.

        >>> Findings("port.py", 1, 1, "float64", {"update": StageResult(1e-12, (1e-3,))}).verdict
        'different'
        """
        if self.differences or any(result.exceeds for result in self.stages.values()):
            return "different"
        if self.problems or not self.stages or self.ended:
            return "incomplete"
        return "beyond" if self.beyond else "equal"

    @property
    def unintended(self) -> tuple[str, ...]:
        """Return in what the port differs though every stage is equal, of `ASPECTS` and `TRIALS`, and not by intent.

        >>> from dataclasses import replace
        >>> findings = Findings("port.py", 1, 1, "float64", aspects={"initialisation": Aspect("differs")})
        >>> findings.unintended, replace(findings, intended={"initialisation": "smaller"}).unintended
        (('initialisation',), ())
        """
        kinds = [name for name, aspect in self.aspects.items() if aspect.verdict == "differs"]
        kinds += [beyond.trial.kind for beyond in self.beyond]
        return tuple(kind for kind in dict.fromkeys(kinds) if kind not in self.intended)

    def exit_code(self, strict: bool = False) -> int:
        """Return the exit code of a command; with `strict`, 1 if the port differs in anything by accident."""
        code = EXIT_CODES[self.verdict]
        return 1 if strict and code == 0 and self.unintended else code
