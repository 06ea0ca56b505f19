"""Fixes of the data and of random numbers."""

from tests.end_to_end.fixes.fix import HOLE, Fix
from tests.support.small_port import Change

# Epochs of two steps; 47 examples for 2 x 2 x 12 places.
EPOCHS = """
steps_per_epoch = 2
EXAMPLES = np.random.default_rng(5).normal(1, 1, (47, 3))

def sampler_of(rank, drop_last=False):
    return torch.utils.data.DistributedSampler(EXAMPLES, 2, rank, seed=1, drop_last=drop_last)

def nth_batch(sampler, at):
    chosen = np.array(list(sampler))[at * 12 :][:12]
    return {"x": EXAMPLES[chosen], "y": chosen % 4}

def torch_batch(step, rank):
    sampler = sampler_of(rank)
    sampler.set_epoch(step // 2)
    return nth_batch(sampler, step % 2)
"""
NO_BATCH: tuple[Change, ...] = (("def batch(", "def unused_batch("),)

FIXES = (
    Fix(
        "set_epoch_missing",
        "sampler.set_epoch(epoch)",
        "pass",
        NO_BATCH,
        f"""{EPOCHS}
def jax_batch(step, rank):
    epoch, at = divmod(step, 2)
    sampler = sampler_of(rank)
    {HOLE}
    return nth_batch(sampler, at)
""",
        steps=5,
    ),
    Fix(
        "padding_or_dropping",
        "drop_last=False",
        "drop_last=True",
        NO_BATCH,
        f"""{EPOCHS}
def jax_batch(step, rank):
    sampler = sampler_of(rank, {HOLE})
    epoch, at = divmod(step, len(sampler) // 12)
    sampler.set_epoch(epoch)
    return nth_batch(sampler, at)
""",
        steps=5,
    ),
    Fix(
        "same_shard",
        "indices[rank::world_size]",
        "indices[0::world_size]",
        NO_BATCH,
        f"""{EPOCHS}
def jax_batch(step, rank):
    world_size, both = 2, [torch_batch(step, r) for r in range(2)]
    examples = {{name: np.stack([batch[name] for batch in both], 1).reshape(24, -1) for name in ("x", "y")}}
    indices = np.arange(24)
    own = {HOLE}
    return {{"x": examples["x"][own], "y": examples["y"][own, 0]}}
""",
    ),
    Fix(
        "shards_in_blocks",
        "x[rank::world_size]",
        "x[12 * rank :][:12]",
        NO_BATCH,
        f"""{EPOCHS}
def jax_batch(step, rank):
    world_size, both = 2, [torch_batch(step, r) for r in range(2)]
    dealt = [np.stack([batch[name] for batch in both], 1).reshape(24, -1) for name in ("x", "y")]
    images, labels = [{HOLE} for x in dealt]
    return {{"x": images, "y": labels[:, 0]}}
""",
    ),
    Fix(
        "neighbours_values",
        "{name: x[chosen] for name, x in arrays.items()}",
        '{"x": arrays["x"][chosen], "y": arrays["y"][np.roll(chosen, -1)]}',
        NO_BATCH,
        f"""{EPOCHS}
def jax_batch(step, rank):
    arrays, chosen = torch_batch(step, rank), np.arange(12)
    return {HOLE}
""",
    ),
    Fix(
        "sampler_offset_lost",
        "itertools.islice(loader, consumed, None)",
        "loader",
        NO_BATCH,
        f"""{EPOCHS}
def jax_restore(state): return state
restore_at = 1

def jax_batch(step, rank):
    import itertools
    if step < restore_at:
        return torch_batch(step, rank)
    loader, consumed = (torch_batch(later, rank) for later in itertools.count()), restore_at
    return next(itertools.islice({HOLE}, step - restore_at, None))
""",
    ),
    Fix(
        "same_dropout_mask",
        "jax.random.fold_in(key, rank)",
        "jax.random.fold_in(key, 0)",
        (("def batch(", "def torch_batch("), ('batch["x"])', 'batch["x"] * batch["mask"])')),
        f"""
without_mask = torch_batch
def torch_batch(step, rank):
    from torch_ref import threefry
    key = threefry.fold_in(threefry.fold_in(threefry.key(4), step), rank)
    return without_mask(step, rank) | {{"mask": 2.0 * (threefry.bits(key, (12, 3)) % 2)}}

def jax_batch(step, rank):
    key = jax.random.fold_in(jax.random.key(4), step)
    drawn = jax.random.bits({HOLE}, (12, 3), "uint32")
    return without_mask(step, rank) | {{"mask": 2.0 * (np.asarray(drawn) % 2)}}
""",
    ),
)
