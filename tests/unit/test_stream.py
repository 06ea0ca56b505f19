"""Streams in both loaders: the same examples on each rank, and the same after a resume at any step."""

import dataclasses
import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from jaxddp import loader as jax_loader
from jaxddp.config import TrainerConfig
from jaxddp.data.order import epoch_order
from jaxddp.data.run_data import RunData, load_data
from jaxddp.data.sources.stream import Stream, is_stream, stream
from jaxddp.distributed.replicas import VirtualReplicas
from jaxddp.errors import InputError
from jaxddp.loader import Loader
from jaxddp.program import program_of
from tests.support.streams import Endless, Iterated, Late, Noisy, Stateful
from torch_ref.distributed import World
from torch_ref.loader import Loader as TorchLoader
from torch_ref.samplers import samplers
from torch_ref.train import _check_same_stream

STEPS, BATCH = 4, 12  # an epoch of 48 examples; a pass of Stateful has 37
CONFIG = TrainerConfig(steps_per_epoch=STEPS, global_batch_size=BATCH, output="run", seed=3)
KINDS: list[Any] = [Endless, Stateful, lambda: Stateful(2 * BATCH), Iterated]  # a pass may end within a batch
Batches = list[dict[str, list[Any]]]


def data_of(make: Callable[[], Any], config: TrainerConfig = CONFIG, **names: Any) -> RunData:
    return load_data(program_of({"train_data": make, **names}), config)


def loader_of(data: RunData, world_size: int = 2, ranks: Any = None, per_dispatch: int = 1, parts: int = 1) -> Loader:
    replicas = VirtualReplicas(world_size)
    replicas.local_ranks = list(range(world_size)) if ranks is None else ranks
    options: dict[str, Any] = {"steps_per_dispatch": per_dispatch, "accumulation_steps": parts, "seed": 3}
    return Loader(data.train, replicas, global_batch_size=BATCH, **options)


def in_jax(loader: Loader, epoch: int, start: int = 0) -> list[list[Batches]]:
    """Return the examples' numbers and other values: [step][rank][micro-batch]."""
    steps = []
    for batch in loader.host_batches(epoch, start):
        heads = [] if batch.head is None else [
            {k: x[:, :, i] for k, x in batch.head.items()} for i in range(batch.head["id"].shape[2])
        ]  # fmt: skip
        steps += [
            [[{n: x[rank, k].tolist() for n, x in part.items()} for part in (*heads, batch.last)]
             for rank in range(len(batch.last["id"]))]
            for k in range(batch.last["id"].shape[1])
        ]  # fmt: skip
    return steps


def in_torch(
    data: RunData, epoch: int, start: int = 0, world_size: int = 2, ranks: Any = (0,), parts: int = 1
) -> list[Batches]:
    config = dataclasses.replace(CONFIG, accumulation_steps=parts)
    loader = TorchLoader(data.train, config, world_size, list(ranks))
    return [[{k: x.tolist() for k, x in part.items()} for part in step] for step in loader.epoch(epoch, start)]


def noise(example: Any, rng: np.random.Generator) -> Any:
    return example | {"noise": rng.standard_normal()}


def numbers(steps: list[list[Batches]]) -> list[list[list[int]]]:
    return [[[i for part in rank for i in part["id"]] for rank in step] for step in steps]


@pytest.mark.parametrize(("world_size", "per_dispatch", "parts"), [(1, 1, 1), (2, 3, 2), (3, 2, 2), (4, 1, 3)])
def test_example_i_goes_to_replica_i_mod_the_world_size_in_both_frameworks(
    world_size: int, per_dispatch: int, parts: int
) -> None:
    for epoch in (0, 1):
        loader = loader_of(data_of(Endless, augment=noise), world_size, None, per_dispatch, parts)
        ours = in_jax(loader, epoch)
        order = epoch * STEPS * BATCH + np.arange(STEPS * BATCH).reshape(STEPS, -1, world_size)
        assert numbers(ours) == order.transpose(0, 2, 1).tolist()
        for rank in range(world_size):
            theirs = in_torch(data_of(Endless, augment=noise), epoch, 0, world_size, [rank], parts)
            assert [step[rank] for step in ours] == theirs
            alone = loader_of(data_of(Endless, augment=noise), world_size, [rank], per_dispatch, parts)
            assert [step[0] for step in in_jax(alone, epoch)] == theirs
    together = in_torch(data_of(Endless), 1, 0, world_size, range(world_size), parts)
    assert [i for step in together for part in step for i in part["id"]] == order.reshape(-1).tolist()


