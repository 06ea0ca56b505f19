"""Mutants of jaxddp and torch_ref: common faults, planted in the source of the two packages.

`python -m benchmarks.scoreboard --parts mutants` plants them one by one; a test must fail on each.
A fault that the parity check's catalogue has bears the same name here.
"""

from benchmarks.scoreboard.mutants import Mutant

STEP = "tests/unit/step/test_replica_step.py -k loss_normalization"

MEAN = "return jax.tree.map(lambda total: total / world_size(), _sum(tree))"
GRADIENTS = "reduced, comm_state = self.reduce(state, local, denominator, shares)"
MICRO_BATCH = "examples = self.differentiate(state, before.buffers, micro_batch, before.examples, pieces)"
CLIP = "clipped, step_metrics[TOTAL_NORM] = strategy.clip(hooked, self.clip_grad_norm)"
BODY = """\
    def body(state: TrainState, batch: MicroBatches) -> tuple[TrainState, StepSums]:
        next_state, metrics, _ = step(state, batch)
"""
STALE_BODY = """\
    first = state.params

    def body(state: TrainState, batch: MicroBatches) -> tuple[TrainState, StepSums]:
        stale, metrics, _ = step(TrainState(state.step, first, state.buffers, state.opt_state), batch)
        params = jax.tree.map(lambda now, new, old: now + new - old, state.params, stale.params, first)
        next_state = TrainState(stale.step, params, stale.buffers, stale.opt_state)
"""
RUNNING_MEAN = "(1 - self.momentum) * self.mean[...] + self.momentum * mean"
VARIANCE = "jnp.sum(self._counted(jnp.square(x - _per_channel(mean, x))), axes)) / count"
CROSS_ENTROPY = "optax.softmax_cross_entropy_with_integer_labels(wide, labels)"
SMOOTHED = "optax.softmax_cross_entropy(wide, optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), 0.1))"

