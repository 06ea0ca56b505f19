"""Faults of data and randomness."""

from jaxddp.parity.catalogue.fault import Fault

FAULTS: dict[str, Fault] = {
    "set_epoch_missing": Fault(
        "every epoch has the order of the first",
        "call sampler.set_epoch(epoch) before each epoch, or draw the order from (seed, epoch)",
        "pytorch/pytorch#31771",
    ),
    "padding_or_dropping": Fault(
        "the end of an epoch is dropped where the reference pads it, or vice versa",
        "use the same drop_last in the samplers of both sides: drop_last=False pads, as torch's "
        "DistributedSampler does by default",
        "pytorch/pytorch#25162",
    ),
    "same_shard": Fault(
        "every replica gets the same examples", "give each replica its own examples: indices[rank::world_size]"
    ),
    "shards_in_blocks": Fault(
        "each replica gets a contiguous part of the examples; torch's DistributedSampler deals them out in turn",
        "deal the examples out in turn: indices[rank::world_size], and of a global batch x[rank::world_size]",
    ),
    "neighbours_values": Fault(
        "an entry of the batch has the values of the neighbouring example",
        "take all entries of an example by one index: {name: x[chosen] for name, x in arrays.items()}",
    ),
    "sampler_offset_lost": Fault(
        "a resumed run reads its epoch from the beginning again",
        "skip the batches consumed before the checkpoint: itertools.islice(loader, consumed, None)",
        "huggingface/accelerate#4071",
    ),
    "same_dropout_mask": Fault(
        "every replica draws the same random mask",
        "fold the rank of the replica into the key: jax.random.fold_in(key, rank), with rank = "
        "jax.lax.axis_index(axis_name)",
        "facebookresearch/detr#297",
    ),
}