def test_dealing_by_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(order: Any, world_size: int, ranks: Any, first: int, last: int, join: bool = False) -> Any:
        return np.arange(first * world_size, last * world_size).reshape(world_size, -1)[list(ranks)]

    monkeypatch.setattr(jax_loader, "deal", blocks)
    assert [step[0] for step in in_jax(loader_of(data_of(Endless)), 0)] != in_torch(data_of(Endless), 0)


def test_a_stream_that_ends_begins_anew_and_learns_the_number_of_the_pass() -> None:
    made: list[Stateful] = []
    data = data_of(lambda: made.append(Stateful()) or made[-1])  # type: ignore[func-returns-value]
    loader = loader_of(data, world_size=1)
    read = [i for epoch in (0, 1) for step in numbers(in_jax(loader, epoch)) for i in step[0]]
    assert read == [*range(37), *range(1000, 1037), *range(2000, 2022)]
    assert made[0].epochs == [0, 1, 2] and len(made) == 1


def positions(data: RunData, per_dispatch: int) -> dict[int, Any]:
    """Return what the first of two processes notes after each dispatch: with the next batch read already."""
    notes = {}
    loader, done = loader_of(data, ranks=[0], per_dispatch=per_dispatch), 0
    for epoch in (0, 1):
        ahead = jax_loader._one_ahead(loader.host_batches(epoch))
        for batch in ahead:
            done += batch.last["id"].shape[1]
            notes[done] = json.loads(json.dumps(data.position(done)))
    return notes


@pytest.mark.parametrize("per_dispatch", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_stream_goes_on_with_the_same_examples(kind: Any, per_dispatch: int) -> None:
    expected = [step for loader in [loader_of(data_of(kind))] for epoch in (0, 1) for step in in_jax(loader, epoch)]
    notes = positions(data_of(kind), per_dispatch)
    assert list(notes) == list(range(per_dispatch, 2 * STEPS + 1, per_dispatch))
    for step, note in [*notes.items()][:-1]:
        epoch, place = divmod(step, STEPS)
        ours, theirs = data_of(kind), data_of(kind)
        for data in (ours, theirs):
            lines = data.begin(dataclasses.replace(CONFIG, resume="run"), step, note)
            assert any("examples were read and skipped" in line for line in lines) == (kind is Endless)
        assert in_jax(loader_of(ours), epoch, place) == expected[step : (epoch + 1) * STEPS]
        assert in_torch(theirs, epoch, place) == [of[0] for of in expected[step : (epoch + 1) * STEPS]]


def test_the_position_of_the_prefetched_batch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "note", lambda stream, step: stream._notes[max(stream._notes)])
    with pytest.raises(AssertionError):
        test_a_resumed_stream_goes_on_with_the_same_examples(Stateful, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_earlier_and_later_batches_can_be_asked_for(kind: Any) -> None:
    """As a rollback, the statistics of an averaged model, and the parity check do."""
    expected = [step for loader in [loader_of(data_of(kind))] for e in range(3) for step in in_jax(loader, e)]
    loader = loader_of(data_of(kind))
    for epoch, start in ((0, 1), (0, 1), (2, 3), (1, 0), (0, 0), (2, 0)):
        assert in_jax(loader, epoch, start) == expected[epoch * STEPS + start : (epoch + 1) * STEPS]
    next(jax_loader._one_ahead(loader.host_batches(1)))  # after the first batch, with another one read
    assert in_jax(loader, 1, 1) == expected[STEPS + 1 : 2 * STEPS]


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Stateful, None),
        (Iterated, None),
        (Endless, "has no state_dict; a resumed run reads it from its start, and skips what it has used"),
        (Late, "will differ: after a load_state_dict, the next example is the same again; count an example before"),
        (Noisy, "will differ: after a load_state_dict, the next example is another one"),
    ],
)
def test_a_run_says_at_its_start_whether_its_stream_resumes(kind: type, line: str | None) -> None:
    data = data_of(kind)
    loader = loader_of(data)
    loader.smallest_batch()
    lines = data.begin(CONFIG, 0, {})
    assert len(lines) == (line is not None) and (line or "") in "".join(lines)
    assert numbers(in_jax(loader, 0))[0] == [[*range(0, BATCH, 2)], [*range(1, BATCH, 2)]]
    assert "train" not in data.digests


