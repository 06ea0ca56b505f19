"""Compiled schedule played on one GPU: kernels on one stream, messages on another.

XLA starts a message (`all-reduce-start`) when its operands are ready and waits for it (`all-reduce-done`) before the
first use. What is between the two covers the message; the wait is exposed.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from jaxddp.plan.costs import Cost, Costs
from jaxddp.plan.hlo import CompiledProgram, Instruction
from jaxddp.plan.links import HALVES

_MESSAGE = re.compile(rf"({'|'.join(HALVES)})(-start)?$")


@dataclass(frozen=True)
class Message:
    """A message between the replicas, as the compiled program orders it.

    Attributes:
        name: name of its instruction.
        kind: "all-reduce", ...
        bytes: size of the full array on each GPU.
    """

    name: str
    kind: str
    bytes: int


@dataclass(frozen=True)
class Event:
    """One entry of the schedule.

    Attributes:
        what: "work" on the GPU, "start" of a message, or the wait until it is "done".
        cost: cost of the work.
        message: message that starts or is waited for.
    """

    what: Literal["work", "start", "done"]
    cost: Cost = field(default_factory=Cost)
    message: Message | None = None


def events(program: CompiledProgram) -> list[Event]:
    """Return the schedule of a program; loops are unrolled, and of a branch the costlier one is taken.

    Raises:
        ValueError: a loop of unknown length.
    """
    costs = Costs(program)
    return list(_events(program.entry, costs))


def _events(computation: str, costs: Costs) -> Iterator[Event]:
    running: dict[str, Message] = {}
    for one in costs.program.computations[computation]:
        message = _message(one, costs.program.by_name[computation], costs.program)
        if message is not None:
            yield Event("start", message=message)
            if one.opcode.endswith("-start"):
                running[one.name] = message
            else:
                yield Event("done", message=message)
        elif one.opcode.endswith("-done") and one.operands[0] in running:
            yield Event("done", message=running[one.operands[0]])
        elif one.opcode in ("while", "call", "conditional"):
            yield from _inside(one, costs)
        else:
            cost = costs.of(computation, one)
            if cost != Cost():
                yield Event("work", cost)


def _inside(one: Instruction, costs: Costs) -> Iterator[Event]:
    """Yield the schedule of a loop, a call or a conditional."""
    if one.passes is None:
        raise ValueError(f"{one.name}: a loop of unknown length")
    bodies = [list(_events(name, costs)) for name in one.called]
    longest = max(bodies, key=lambda body: sum(event.cost.bytes for event in body), default=[])
    for _ in range(one.passes):
        yield from longest


def _message(one: Instruction, names: dict[str, Instruction], program: CompiledProgram) -> Message | None:
    """Return the message that an instruction starts, if it does."""
    if one.opcode == "async-start":  # a message for which XLA has no opcode
        inner = program.computations[one.called[0]] if one.called else []
        found = [_message(inside, program.by_name[one.called[0]], program) for inside in inner]
        kind_and_size = [message for message in found if message is not None]
        return Message(one.name, kind_and_size[0].kind, kind_and_size[0].bytes) if kind_and_size else None
    match = _MESSAGE.fullmatch(one.opcode)
    if match is None:
        return None
    given = sum(names[name].bytes for name in one.operands if name in names)
    gathered = max((array.bytes for array in one.results), default=0)
    return Message(one.name, match[1], max(given, gathered))


@dataclass(frozen=True)
class Sent:
    """A message on the timeline.

    Attributes:
        message: the message.
        begin: seconds from the start of the step to that of the message.
        seconds: time that the links take for it.
        covered: seconds of it during which the GPU computes.
        work: costs of the kernels between its start and the wait for it.
    """

    message: Message
    begin: float
    seconds: float
    covered: float
    work: Cost

    @property
    def end(self) -> float:
        """Seconds from the start of the step to its end."""
        return self.begin + self.seconds

    @property
    def exposed(self) -> float:
        """Seconds for which the GPU waits."""
        return self.seconds - self.covered

    @property
    def covered_share(self) -> float:
        """Share of its time that is covered; 1 for a message that takes no time."""
        return self.covered / self.seconds if self.seconds else 1.0


@dataclass(frozen=True)
class Timeline:
    """Predicted times of one step.

    Attributes:
        work: seconds of the kernels.
        waiting: seconds for which the GPU waits for messages.
        sent: the messages, in the order in which they are waited for.
    """

    work: float
    waiting: float
    sent: tuple[Sent, ...]

    @property
    def seconds(self) -> float:
        """Time of the step."""
        return self.work + self.waiting

    @property
    def efficiency(self) -> float:
        """Examples per second and GPU, relative to a single GPU."""
        return self.work / self.seconds

    @property
    def bubble(self) -> float:
        """Share of the step for which the GPU waits."""
        return self.waiting / self.seconds

    @property
    def covered_share(self) -> float:
        """Share of the messages' bytes that are covered, each by the share of its time."""
        total = sum(sent.message.bytes for sent in self.sent)
        return sum(sent.message.bytes * sent.covered_share for sent in self.sent) / total if total else 1.0


def play(
    schedule: list[Event], work_seconds: Callable[[Cost], float], message_seconds: Callable[[str, float], float]
) -> Timeline:
    """Play a schedule: kernels run one after another, and messages run one after another at the same time.

    Args:
        schedule: from `events`.
        work_seconds: cost -> time of a kernel.
        message_seconds: (kind, bytes) -> time of a message.
    """
    now = work = free = 0.0
    running: dict[str, tuple[float, float, int]] = {}  # name -> its time, its end, the next kernel at its start
    kernels: list[Cost] = []
    sent: list[Sent] = []
    for event in schedule:
        if event.message is None:
            duration = work_seconds(event.cost)
            now, work = now + duration, work + duration
            kernels.append(event.cost)
        elif event.what == "start":
            duration = message_seconds(event.message.kind, event.message.bytes)
            free = max(now, free) + duration
            running[event.message.name] = duration, free, len(kernels)
        else:
            duration, end, first = running.pop(event.message.name)
            wait = max(0.0, end - now)
            now += wait
            between = sum(kernels[first:], Cost())
            sent.append(Sent(event.message, end - duration, duration, max(0.0, duration - wait), between))
    return Timeline(work, now - work, tuple(sent))