# (file, tests) -> name -> (old, new).
FAULTS: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    # Loss, reduction and replicas
    ("jaxddp/distributed/collectives.py", STEP): {
        "sum_not_mean": (MEAN, "return _sum(tree)"),
        "averaged_twice": (MEAN, MEAN.replace("world_size()", "world_size() ** 2")),
        "compressed_all_reduce": (
            MEAN,
            "return jax.tree.map(lambda x: (_sum(x.astype(jnp.bfloat16)) / world_size()).astype(x.dtype), tree)",
        ),
    },
    ("jaxddp/distributed/collectives.py", "tests/unit/distributed/test_collectives.py"): {
        "integer_pieces_too_wide": ("min(dtype.itemsize, carrier.itemsize // 2) >= 2", "dtype.itemsize >= 2")
    },
    ("jaxddp/step/replica_step.py", STEP): {
        "no_sync": (GRADIENTS, "reduced, comm_state = divide(local.gradients, denominator), ()"),
        "accumulation_not_divided": ("return local.denominator  #", "return jnp.ones_like(local.denominator)  #"),
        "mean_per_rank": ("return all_reduce_mean(local.denominator)", "return local.denominator"),
    },
    ("jaxddp/step/local_gradients.py", STEP): {
        "collective_in_loss": (
            'return sums["loss"] / sums["count"], jnp',
            'return lax.psum(sums["loss"] / sums["count"], "replica"), jnp',
        ),
        "normalizations_swapped": (
            'if self.loss_normalization == "global":\n            return sums["loss"]',
            'if self.loss_normalization == "ddp":\n            return sums["loss"]',
        ),
    },
    ("jaxddp/step/local_gradients.py", "tests/unit/step/test_uneven.py -k ignored_labels"): {
        "nan_loss_hidden": ('sums["count"], jnp', 'jnp.maximum(sums["count"], 1), jnp')
    },
    ("jaxddp/step/replica_step.py", "tests/unit/step/test_replica_step.py -k clipping"): {
        "clipped_before_mean": (
            CLIP,
            f"{CLIP.replace('hooked', 'divide(local.gradients, denominator)')}\n"
            "            clipped = all_reduce_mean(clipped)",
        ),
        "clip_norm_local": (
            CLIP,
            "norm = optax.tree.norm(divide(local.gradients, denominator))\n"
            "            factor = jnp.minimum(1, self.clip_grad_norm / (norm + 1e-6))\n"
            "            clipped = jax.tree.map(lambda g: factor * g, gradients)",
        ),
    },
    ("jaxddp/step/buffers.py", "tests/unit/step/test_replica_step.py -k rank_0 or virtual_replicas"): {
        "buffers_local": ("return broadcast(buffers, src=0 if", "return buffers if True else (0 if"),
        "buffers_of_rank_1": ("src=0 if source", "src=1 if source"),
    },
    ("jaxddp/step/local_gradients.py", "tests/unit/step/test_replica_step.py -k one_all_reduce"): {
        "synchronised_early": (MICRO_BATCH, f'{MICRO_BATCH}\n        result = lax.pmean(result, "replica")')
    },
    ("jaxddp/step/replica_step.py", "tests/unit/test_data_parallel.py -k changes_no_bit"): {
        "stale_parameters": (BODY, STALE_BODY)
    },
    ("jaxddp/distributed/replicas.py", "tests/unit/test_data_parallel.py -k donation or copies"): {
        "aliased_buffers": ("np.array(leaf)", "leaf")
    },
    ("jaxddp/distributed/verify.py", "tests/unit/distributed/test_verify.py"): {
        "drift_unseen": ("prints != prints[references, np.arange(len(references))]", "prints != prints")
    },
    # Optimizer, schedule and checkpoint
    ("jaxddp/optim/optimizers.py", "tests/unit/optim/test_optimizers.py"): {
        "coupled_decay": ("decoupled_weight_decay=True)", "decoupled_weight_decay=False)"),
        "decay_value": ("weight_decay: float = 1e-2", "weight_decay: float = 1e-4"),
        "decay_mask": (
            "optax.add_decayed_weights(weight_decay)",
            "optax.add_decayed_weights(weight_decay, lambda params: jax.tree.map(lambda p: p.ndim > 1, params))",
        ),
        "eps_value": ("eps: float = 1e-10", "eps: float = 1e-7"),
        "nesterov": ("trace(momentum, dampening, nesterov)", "trace(momentum, dampening)"),
        "rmsprop_decay": ("alpha: float = 0.99", "alpha: float = 0.9"),
        "rmsprop_centred": ("scale_by_stddev if centered else", "scale_by_rms if centered else"),
        "adagrad_accumulator": ("initial_accumulator_value: float = 0.0", "initial_accumulator_value: float = 0.1"),
    },
    ("jaxddp/optim/optimizers.py", "tests/unit/optim/test_clipping.py"): {
        "clip_epsilon": ("jnp.minimum(1, max_norm / (norm + 1e-6))", "jnp.minimum(1, max_norm / norm)")
    },
    ("jaxddp/optim/transforms.py", "tests/unit/optim/test_optimizers.py"): {
        "eps_in_root": ("(jnp.sqrt(w / rest2) + eps)", "jnp.sqrt(w / rest2 + eps**2)"),
        "no_bias_correction": ("(m / rest1 / (", "(m / ("),
        "betas": ("(0.9, 0.999)", "(0.9, 0.99)"),
        "decay_without_lr": (
            "optax.chain(*parts, optax.scale_by_learning_rate(lr))",
            "optax.chain(rescale, optax.scale_by_learning_rate(lr), optax.add_decayed_weights(-weight_decay))",
        ),
        "dampening": ("jnp.where(state.steps == 0, 1.0, 1 - dampening)", "1 - dampening"),
    },
    ("jaxddp/optim/plateau.py", "tests/unit/optim/test_plateau.py"): {
        "patience": ("bad > self.patience", "bad >= self.patience"),
        "cooldown": ("better | resting", "better"),
        "nan_improves": ("metric < bound if", "~(metric >= bound) if"),
        "min_lr": ("jnp.maximum(rate * self.factor, least)", "rate * self.factor"),
    },
    ("jaxddp/optim/groups.py", "tests/unit/optim/test_groups.py"): {
        "frozen_learn": ("(*frozen, *self.frozen(names))", "tuple(frozen)"),
    },
    ("jaxddp/optim/groups.py", "tests/unit/optim/test_groups.py -k paths"): {
        "flax_names": ("first_match(groups, names(path))", "first_match(groups, path)"),
    },
    ("jaxddp/step/moving_average.py", "tests/unit/step/test_swa.py"): {
        "swa_count": ("(average.n_averaged + 1).astype", "(average.n_averaged + 2).astype"),
        "swa_start": ("average.n_averaged == 0", "average.n_averaged < 0"),
    },
    ("jaxddp/step/batch_statistics.py", "tests/unit/step/test_swa.py"): {
        "bn_momentum": ("layer.momentum = 1.0 if", "layer.momentum = 0.5 if"),
        "bn_padding": ("jnp.zeros_like(x) if name in statistics else x for", "x for"),
    },
    ("jaxddp/step/zero.py", "tests/unit/optim/test_groups.py -k sgd"): {
        "one_vector": ("layout_of(params, self.group_of or (lambda name: 0))", "layout_of(params, lambda name: 0)"),
    },
    ("jaxddp/optim/schedules.py", "tests/unit/optim/test_schedules.py"): {
        "lr_off_by_one": ("(jnp.asarray(count) // step_size)", "((count + 1) // step_size)")
    },
    ("jaxddp/checkpoint/checkpoints.py", "tests/unit/checkpoint/test_checkpoints.py -k comes_back"): {
        "resume_lost_state": (
            "return TrainState(**tree)",
            'return TrainState(**tree | {"opt_state": expected["opt_state"]})',
        )
    },
    # Data
    ("jaxddp/data/sampler.py", "tests/unit/data/test_sampler.py"): {
        "padding_or_dropping": ("num_replicas if drop_last else", "num_replicas if not drop_last else"),
    },
    ("jaxddp/data/order.py", "tests/unit/data/test_sampler.py"): {
        "set_epoch_missing": ("Permutation(Generator(seed + epoch)", "Permutation(Generator(seed)"),
        "contiguous_shards": (
            "np.arange(first, last) * num_replicas + np.array(ranks, np.int64)[:, None]",
            "np.arange(first, last) + last * np.array(ranks, np.int64)[:, None]",
        ),
    },
    ("jaxddp/data/sources/source.py", "tests/unit/test_loader_sources.py"): {
        "augmented_alike_each_epoch": ("generator(self.seed, epoch, index)", "generator(self.seed, 0, index)"),
        "augmented_by_place": ("generator(self.seed, epoch, index)", "generator(self.seed, epoch, len(examples))"),
    },
    ("jaxddp/loader.py", "tests/unit/test_loader.py"): {
        "epoch_ignored": ("self._seed, epoch, self._sampler", "self._seed, 0, self._sampler"),
        "same_shard": ("self._replicas.world_size, self._replicas.local_ranks", "self._replicas.world_size, [0] * 9"),
        "sampler_offset_lost": ("in self._dispatches(start_step)", "in self._dispatches(0)"),
    },
    ("jaxddp/step/evaluate.py", "tests/unit/step/test_evaluate.py -k counts_once or padding"): {
        "padding_counted": ("valid = (places < size)", "valid = (places >= 0)")
    },
    ("jaxddp/data/torch_rng.py", "tests/unit/data/test_torch_rng.py"): {
        "shuffled_otherwise": ("% (len(self) - places)", "% len(self)"),
        "swaps_out_of_turn": ("shared[partners[near] - done] = True", "pass"),
        "drawn_otherwise": ("bound = 1 / math.sqrt(fan_in)", "bound = 1 / fan_in"),
    },
    # Model, and the parity check
    ("jaxddp/nn/layers.py", "tests/unit/nn/test_layers.py -k batch_norm or large_mean or twins"): {
        "batch_norm_momentum": (RUNNING_MEAN, "self.momentum * self.mean[...] + (1 - self.momentum) * mean"),
        "biased_variance": ("lax.stop_gradient(var * count / (count - 1))", "lax.stop_gradient(var)"),
        "batch_norm_sync": ("all_reduce if self.sync else (lambda sums: sums)", "lambda sums: sums"),
        "fast_variance": (VARIANCE, "jnp.sum(jnp.square(x), axes)) / count - jnp.square(mean)"),
        "norm_epsilon": ("eps: float = 1e-5", "eps: float = 1e-6"),
    },
    ("jaxddp/nn/layers.py", "tests/unit/nn/test_layers.py -k conv_equals or linear_equals"): {
        "same_padding": ("padding=[(padding, padding)] * len(kernel_size)", 'padding="SAME" if padding else "VALID"'),
        "layout": ("_value(weight.T)", "_value(weight)"),
    },
    ("jaxddp/nn/losses.py", STEP): {
        "ignore_index": ("counts = labels != IGNORE_INDEX", "counts = labels == labels"),
        "label_smoothing": (CROSS_ENTROPY, SMOOTHED),
    },
    ("jaxddp/data_parallel.py", "tests/unit/nn/test_model_tree.py -k data_parallel"): {
        "flat_tree": ("seeing(self.functional.param_tree, optimizer)", "optimizer")
    },
    ("jaxddp/parity/torch_side/rank_recorder.py", "tests/unit/parity/test_excerpts.py -k torchs"): {
        "another_excerpt": ("[::apart].reshape(-1, *(1,)", "[1::apart].reshape(-1, *(1,)")
    },
    ("jaxddp/parity/compare/judge.py", "tests/unit/parity/compare/test_judge.py -k zeros"): {
        "zeros_accepted": ("not in torch and not np.any(jax", "not in torch or not np.any(jax")
    },
    ("jaxddp/parity/convert/layouts.py", "tests/unit/parity/convert/test_converter.py -k layers or transposed"): {
        "converter_layout": ("lambda x: x.T.reshape(jax)", "lambda x: x.reshape(jax)"),
        "kernel_not_flipped": ("np.moveaxis(np.flip(x, axes), first, last)", "np.moveaxis(x, first, last)"),
    },
    # torch_ref
    ("torch_ref/data_parallel.py", "tests/unit/torch_ref/test_train.py"): {
        "torch_sum_not_mean": ("parameter.grad /= self._world.world_size", "pass"),
        "torch_buffers_local": ("if self._buffers_differ:", "if False:"),
    },
    ("torch_ref/step.py", "tests/unit/torch_ref/test_train.py"): {
        "torch_accumulation_not_divided": (' / sums["count"] / nonempty', ' / sums["count"]'),
        "torch_synchronised_early": ("if number == len(micro_batches) else no_sync(model)", "if True else None"),
    },
    ("torch_ref/step.py", "tests/equivalence/test_features.py -k schedule and sgd"): {
        "torch_scheduler_too_fast": ("        scheduler.step()\n", "        scheduler.step(), scheduler.step()\n")
    },
    ("torch_ref/loader.py", "tests/unit/torch_ref/test_parts.py -k loader"): {
        "torch_set_epoch_missing": ("self._sampler.set_epoch(epoch)", "pass"),
        "torch_resumes_at_the_start": ("self._sampler.start = sum(", "self._sampler.start = 0 * sum("),
    },
}


def arguments(tests: str) -> tuple[str, ...]:
    """Return pytest's arguments of "files" or "files -k expression"."""
    files, *expression = tests.split(" -k ")
    return (*files.split(), *(["-k", *expression] if expression else []))


MUTANTS = [
    Mutant(name, file, old, new, arguments(tests))
    for (file, tests), faults in FAULTS.items()
    for name, (old, new) in faults.items()
]
