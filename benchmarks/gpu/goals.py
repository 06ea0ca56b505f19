"""Targets on a GPU, each with its value in the records."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gpu import utilisation
from benchmarks.targets import Target

Records = Mapping[str, Mapping[str, Any]]  # by part


def speeds(records: Records) -> dict[tuple[str, str], float]:
    """Return examples per second and GPU, by job and contender."""
    return {(row["job"], row["contender"]): row["speed"] for row in _table(records)}


def _table(records: Records) -> list[dict[str, Any]]:
    return utilisation.table(records.get("utilisation", {}), records.get("machine", {}))


def _against(peer: str) -> Callable[[Records], dict[str, float]]:
    """Return the speed of jaxddp as it comes over that of a peer, by job."""

    def values(records: Records) -> dict[str, float]:
        known = speeds(records)
        jobs = [job for job, contender in known if contender == "jaxddp" and (job, peer) in known]
        return {job: float(f"{known[job, 'jaxddp'] / known[job, peer]:.4g}") for job in jobs}

    return values


def _utilisation(records: Records) -> dict[str, float]:
    return {
        row["job"]: float(f"{row['utilisation']:.3g}")
        for row in _table(records)
        if (row["job"], row["contender"]) == ("decoder", "jaxddp") and row["utilisation"] is not None
    }


TARGETS = (
    Target("G1", "x the speed of torch DDP", 1.3, True, _against("torch")),
    Target("G2", "x the speed of torch.compile", 1.0, True, _against("torch_compile")),
    Target("G3", "of the measured bf16 rate on the decoder", 0.5, True, _utilisation),
)


def rows(records: Records) -> list[dict[str, Any]]:
    """Return the rows of all targets."""
    return [target.row(records) for target in TARGETS]
