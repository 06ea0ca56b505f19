"""Places where faults can be: the calls of a running loss, and sets of calls that may share a fault."""

import contextlib
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from jaxddp.parity.deviation import Statement
from jaxddp.parity.diagnosis.forward.call_trace import CallTrace
from jaxddp.parity.diagnosis.forward.calls import Call, CallEdit, Change, Site
from torch_ref.losses import Batch, LossFunction

MOST_SITES = 5  # most sites with every subset tried: a ResNet's stem, pooling and three strided stages


def trace(
    module: nn.Module, loss_fn: LossFunction, batch: Batch, patches: Sequence[CallEdit] = (), reads: bool = False
) -> list[Call]:
    """Record every call of one forward pass, with the name of the module that makes the call.

    Args:
        module, loss_fn, batch: what runs.
        patches: faults planted in it.
        reads: record the user's lines and the moments of results, too; the calls end with the one that returns the
            loss.

    >>> import torch
    >>> [(call.name, call.module) for call in trace(
    ...     nn.Sequential(nn.Linear(2, 2), nn.GELU()), lambda model, batch: {"loss": model(batch["x"]).sum()},
    ...     {"x": torch.ones(1, 2)})]
    [('linear', '0'), ('gelu', '1'), ('sum', None)]
    """
    with naming(module) as names, CallTrace(patches, modules=names, reads=reads) as calls:
        sums = loss_fn(module, batch)
    recorded = calls.recorded
    if not reads:
        return recorded
    last = next((k for k, call in enumerate(recorded) if call.result is sums["loss"]), len(recorded) - 1)
    return recorded[: last + 1]


@contextlib.contextmanager
def naming(module: nn.Module) -> Iterator[list[str]]:
    """Yield the names of the submodules that are being executed, the innermost last."""
    names: list[str] = []
    handles: list[RemovableHandle] = []
    for name, child in module.named_modules():
        handles.append(child.register_forward_pre_hook(lambda *_, name=name: names.append(name)))
        handles.append(child.register_forward_hook(lambda *_: _drop_last(names), always_call=True))
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


def between(calls: Sequence[Call], before: str, layer: str) -> frozenset[Site]:
    """Return the sites of the calls after a layer has returned for the first time, up to the end of another.

    Args:
        calls: all calls of a forward pass.
        before: the last layer whose output is equal; "" if there is none.
        layer: the first layer whose output differs.
    """
    ends = max(_of_layer(calls, layer), default=len(calls) - 1)
    begins = 0
    for place in _of_layer(calls, before) if before else []:
        if begins and place > begins:
            break  # the layer is called again
        begins = place + 1
    return frozenset(call.site for call in calls[begins : ends + 1])


def beginning_in(here: Set[Site], patches: Iterable[CallEdit], calls: Sequence[Call]) -> Iterator[CallEdit]:
    """Yield the patches whose first site is among the given ones; further sites may lie elsewhere.

    Args:
        here: sites.
        patches: possible faults.
        calls: all calls of a forward pass.
    """
    place = {call.site: number for number, call in enumerate(calls)}
    return (patch for patch in patches if min(patch.sites, key=place.__getitem__) in here)


def _of_layer(calls: Sequence[Call], layer: str) -> list[int]:
    """Return the positions of the calls that a layer, or a layer inside it, makes.

    Args:
        calls: all calls.
        layer: name of a module, with " (n)" for its n-th call.
    """
    name = layer.partition(" (")[0]
    return [place for place, call in enumerate(calls) if f"{call.module}.".startswith(f"{name}.")]


def _drop_last(names: list[str]) -> None:
    names.pop()


def patches_of(changes: Iterable[tuple[Call, Change]]) -> Iterator[CallEdit]:
    """Yield each change at all of its sites, at the sites of similarly named modules, and at each single site.

    Args:
        changes: possible changes, call by call.
    """
    groups: dict[tuple[Any, ...], list[tuple[Call, Change]]] = defaultdict(list)
    for call, change in changes:
        groups[change.fault, change.group or change.what, change.reference].append((call, change))
    for group in groups.values():
        calls = [call for call, _ in group]
        setting = group[0][1].setting
        if len(calls) > 1 or setting or not calls[0].module:
            yield _patch(group, frozenset(call.site for call in calls))
        if (len(calls) > 1 or calls[0].module) and not setting:
            yield from (_patch(group, sites, where) for sites, where in _places(group).items())


def _patch(group: Sequence[tuple[Call, Change]], sites: frozenset[Site], where: str = "") -> CallEdit:
    """Return the change at some sites of its group, described as these sites are if they share the description."""
    changes = [change for call, change in group if call.site in sites]
    same = len({change.what for change in changes}) == 1
    first = changes[0] if same else replace(changes[0], what=changes[0].group or changes[0].what)
    chosen = [(call, change) for call, change in group if call.site in sites]
    of_sites = {site: change for call, change in chosen for site in (call.site, *change.also)}
    return CallEdit(first, frozenset(of_sites), where, changes=of_sites)


def _places(group: Sequence[tuple[Call, Change]]) -> dict[frozenset[Site], str]:
    """Return named sets of sites: each site, modules with like names (blocks.*.norm), parts (blocks.0.*).

    If a module makes several calls, the first calls of all modules of like name are a set too, and so on.
    """
    calls = [call for call, _ in group]
    names = [{None: "the loss", "": "the model"}.get(call.module, str(call.module)) for call in calls]
    nth = [f" (call {names[: k + 1].count(name)})" if names.count(name) > 1 else "" for k, name in enumerate(names)]
    sites: dict[str, set[Site]] = defaultdict(set)
    for call, name, number in zip(calls, names, nth, strict=True):
        if "." in name:
            sites[f"*.{name.rpartition('.')[2]}"].add(call.site)  # parts of one name in modules of several
        insides = [f"{name[: dot.start()]}.*" for dot in re.finditer(r"\.", name)]
        for place in (*insides, name):  # if two patterns give the same set, the later one names it
            # layer1.0 and layer2.0 are layer*.*; a number that is a complete name comes later and names the same set.
            for pattern in (re.sub(r"[0-9]+", "*", place), place, re.sub(r"\b[0-9]+\b", "*", place)):
                sites[pattern].add(call.site)
        sites[re.sub(r"\b[0-9]+\b", "*", name) + number].add(call.site)
    places = {frozenset(some): where for where, some in sites.items() if 1 < len(some) < len(calls)}
    alone = {frozenset({call.site}): f"{name}{number}" for call, name, number in zip(calls, names, nth, strict=True)}
    return (_subsets(group, alone) if group[0][1].subsets else {}) | places | alone


def _subsets(group: Sequence[tuple[Call, Change]], alone: dict[frozenset[Site], str]) -> dict[frozenset[Site], str]:
    """Return every proper subset of two sites or more; for many sites, those of one kind, and all but one."""
    of_kind: dict[Statement, set[Site]] = defaultdict(set)
    for call, change in group:
        of_kind[change.what].add(call.site)
    sites = {site: f"layer {name}" if name.isdigit() else name for (site,), name in alone.items()}
    sizes = range(2, len(sites)) if len(sites) <= MOST_SITES else (len(sites) - 1,)
    some = [set(subset) for size in sizes for subset in itertools.combinations(sites, size)]
    some += [kind for kind in of_kind.values() if 1 < len(kind) < len(sites)]
    return {frozenset(subset): _and([name for site, name in sites.items() if site in subset]) for subset in some}


def _and(names: Sequence[str]) -> str:
    """Join names with commas and "and".

    >>> _and(["conv1", "pool", "conv2"])
    'conv1, pool and conv2'
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
