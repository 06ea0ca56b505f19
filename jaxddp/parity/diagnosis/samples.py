"""Find mistakes of samplers and loaders from the fingerprints of the examples that each side was given."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxddp.parity.diagnosis.decide import Hypothesis, Ruling, decide
from jaxddp.parity.fingerprints import Fingerprints, differing_share, together

Expectation = Callable[[int], Fingerprints | None]  # step -> what the JAX side would be given; None: not known

ONE_ENTRY = ("same_dropout_mask", "aliased_buffers")  # faults of one array of a batch, the others being right


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
    hypotheses = [_tried(evidence, *hypothesis) for hypothesis in _expectations(evidence)]
    if lengths := _cut_off(evidence):
        says = "the examples at the end of an epoch: cut off on one side, filled up on the other"
        measured = f"each replica gets {lengths[0]} examples per epoch in jax and {lengths[1]} in torch"
        hypotheses.append(Hypothesis(("padding_or_dropping",), says, 0.0, measured=measured))
    return decide([hypothesis for hypothesis in hypotheses if hypothesis is not None], floor=0.0)


def _tried(evidence: SampleEvidence, fault: str, says: str, expected: Expectation) -> Hypothesis | None:
    """Return the hypothesis that the differing entries are as expected; None if the fault cannot apply.

    A port may draw its masks by the step while its examples come from a sampler, so each entry is judged by itself.
    """
    differing = _differing_entries(evidence)
    if differing is None:
        # All entries together identify an example, so faults of a single entry cannot be seen.
        return None if fault in ONE_ENTRY else _hypothesis(evidence, fault, says, _share(evidence, None, expected))
    one_of_several = len(differing) == 1 < len(evidence.torch[0])
    if (fault in ONE_ENTRY and len(differing) != 1) or (fault == "same_shard" and one_of_several):
        return None
    unexplained = max((_share(evidence, entry, expected) for entry in differing), default=1.0)
    which = f' (the "{differing[0]}" alone)' if one_of_several else ""
    return _hypothesis(evidence, fault, says + which, unexplained)


def _hypothesis(evidence: SampleEvidence, fault: str, says: str, unexplained: float) -> Hypothesis:
    measured = f"the examples of all {len(evidence.jax)} steps are torch's with this fault, by their fingerprints"
    return Hypothesis((fault,), says, unexplained, measured=measured)


def _expectations(evidence: SampleEvidence) -> Iterator[tuple[str, str, Expectation]]:
    """Yield (fault, line that describes it, expected examples)."""
    torch, epoch, restored_at = evidence.torch, evidence.steps_per_epoch, evidence.restored_at
    if epoch is not None:
        yield "set_epoch_missing", "every epoch has the order of the first", lambda step: torch[step % epoch]
    if restored_at is None:  # not known: take the first step whose examples differ
        others = (step for step, examples in enumerate(evidence.jax) if differing_share(torch[step], examples))
        restored_at = next(others, 0)
    beginning = restored_at - restored_at % epoch if epoch is not None else 0

    def from_the_start(step: int) -> Fingerprints:
        return torch[step] if step < restored_at else torch[step - restored_at + beginning]

    def first_shard(step: int) -> Fingerprints:
        return {name: np.broadcast_to(ids[:1], ids.shape) for name, ids in torch[step].items()}

    if restored_at > beginning:
        says = f"from step {restored_at + 1} on, the epoch is read from its beginning again"
        yield "sampler_offset_lost", says, from_the_start
    yield "same_shard", "every replica gets the examples of replica 0", first_shard
    yield "same_dropout_mask", "every replica has replica 0's values", first_shard
    says = "every step has the next step's values: the array was overwritten before it was read"
    yield "aliased_buffers", says, lambda step: torch[step + 1] if step + 1 < len(torch) else None


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