class Failing(Stateful):
    """A stream that cannot go on."""

    def __iter__(self) -> Any:
        yield from (x for x in super().__iter__() if x["id"] < 5 or 1 // 0)


class WithObject(Stateful):
    """A stream whose state has an object."""

    def state_dict(self) -> Any:
        return {"at": [torch.zeros(2)]}


class Forgetful(Stateful):
    """A stream that cannot load its state."""

    def load_state_dict(self, state: Any) -> None:
        state["place"]


ONE, ONE_STATEFUL = Endless(), Stateful()


def one_shape() -> Any:
    return ({"x": np.zeros(1 + (i == 7))} for i in range(99))


@pytest.mark.parametrize(
    ("make", "config", "message"),
    [
        (lambda: iter([]), {}, "train_data(): has no example"),
        (lambda: ({"x": i} for i in range(20)), {}, "has no example when it is iterated again, after 20"),
        (Failing, {}, "train_data(): epoch 1: example 5: ZeroDivisionError: integer division"),
        (one_shape, {}, "train_data(): epoch 1: example 7: x is float64 (2,), of example 0 float64 (1,)"),
        (lambda: ({"x": np.nan} for _ in range(99)), {}, "train_data(): epoch 1: example 0: x is nan"),
        (lambda: ({"valid": i} for i in range(99)), {}, "train_data(): valid: is the name of padding"),
        (lambda: iter(range(99)), {}, "train_data(): epoch 1[0]: must be a dictionary or tuple of arrays, and is int"),
        (
            lambda: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(2))),
            {},
            "is a DataLoader, which gives batches; return its dataset",
        ),
        (WithObject, {}, "train_data(): state_dict()['at'][0]: is of type Tensor; must be numbers, text, lists"),
        (Forgetful, {}, "train_data(): load_state_dict: KeyError: 'place'"),
        (lambda: ONE_STATEFUL, {}, "train_data(): must return a new stream at each call"),
        (lambda: ONE, {}, "train_data(): must return a new stream at each call, to be read from its start again"),
        (Endless, {"steps_per_epoch": None}, "is a stream, whose length is not known; give --steps-per-epoch"),
        (Endless, {"data_workers": 2}, "--data-workers 2: needs examples with indices, and"),
        (Endless, {"shuffle": "index"}, "--shuffle index: needs examples with indices, and"),
        (Endless, {"join": True}, "--join: needs examples with indices, and"),
        (lambda: {"x": np.zeros(30)}, {}, "--steps-per-epoch 4: is for streams, and dict: train_data() has a length"),
    ],
)
def test_what_a_stream_cannot_do_is_one_line(make: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        data = data_of(make, dataclasses.replace(CONFIG, **config))
        data.begin(CONFIG, 0, {})
        for _ in range(2):
            list(loader_of(data).host_batches(0))
    assert "\n" not in str(caught.value)


def test_a_sampler_of_the_file_is_refused() -> None:
    with pytest.raises(InputError, match=r"^dict: sampler: needs examples with indices"):
        data_of(Endless, sampler=lambda epoch, seed, size: np.arange(size))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 6}, r"^train_data\(\): is a stream for a global batch size of 12$"),
        ({"num_workers": 2}, "^num_workers 2: needs examples with indices, and"),
        ({"sampler": lambda epoch, seed, size: np.arange(size)}, "^sampler: needs examples with indices, and"),
    ],
)
def test_a_loader_of_the_library_refuses_what_a_stream_cannot_do(options: dict[str, Any], message: str) -> None:
    source = stream(Endless, steps_per_epoch=STEPS, global_batch_size=BATCH, where="train_data()")
    with pytest.raises(InputError, match=message):
        Loader(source, VirtualReplicas(2), **{"global_batch_size": BATCH} | options)
    config = dataclasses.replace(CONFIG, global_batch_size=options.pop("global_batch_size", BATCH))
    with pytest.raises(InputError, match=message):
        TorchLoader(source, config, 2, [0], **options)


