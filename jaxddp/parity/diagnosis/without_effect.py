"""Find the operations of a port that had no effect in any step, and that only one side has."""

from collections.abc import Collection, Iterator
from dataclasses import fields

from jaxddp.parity.cases import PortCase
from jaxddp.parity.coverage import WithoutEffect
from jaxddp.parity.diagnosis.evidence import Evidence
from jaxddp.parity.diagnosis.interruptible import InterruptibleSearches
from jaxddp.parity.findings import Problem
from jaxddp.parity.idle_operations import (
    NUMBER,
    Called,
    Calls,
    Watched,
    is_idle,
    merged_sides,
    numbers_of,
    without_twin,
)
from jaxddp.parity.jax_side.idle_operations import WatchJax
from jaxddp.parity.operations import readings
from jaxddp.parity.port import Port
from jaxddp.parity.quote import Quote
from jaxddp.parity.records import is_large_model
from jaxddp.parity.torch_side.idle_operations import WatchTorch
from jaxddp.parity.user_code.operation_text import numbers_of_call, operation_text
from jaxddp.parity.user_code.uncalled import uncalled
from jaxddp.program.program import NAMES

TOO_LARGE = "What had no effect in this run was not looked for, since the model is large."
UNKNOWN = "What had no effect in this run is not known: {}."
UNCHANGED = "changes no loss if it is changed by 1 %"
PASSES_ON = "never changes the updates"
UNCALLED = "is never called"


def without_effect(
    evidence: Evidence, searches: InterruptibleSearches
) -> tuple[tuple[WithoutEffect, ...], tuple[str, ...]]:
    """Return the operations without effect that only one side has, and a sentence if they were not looked for.

    Args:
        evidence: records of two sides that are equal.
        searches: runs a job of each side, one after the other: torch's shows whether jax's has to look for twins.
    """
    case, folder, problems = evidence.case, evidence.torch_folder, list[Problem]()
    if not isinstance(case, PortCase):
        return (), ()
    if is_large_model(evidence.start):
        return (), (TOO_LARGE,)
    watch = WatchTorch(case.torch_source, evidence.start, folder, len(evidence.torch), case.world_size)
    of_torch = searches.run(lambda: merged_sides(searches.workers.torch.do(watch)), problems)
    twins = of_torch is not None and any(is_idle(*pair) for pair in of_torch.calls.items())
    known = {x for called in (of_torch or Watched({}, {}, {})).numbers for y in called.numbers for x in readings(y)}
    job = WatchJax(case, evidence.start, folder, twins, numbers_of("", known))
    of_jax = searches.run(lambda: searches.workers.jax.do(job), problems)
    if of_torch is None or of_jax is None:
        why = "; ".join(f"{problem}" for problem in problems) or "the check was ended"
        return (), (UNKNOWN.format(why),)
    alone = [*_calls("torch", of_torch.calls, of_jax.calls), *_calls("jax", of_jax.calls, of_torch.calls)]
    alone += _members(evidence, of_torch.members, of_jax.members)
    alone += _numbers(of_jax, {(one.line.path, one.line.line) for one in alone})
    alone += _functions(case.name, of_torch, of_jax)
    return tuple(sorted(alone, key=lambda one: (one.side, one.line.path, one.line.line))), ()


def _calls(side: str, program: Calls, other: Calls) -> list[WithoutEffect]:
    return [_described_call(side, one.called, one.why) for one in without_twin(program, other)]


def _numbers(jax: Watched, lines: Collection[tuple[str, int]]) -> list[WithoutEffect]:
    """Return the numbers of jax's program that changed no loss when they were changed, except those at `lines`."""
    unchanged = [called for called, kept in jax.numbers.items() if kept.operands and called.line not in lines]
    return [_described_call("jax", called, UNCHANGED) for called in sorted(unchanged)]


def _functions(port: str, torch: Watched, jax: Watched) -> Iterator[WithoutEffect]:
    """Yield the functions of the port's files that neither side called."""
    files = [{line.path for line in of_side.functions} for of_side in (torch, jax)]
    for name, line in uncalled(port, torch.functions | jax.functions, (*NAMES, *(f.name for f in fields(Port)))):
        sides = [side for side, paths in zip(("torch", "jax"), files, strict=True) if line.path in paths]
        quote = Quote.of(line)
        assert quote is not None, "it has a line"
        yield WithoutEffect(sides[0] if len(sides) == 1 else "", f"{name}()", UNCALLED, quote)


def _described_call(side: str, called: Called, why: str) -> WithoutEffect:
    quote = Quote.of(called.line)
    assert quote is not None, "it has a line"
    is_number = called.function == NUMBER
    text = f"{called.numbers[0]:.9g}" if is_number else operation_text(called.line, called.function, called.numbers)
    return WithoutEffect(side, text, why, quote)


def _members(evidence: Evidence, torch: Calls, jax: Calls) -> list[WithoutEffect]:
    """Return transformations of the gradients that changed none, unless the other side clips to the same number."""
    facts = evidence.facts
    of_torch = [called for called, kept in torch.items() if kept.operands]
    of_jax = [called for called, kept in jax.items() if kept.operands]
    clips = {"clip_by_global_norm": {called.numbers for called in of_torch}, "clip": set[tuple[float, ...]]()}
    for member, option in (("clip_by_global_norm", facts.clip_grad_norm), ("clip", facts.clip_grad_value)):
        clips[member] |= set() if option is None else {numbers_of(member, [option])}

    def has_twin(called: Called) -> bool:
        twins = clips.get(called.function, set())
        numbers = numbers_of(called.function, numbers_of_call(called.line, called.function))
        return bool(twins) and (not numbers or numbers in twins)

    described = [_described_call("jax", called, PASSES_ON) for called in of_jax if not has_twin(called)]
    numbers = {numbers_of(called.function, numbers_of_call(called.line, called.function)) for called in of_jax}
    return described + [_described_call("torch", x, "never clips") for x in of_torch if x.numbers not in numbers]
