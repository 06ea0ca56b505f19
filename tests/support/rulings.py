"""InterruptibleSearches of a diagnosis of model and loss, and checks of what they name."""

from jaxddp.parity.diagnosis.forward.loss_causes import FLOOR, REPLAYS, ModelEvidence, search_model
from jaxddp.parity.diagnosis.search.decide import Ruling
from jaxddp.parity.report.sentences import line

EXPLAINED = 1e-13  # measured: up to 7.6e-15


def explain_model(evidence: ModelEvidence, replays: int = REPLAYS) -> Ruling:
    return search_model(evidence, FLOOR, replays)[0]


def check_named(ruling: Ruling, *named: tuple[set[str], str]) -> None:
    """Check that the ruling names these faults, in these words in any order, and nothing else."""
    actual = [(set(hypothesis.faults), sorted(line(hypothesis).split("; "))) for hypothesis in ruling.named]
    assert actual == [(faults, sorted(says.split("; "))) for faults, says in named], ruling
    assert all(hypothesis.residual < EXPLAINED for hypothesis in ruling.named)