def test_ranks_must_read_the_same_stream() -> None:
    others: Any = SimpleNamespace(rank=1, broadcast_object=lambda digest: f"not {digest}")
    _check_same_stream(data_of(Endless), World())
    with pytest.raises(InputError, match=r"train_data\(\): rank 1 reads other examples than rank 0; all must read"):
        _check_same_stream(data_of(Endless), others)


def test_an_iterable_dataset_of_torchs_is_a_stream_though_it_inherits_items() -> None:
    class Torchs(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Endless())

        def __len__(self) -> int:
            return 7

    sized = torch.utils.data.TensorDataset(torch.zeros(3))
    assert is_stream(Torchs()) and not is_stream(sized) and not is_stream("text") and not is_stream(np.zeros(2))
    assert numbers(in_jax(loader_of(data_of(Torchs)), 0))[0][1] == [1, 3, 5, 7, 9, 11]


class Dataset:
    """Indexed like a dataset of Hugging Face's, with the class name of torch's abstract one, and an iterator."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < 24:
            raise IndexError(index)
        return {"x": [float(index), 1.0], "y": index % 4}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]

    def __iter__(self) -> Any:
        return map(self.__getitem__, range(24))


class TokenDataLoader(Endless):
    """A stream of examples that is called like torch's loader of batches."""


def check_indexed(make: Any) -> None:
    config = dataclasses.replace(CONFIG, steps_per_epoch=None)
    data = load_data(program_of({"train_data": make}), config)
    assert not is_stream(make()) and data.stream is None and len(data.train) == 24
    assert data.train.take(np.array([5, 2]), 0)["y"].tolist() == [1, 2]


def test_a_class_counts_by_what_it_has_and_not_by_its_name() -> None:
    check_indexed(Dataset)
    assert is_stream(TokenDataLoader()) and data_of(TokenDataLoader).stream is not None


@pytest.mark.large
def test_a_dataset_of_hugging_face_has_a_length() -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"x": [Dataset()[i]["x"] for i in range(24)], "y": [Dataset()[i]["y"] for i in range(24)]}
    check_indexed(lambda: datasets.Dataset.from_dict(columns))
    check_indexed(lambda: datasets.Dataset.from_dict(columns).with_format("numpy"))
    assert is_stream(datasets.Dataset.from_dict(columns).to_iterable_dataset())


def test_orders_of_long_epochs_take_no_memory_and_torchs_shuffle_names_the_one_that_does() -> None:
    config = dataclasses.replace(CONFIG, steps_per_epoch=2**30)
    data = data_of(Endless, config)
    assert loader_of(data).examples_per_epoch == 2**30 * BATCH
    assert len(samplers(range(2**40), config, 2, None, streamed=True)[0]) == 2**39
    with pytest.raises(InputError, match=r"must be from 0 to 214748363; --shuffle index takes more examples$"):
        epoch_order(3 * 10**8, True, 0, 0)


def test_names_of_a_namespace_may_be_streams() -> None:
    program = program_of(SimpleNamespace(train_data=Endless, steps_per_epoch=7, epochs=2))
    assert program.defaults == {"steps_per_epoch": 7, "epochs": 2}
