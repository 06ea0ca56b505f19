"""Find the first layer whose output differs: both sides run once more and show their layers."""

from jaxddp.parity.cases import PortCase
from jaxddp.parity.compare.layers import first_difference
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.findings import Layer
from jaxddp.parity.jax_side.layers import JaxLayers
from jaxddp.parity.processes import ChildError
from jaxddp.parity.records import Records, Scratch, total_loss
from jaxddp.parity.torch_side.layers import TorchLayers
from jaxddp.parity.workers import Workers


def first_layer(evidence: Evidence, workers: Workers, step: int) -> tuple[Layer | None, int, str] | None:
    """Return `first_difference` on the replica whose loss differs most, and casts that only jax makes.

    None for a built-in model.
    """
    if not isinstance(evidence.case, PortCase):
        return None
    torch_loss, jax_loss = (total_loss(of_side[step]) for of_side in (evidence.torch, evidence.jax))
    same = evidence.judgement.same_examples[step]
    rank = max(same, key=lambda rank: abs(jax_loss[rank] - torch_loss[rank]))
    scratch = Scratch()
    of_torch, of_jax = scratch.path / "torch", scratch.path / "jax"
    job = (evidence.start, evidence.torch_folder)
    workers.jax.start(JaxLayers(evidence.case, *job, of_jax, step, rank))
    try:
        workers.torch.do(TorchLayers(evidence.case.torch_source, *job, of_torch, step, rank, evidence.case.world_size))
    except ChildError:
        workers.jax.wait()  # or the next job would receive this answer
        raise
    workers.jax.wait()
    jax = Records([of_jax])[0]
    casts = (f"jax computes in {dtype} at {where}, and torch does not" for dtype, where in jax.notes["casts"].items())
    return *first_difference(Records([of_torch])[0], jax, jax.notes["twins"]), "; ".join(casts)
