"""Find mistakes of samplers and loaders from the fingerprints of the examples that each side was given."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from jaxddp.parity.deviation import Deviation, Statement, Value
from jaxddp.parity.diagnosis.forced.causes import OTHER_VALUES
from jaxddp.parity.diagnosis.search.decide import Hypothesis, Ruling, decide
from jaxddp.parity.fingerprints import IDS, Fingerprints, differing_share, differing_shares, identifying, together

Expectation = Callable[[int], Fingerprints | None]  # step -> what the JAX side would be given; None: not known

ONE_ENTRY = (
    "same_dropout_mask",
    "aliased_buffers",
    "neighbours_values",
)  # faults of one array of a batch, the others being right


@dataclass(frozen=True)
class SampleEvidence:
    """Examples that both sides were given.

    Attributes:
        torch, jax: fingerprints of each step's batch, shape (world_size, examples).
        steps_per_epoch: steps per epoch of the torch side; None: not known.
        restored_at: number of steps after which the JAX side was saved and restored; None: never.
    """

    torch: Sequence[Fingerprints]
    jax: Sequence[Fingerprints]
    steps_per_epoch: int | None = None
    restored_at: int | None = None


def explain_samples(evidence: SampleEvidence) -> Ruling:
    """Name the mistake in the examples.

    A hypothesis's residual is the share of examples that it leaves unexplained.
    """
    if (size := _other_size(evidence)) is not None:
        return Ruling((size,), None)
    evidence = _identified(evidence)
    hypotheses = [_tried(evidence, *hypothesis) for hypothesis in _expectations(evidence)]
    if lengths := _cut_off(evidence):
        measured = f"each replica gets {lengths[0]} examples per epoch in jax and {lengths[1]} in torch"
        hypotheses.append(
            Hypothesis((Deviation("padding_or_dropping", Statement("epoch_cut")),), 0.0, measured=measured)
        )
    return decide([hypothesis for hypothesis in hypotheses if hypothesis is not None], floor=0.0)


def _other_size(evidence: SampleEvidence) -> Hypothesis | None:
    """Return the fault that a batch has another number of examples; None: no batch has."""
    sizes = ((_size(of_jax), _size(of_torch)) for of_jax, of_torch in zip(evidence.jax, evidence.torch, strict=True))
    step, (jax, torch) = next(((n, pair) for n, pair in enumerate(sizes, 1) if pair[0] != pair[1]), (0, (0, 0)))
    if not step:
        return None
    what, values = Statement("other_batch_size", jax=jax, torch=torch), (Value(f"{jax}", f"{torch}"),)
    return Hypothesis((Deviation(OTHER_VALUES, what, values),), 0.0, measured=f"the batches of step {step}")


def _identified(evidence: SampleEvidence) -> SampleEvidence:
    """Leave out the entries that do not identify the examples of every step."""
    pairs = [identifying(*pair) for pair in zip(evidence.torch, evidence.jax, strict=True)]
    if not all(IDS in one and IDS in other for one, other in pairs):
        return evidence
    kept = set.intersection(*(set(one) for one, _ in pairs))
    torch, jax = (
        [{name: side[name] for name in side if name in kept} for side in of] for of in zip(*pairs, strict=True)
    )
    return replace(evidence, torch=torch, jax=jax)


def _tried(evidence: SampleEvidence, fault: str, what: Statement, expected: Expectation) -> Hypothesis | None:
    """Return the hypothesis that the differing entries are as expected; None if the fault cannot apply.

    A port may draw its masks by the step while its examples come from a sampler, so each entry is judged by itself.
    """
    differing = _differing_entries(evidence)
    if differing is None:
        # All entries together identify an example, so faults of a single entry cannot be seen.
        return (
            None
            if fault in ONE_ENTRY
            else _hypothesis(evidence, fault, what, expected, _share(evidence, None, expected))
        )
    one_of_several = len(differing) == 1 < len(evidence.torch[0])
    if (fault in ONE_ENTRY and len(differing) != 1) or (fault == "same_shard" and one_of_several):
        return None
    unexplained = max((_share(evidence, entry, expected) for entry in differing), default=1.0)
    what = what.but(only=differing[0]) if one_of_several else what
    return _hypothesis(evidence, fault, what, expected, unexplained)


def _hypothesis(
    evidence: SampleEvidence, fault: str, what: Statement, expected: Expectation, unexplained: float
) -> Hypothesis:
    steps = sum(expected(step) is not None for step in range(len(evidence.jax)))
    which = f"all {steps}" if steps == len(evidence.jax) else f"{steps} of {len(evidence.jax)}"
    measured = f"the examples of {which} steps are torch's with this fault, by their fingerprints"
    return Hypothesis((Deviation(fault, what),), unexplained, measured=measured)


def _expectations(evidence: SampleEvidence) -> Iterator[tuple[str, Statement, Expectation]]:
    """Yield (fault, what it does, expected examples)."""
    torch, epoch, restored_at = evidence.torch, evidence.steps_per_epoch, evidence.restored_at
    if epoch is not None:
        yield "set_epoch_missing", Statement("first_epochs_order"), lambda step: torch[step % epoch]
    if restored_at is None:  # not known: take the first step whose examples differ
        others = (step for step, examples in enumerate(evidence.jax) if differing_share(torch[step], examples))
        restored_at = next(others, 0)
    beginning = restored_at - restored_at % epoch if epoch is not None else 0

    def from_the_start(step: int) -> Fingerprints:
        return torch[step] if step < restored_at else torch[step - restored_at + beginning]

    def first_shard(step: int) -> Fingerprints:
        return {name: np.broadcast_to(ids[:1], ids.shape) for name, ids in torch[step].items()}

    if restored_at > beginning:
        yield "sampler_offset_lost", Statement("epoch_begins_again", step=restored_at + 1), from_the_start
    yield "same_shard", Statement("same_shard"), first_shard
    yield from _other_shards(evidence)
    yield from _neighbours(evidence)
    yield "same_dropout_mask", Statement("same_values"), first_shard
    yield (
        "aliased_buffers",
        Statement("next_steps_values"),
        lambda step: torch[step + 1] if step + 1 < len(torch) else None,
    )


def _other_shards(evidence: SampleEvidence) -> Iterator[tuple[str, Statement, Expectation]]:
    """Yield examples that are dealt to the replicas block by block: of each global batch, and of the epoch."""
    torch, epoch = evidence.torch, evidence.steps_per_epoch

    def of_batch(step: int) -> Fingerprints:
        return {name: _in_blocks(ids) for name, ids in torch[step].items()}

    def of_epoch(step: int) -> Fingerprints | None:
        assert epoch is not None, "asked below"
        first = step - step % epoch
        if first + epoch > len(torch):
            return None
        at = sum(_size(batch) for batch in torch[first:step])
        of_epoch = {
            name: np.concatenate([batch[name] for batch in torch[first : first + epoch]], 1) for name in torch[0]
        }
        return {name: _in_blocks(ids)[:, at : at + _size(torch[step])] for name, ids in of_epoch.items()}

    yield "shards_in_blocks", Statement("shards_in_blocks", of="batch"), of_batch
    if epoch is not None:
        yield "shards_in_blocks", Statement("shards_in_blocks", of="epoch"), of_epoch


def _in_blocks(dealt: np.ndarray) -> np.ndarray:
    """Return examples that were dealt in turn as each replica's contiguous part of them, (world_size, examples).

    >>> _in_blocks(np.array([[0, 2, 4], [1, 3, 5]])).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    return dealt.T.reshape(dealt.shape)


