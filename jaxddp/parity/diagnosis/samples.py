"""Which examples a replica gets: mistakes of samplers, told from the examples' fingerprints alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxddp.parity.diagnosis.decide import Hypothesis, Ruling, decide
from jaxddp.parity.fingerprints import differing_share, together

Of = Mapping[str, np.ndarray]  # entry of the batch -> fingerprints, (W, examples)
Expectation = Callable[[int], Of | None]

ONE_ENTRY = ("same_dropout_mask", "aliased_buffers")  # faults of one array of a batch, the others being right


@dataclass(frozen=True)
class SampleEvidence:
    """What both sides were given.

    Attributes:
        torch, jax: one per step.
        steps_per_epoch: of the torch side; None: not known.
        restored_at: after how many steps the JAX side was saved and restored; None: never.
    """

    torch: Sequence[Of]
    jax: Sequence[Of]
    steps_per_epoch: int | None = None
    restored_at: int | None = None


def explain_samples(evidence: SampleEvidence) -> Ruling:
    """Name what is wrong with the examples; a residual is the share of examples that it leaves unexplained."""
    hypotheses = [_tried(evidence, *hypothesis) for hypothesis in _expectations(evidence)]
    if _cut_off(evidence):
        says = "the examples at the end of an epoch: cut off on one side, filled up on the other"
        hypotheses.append(Hypothesis(("padding_or_dropping",), says, 0.0))
    return decide([hypothesis for hypothesis in hypotheses if hypothesis is not None], floor=0.0)


def _tried(evidence: SampleEvidence, fault: str, says: str, expected: Expectation) -> Hypothesis | None:
    """The hypothesis that some entries of the batch are as expected, and the others as they should be.

    A port may draw its masks by the step while its examples come by a sampler, so each entry is looked at by itself.
    """
    if any(a.keys() != b.keys() for a, b in zip(evidence.torch, evidence.jax, strict=True)):
        # An example is all of its entries then, and no fault of one of them can be told.
        return None if fault in ONE_ENTRY else Hypothesis((fault,), says, _share(evidence, None, expected))
    stay = {entry: _share(evidence, entry, evidence.torch.__getitem__) for entry in evidence.torch[0]}
    moved = [entry for entry, share in stay.items() if share > 0]
    if (fault in ONE_ENTRY and len(moved) != 1) or (fault == "same_shard" and len(moved) == 1 < len(stay)):
        return None
    unexplained = max((_share(evidence, entry, expected) for entry in moved), default=1.0)
    which = f' (the "{moved[0]}" alone)' if len(moved) == 1 < len(stay) else ""
    return Hypothesis((fault,), says + which, unexplained)


def _expectations(evidence: SampleEvidence) -> Iterator[tuple[str, str, Expectation]]:
    """(fault, what it says, step -> what the JAX side would be given; None: cannot be told)."""
    torch, epoch, restored_at = evidence.torch, evidence.steps_per_epoch, evidence.restored_at
    if epoch is not None:
        yield "set_epoch_missing", "every epoch comes in the order of the first", lambda step: torch[step % epoch]
    if restored_at is None:  # nobody said when, so where the first other examples come
        others = (step for step, found in enumerate(evidence.jax) if differing_share(torch[step], found))
        restored_at = next(others, 0)
    beginning = restored_at - restored_at % epoch if epoch is not None else 0

    def from_the_start(step: int) -> Of:
        return torch[step] if step < restored_at else torch[step - restored_at + beginning]

    def first_shard(step: int) -> Of:
        return {name: np.broadcast_to(ids[:1], ids.shape) for name, ids in torch[step].items()}

    if restored_at > beginning:
        says = f"from step {restored_at + 1} on, the epoch is read from its beginning again"
        yield "sampler_offset_lost", says, from_the_start
    yield "same_shard", "every replica gets the examples of replica 0", first_shard
    yield "same_dropout_mask", "every replica has what replica 0 has", first_shard
    says = "every step has what belongs to the next: the array was written again before it was read"
    yield "aliased_buffers", says, lambda step: torch[step + 1] if step + 1 < len(torch) else None


def _share(evidence: SampleEvidence, entry: str | None, expected: Expectation) -> float:
    """The share of examples, over all steps, of which the entry is not as expected; None: all entries together."""
    shares = []
    for step, found in enumerate(evidence.jax):
        predicted = expected(step)
        if predicted is not None and entry is not None:
            shares.append(differing_share({entry: predicted[entry]}, {entry: found[entry]}))
        elif predicted is not None:
            shares.append(differing_share(predicted, found))
    return float(np.mean(shares)) if shares else 1.0


def _cut_off(evidence: SampleEvidence) -> bool:
    """Whether each replica's stream of examples is the other side's with the ends of epochs cut off."""
    if evidence.steps_per_epoch is None:
        return False
    moved = _moved(evidence)
    torch = [together(of, moved) for of in evidence.torch]
    jax = [together(of, moved) for of in evidence.jax]
    if len({*map(len, torch), *map(len, jax)}) != 1:
        return False
    size = evidence.steps_per_epoch
    epochs = [np.concatenate(torch[first : first + size], 1) for first in range(0, len(torch), size)]
    return _cut(epochs, np.concatenate(jax, 1), most=max(of.shape[1] for of in torch))


def _moved(evidence: SampleEvidence) -> list[str]:
    """The entries that are not as they should be throughout; none if the sides have other names for them."""
    if any(a.keys() != b.keys() for a, b in zip(evidence.torch, evidence.jax, strict=True)):
        return []
    return [entry for entry in evidence.torch[0] if _share(evidence, entry, evidence.torch.__getitem__) > 0]


def _cut(epochs: Sequence[np.ndarray], stream: np.ndarray, most: int) -> bool:
    """Whether the stream is made of the epochs' beginnings, the same number, at most a batch, missing or added."""
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
            return True
    return False
