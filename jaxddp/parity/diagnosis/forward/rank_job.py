"""Where model and loss are explained: in a torch rank, since hypotheses run the port's torch code. Knows no jax."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from jaxddp.parity.convert.layouts import COUNTER
from jaxddp.parity.diagnosis.decide import Ruling
from jaxddp.parity.diagnosis.forward.buffers import explain_buffers
from jaxddp.parity.diagnosis.forward.explain import ModelEvidence, ModelStep, search_model
from jaxddp.parity.processes import Tell
from jaxddp.parity.records import Lazy, Records, Tensors, of_loss
from jaxddp.parity.torch_side.rank import rank_folder
from jaxddp.parity.torch_side.side import TorchSide, TorchSource, under_all_names
from torch_ref.distributed import World


@dataclass(frozen=True)
class Explain:
    """A hypothesis search over the port's torch code.

    Attributes:
        source: the torch half.
        model, buffers: what differs: loss or gradients, what a forward pass leaves.
        steps: those that can be compared, from 0.
        start: the reference's first weights.
        reference, found: folders of the records of torch, and of jax.
        replicas: W.
        compared: those that were given the same examples in all of these steps.
    """

    source: TorchSource
    model: bool
    buffers: bool
    steps: tuple[int, ...]
    start: Tensors
    reference: Path
    found: Path
    replicas: int
    compared: tuple[int, ...]
    world_size: int = 1

    def run(self, world: World, tell: Tell) -> tuple[Ruling | None, Ruling | None]:
        """Search: the ruling on the model, and on the buffers; None where they do not differ."""
        tell("the search for a cause")
        side = self.source.torch_side(max(self.steps) + 1, "float64")
        normalization = side.facts.loss_normalization
        evidence = ModelEvidence(
            side.model.train(), side.loss_fn, _steps(self, side), self.replicas, normalization, self.compared
        )
        of_model, known = search_model(evidence) if self.model else (None, ())
        return of_model, explain_buffers(evidence, known=known) if self.buffers else None


def _steps(job: Explain, side: TorchSide) -> Sequence[ModelStep]:
    """The steps, read when asked for."""
    torch, jax = Records([rank_folder(job.reference, 0)]), Records([job.found])
    of_ranks = [side.batches(rank, job.replicas) for rank in range(job.replicas)]
    batches = list(islice(zip(*of_ranks, strict=True), max(job.steps) + 1))

    def state(step: int) -> Tensors:
        """Parameters and buffers before a step."""
        if step == 0:
            return job.start
        return under_all_names(side.model, {**torch[step - 1]["params"], **torch[step - 1]["buffers"]})

    def make(index: int) -> ModelStep:
        step = job.steps[index]
        found = jax[step]
        spread = {name.partition(":")[2]: x for name, x in found["spread"].items() if name.startswith("buffers:")}
        return ModelStep(
            state(step),
            state(step - 1) if step else None,
            batches[step],
            of_loss(found, "local_loss")["loss"],
            of_loss(found, "local_gradients"),
            {name: x for name, x in found["buffers"].items() if not name.endswith(COUNTER)},
            spread,
        )

    return Lazy(lambda: len(job.steps), make)