def _size(batch: Fingerprints) -> int:
    return next(iter(batch.values())).shape[1]


def _neighbours(evidence: SampleEvidence) -> Iterator[tuple[str, Statement, Expectation]]:
    """Yield the values of the next or the previous example of the batch, on the replicas that differ."""
    pairs = [*zip(evidence.torch, evidence.jax, strict=True)]
    shares = np.array([differing_shares(*pair) for pair in pairs]).max(axis=0)
    (replicas,) = np.nonzero(shares)
    of = () if len(replicas) == len(shares) else tuple(map(int, replicas))

    def rolled(by: int, step: int) -> Fingerprints:
        moved = {name: np.roll(ids, by, axis=1) for name, ids in evidence.torch[step].items()}
        chosen = np.isin(np.arange(len(shares)), replicas)[:, None]
        return {name: np.where(chosen, moved[name], ids) for name, ids in evidence.torch[step].items()}

    for by, which in ((-1, "next"), (1, "previous")):
        what = Statement("neighbours_values", replicas=of, of=which)
        yield "neighbours_values", what, partial(rolled, by)


def _differing_entries(evidence: SampleEvidence) -> list[str] | None:
    """Return the entries of the batch that differ at any step; None: the sides name their entries differently."""
    if any(a.keys() != b.keys() for a, b in zip(evidence.torch, evidence.jax, strict=True)):
        return None
    return [entry for entry in evidence.torch[0] if _share(evidence, entry, evidence.torch.__getitem__) > 0]


def _share(evidence: SampleEvidence, entry: str | None, expected: Expectation) -> float:
    """Return the share of examples, over all steps, whose entry is not as expected; None: all entries together."""
    shares = []
    for step, examples in enumerate(evidence.jax):
        predicted = expected(step)
        if predicted is not None and entry is not None:
            shares.append(differing_share({entry: predicted[entry]}, {entry: examples[entry]}))
        elif predicted is not None:
            shares.append(differing_share(predicted, examples))
    return float(np.mean(shares)) if shares else 1.0


def _cut_off(evidence: SampleEvidence) -> tuple[int, int] | None:
    """Return the lengths of jax's and torch's epochs if one side's examples are the other's with epochs cut short."""
    if evidence.steps_per_epoch is None:
        return None
    entries = _differing_entries(evidence) or ()
    torch = [together(batch, entries) for batch in evidence.torch]
    jax = [together(batch, entries) for batch in evidence.jax]
    if len({*map(len, torch), *map(len, jax)}) != 1:
        return None
    size = evidence.steps_per_epoch
    epochs = [np.concatenate(torch[first : first + size], 1) for first in range(0, len(torch), size)]
    length = _cut(epochs, np.concatenate(jax, 1), most=max(batch.shape[1] for batch in torch))
    return (length, epochs[0].shape[1]) if length else None


def _cut(epochs: Sequence[np.ndarray], stream: np.ndarray, most: int) -> int:
    """Return the length n such that the stream is each epoch's first n examples; 0 if there is none.

    Args:
        epochs: fingerprints, (world_size, examples) each.
        stream: fingerprints of all steps, (world_size, examples).
        most: the largest number of examples by which the length may differ from an epoch's, either way.
    """
    full = epochs[0].shape[1]
    for length in range(max(1, full - most), full + most + 1):
        if length == full or stream.shape[1] <= min(length, full):
            continue
        at, right = 0, True
        for epoch in epochs:
            piece, known = stream[:, at : at + length], epoch[:, :length]
            common = min(piece.shape[1], known.shape[1])
            right = right and np.array_equal(piece[:, :common], known[:, :common])
            at += length
        if right:
            return length
    return 0
