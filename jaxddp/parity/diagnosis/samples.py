"""Which examples a replica gets: mistakes of samplers, told from the examples' fingerprints alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxddp.parity.diagnosis.search import Hypothesis, Ruling, decide

Of = Mapping[str, np.ndarray]  # entry of the batch -> fingerprints, (W, examples)


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
    hypotheses = [
        Hypothesis((fault,), says, _unexplained(evidence, expected))
        for fault, says, expected in _expectations(evidence)
    ]
    if _cut_off(evidence):
        says = "the examples at the end of an epoch: cut off on one side, filled up on the other"
        hypotheses.append(Hypothesis(("padding_or_dropping",), says, 0.0))
    return decide(hypotheses, floor=0.0)


def same(a: Of, b: Of) -> bool:
    """Whether two batches hold the same examples, in the same order."""
    return _differing(a, b) == 0


def differing_share(a: Of, b: Of) -> float:
    """The share of examples, over all replicas, that are not the same."""
    return _differing(a, b)


def _expectations(evidence: SampleEvidence) -> Iterator[tuple[str, str, Callable[[int], Of | None]]]:
    """(fault, what it says, step -> what the JAX side would be given; None: cannot be told)."""
    torch, epoch, restored_at = evidence.torch, evidence.steps_per_epoch, evidence.restored_at
    if epoch is not None:
        yield "set_epoch_missing", "every epoch comes in the order of the first", lambda step: torch[step % epoch]
    if restored_at is not None:
        start = restored_at - restored_at % epoch if epoch is not None else 0

        def from_the_start(step: int) -> Of | None:
            return torch[step] if step < restored_at else torch[step - restored_at + start]

        says = f"after the restore at step {restored_at} the epoch is read from its beginning"
        yield "sampler_offset_lost", says, from_the_start

    def first_shard(step: int) -> Of:
        return {name: np.broadcast_to(ids[:1], ids.shape) for name, ids in torch[step].items()}

    yield "same_shard", "every replica gets the examples of replica 0", first_shard
    for entry in torch[0] if len(torch[0]) > 1 else []:

        def shared(step: int, entry: str = entry) -> Of:
            return {**torch[step], entry: first_shard(step)[entry]}

        yield "same_dropout_mask", f'every replica has the "{entry}" of replica 0, and examples of its own', shared

        def next_ones(step: int, entry: str = entry) -> Of | None:
            return {**torch[step], entry: torch[step + 1][entry]} if step + 1 < len(torch) else None

        says = f'the "{entry}" of every step is that of the next: the array was written again before it was read'
        yield "aliased_buffers", says, next_ones


def _unexplained(evidence: SampleEvidence, expected: Callable[[int], Of | None]) -> float:
    """The share of examples, over all steps, that the expectation does not meet."""
    shares = []
    for step, found in enumerate(evidence.jax):
        predicted = expected(step)
        shares.append(0.0 if predicted is None else _differing(predicted, found))
    return float(np.mean(shares))


def _differing(a: Of, b: Of) -> float:
    if a.keys() != b.keys():  # other names: an example is all of its entries together
        a, b = {"": _together(a)}, {"": _together(b)}
    if any(a[name].shape != b[name].shape for name in a):
        return 1.0
    return float(np.mean(np.logical_or.reduce([a[name] != b[name] for name in a])))


def _together(of: Of) -> np.ndarray:
    return np.add.reduce(list(of.values()))


def _cut_off(evidence: SampleEvidence) -> bool:
    """Whether each replica's stream of examples is the other side's with the ends of epochs cut off."""
    if evidence.steps_per_epoch is None:
        return False
    torch = [_together(of) for of in evidence.torch]
    jax = [_together(of) for of in evidence.jax]
    if len({*map(len, torch), *map(len, jax)}) != 1:
        return False
    epochs = [
        np.concatenate(torch[i : i + evidence.steps_per_epoch], 1)
        for i in range(0, len(torch), evidence.steps_per_epoch)
    ]
    return _cut(epochs, np.concatenate(jax, 1))


def _cut(epochs: Sequence[np.ndarray], stream: np.ndarray) -> bool:
    """Whether the stream is made of the epochs' beginnings, with the same number missing or added at each end."""
    full = epochs[0].shape[1]
    for length in range(max(1, full // 2), full + full // 2 + 1):
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
