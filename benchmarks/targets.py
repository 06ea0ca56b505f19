"""Targets of the project as one table: what is asked, the limit, the value in a record, and whether it is met."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.contenders import ALL_PEERS_AT, JAXDDP

Record = Mapping[str, Any]
Values = dict[str, float]  # by workload

HAND_WRITTEN = ("pmap", "pmap_scan")
ON_ONE_DEVICE = ("jit", "jit_scan")
SCALARS = 64  # bytes besides gradients and buffers in a step's all-reduce, and those of an evaluation


@dataclass(frozen=True)
class Target:
    """A number that must not be below, or not above, a limit.

    Attributes:
        id: number of the target, and a letter where it has several parts.
        text: what is asked.
        limit: the limit.
        at_least: whether the value must reach the limit; otherwise it must not exceed it.
        values: record -> values by workload; of several, the worst counts. Empty: not measured.
    """

    id: str
    text: str
    limit: float
    at_least: bool
    values: Callable[[Record], Values]

    def row(self, record: Record) -> dict[str, Any]:
        """Return the target's row: its worst value, and every workload that misses it."""
        values = self.values(record)
        row = {"id": self.id, "text": self.text, "limit": self.limit, "at_least": self.at_least}
        if not values:
            return row | {"value": None, "of": None, "met": None, "missed_by": {}}
        worst = (min if self.at_least else max)(values, key=lambda name: values[name])
        missed = {name: value for name, value in values.items() if not self._meets(value)}
        return row | {"value": values[worst], "of": worst, "met": not missed, "missed_by": missed}

    def _meets(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


def rows(record: Record) -> list[dict[str, Any]]:
    """Return the rows of all targets."""
    return [target.row(record) for target in TARGETS]


def _against(peer: str, *workloads: str) -> Callable[[Record], Values]:
    """Return the peer's time over jaxddp's at two replicas, of the named workloads or of all."""

    def values(record: Record) -> Values:
        races = _races(record, ALL_PEERS_AT)
        chosen = [
            race for race in races if peer in race["ratios"] and race["workload"] in (workloads or [race["workload"]])
        ]
        return {race["workload"]: race["ratios"][peer]["median"] for race in chosen}

    return values


def _over_best(peers: Sequence[str], replicas: int) -> Callable[[Record], Values]:
    """Return jaxddp's time over that of the fastest of some peers."""

    def values(record: Record) -> Values:
        found = {}
        for race in _races(record, replicas):
            ratios = [race["ratios"][peer]["median"] for peer in peers if peer in race["ratios"]]
            if ratios:
                found[race["workload"]] = float(f"{1 / min(ratios):.4g}")
        return found

    return values


def _inside(*keys: str) -> Callable[[Record], Values]:
    """Return a number that was read from the live contenders."""

    def values(record: Record) -> Values:
        races = [race for race in record.get("races", []) if keys[1] in race.get(keys[0], {})]
        return {race["workload"]: race[keys[0]][keys[1]] for race in races}

    return values


def _bytes_besides(record: Record) -> Values:
    """Return the bytes of a step's all-reduces besides the gradients and the buffers, which rank 0 sends.

    Below zero where XLA sends equal gradients once, such as those of two biases whose outputs are added.
    """
    programs = {race["workload"]: race["program"] for race in record.get("races", []) if "program" in race}
    expected = {name: program["gradient_bytes"] + program["buffer_bytes"] for name, program in programs.items()}
    return {name: program["bytes_per_step"] - expected[name] for name, program in programs.items()}


def _of_job(name: str, key: str) -> Callable[[Record], Values]:
    return lambda record: {"mlp": record["jobs"][name][key]} if "jobs" in record else {}


def _races(record: Record, replicas: int) -> Iterator[Record]:
    return (race for race in record.get("races", []) if race["replicas"] == replicas)


TARGETS = (
    Target("1a", "x the default MLP's steps of torch DDP", 8.0, True, _against("torch", "mlp")),
    Target("1b", "x the wide MLP's steps of torch DDP", 2.5, True, _against("torch", "wide_mlp")),
    Target(
        "1c", "x the convnets' steps of torch DDP", 1.5, True, _against("torch", "convnet", "two_convs", "residual")
    ),
    Target("1d", "x the decoder's steps of torch DDP", 1.3, True, _against("torch", "decoder")),
    Target("1e", "x the steps of torch.compile", 1.0, True, _against("torch_compile")),
    Target("2a", "of the time of pmap by hand, the faster of 1 and K steps", 1.02, False, _over_best(HAND_WRITTEN, 2)),
    Target("2b", "of the time of plain jit on one device", 1.05, False, _over_best(ON_ONE_DEVICE, 1)),
    Target("3", "of the time with 1 step per dispatch: no slow path", 1.05, False, _over_best(("one_step",), 2)),
    Target("4a", "all-reduces per step", 1, False, _inside("program", "all_reduces_per_step")),
    Target("4b", "bytes all-reduced per step besides gradients and buffers", SCALARS, False, _bytes_besides),
    Target("4c", "bytes all-reduced by an evaluation", SCALARS, False, _inside("program", "evaluation_bytes")),
    Target("5a", "x the step rate by the input pipeline alone", 5.0, True, _inside("input", "times_step_rate")),
    Target(
        "5b", "s cold to the first epoch's line", 2.5, False, _of_job(f"{JAXDDP}.train, cold", "seconds_to_first_epoch")
    ),
    Target("5c", "s of the second default job", 3.5, False, _of_job(f"{JAXDDP}.train, warm", "seconds_to_end")),
    Target("6", "programs traced in the second epoch", 0, False, _inside("traces", "second_epoch")),
)
