"""The faults that the diagnosis knows by name: what the JAX side does, and what to write instead.

Each was met by somebody; `thread` is where. A port with one of these faults is called different,
and the fault is named if a replay of the reference with it reproduces what the port does.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """One kind of mistake.

    Attributes:
        title: what the JAX side does.
        fix: what would be right.
        thread: where somebody met it, as owner/repository#number.
    """

    title: str
    fix: str
    thread: str = ""


FAULTS: dict[str, Fault] = {
    # Reduction and synchronisation
    "sum_not_mean": Fault(
        "gradients are summed over the replicas instead of averaged",
        "jax.lax.pmean where there is jax.lax.psum",
        "TianhongDai/hindsight-experience-replay#4",
    ),
    "check_vma": Fault(
        "shard_map sums the gradients of replicated parameters by itself, and they are reduced once more",
        "shard_map(..., check_vma=False), or differentiate the pmean of the loss and reduce nothing else",
        "jax-ml/jax#3970",
    ),
    "collective_in_loss": Fault(
        "a collective inside the differentiated loss: grad(psum(loss)) is N times the local gradient",
        "differentiate the local loss, then average the gradients",
        "jax-ml/jax#3970",
    ),
    "no_sync": Fault(
        "gradients are not averaged over the replicas, and each goes its own way",
        "gradients = jax.lax.pmean(gradients, axis_name) before the optimizer",
        "pytorch/pytorch#104336",
    ),
    "averaged_twice": Fault(
        "gradients are divided by the number of replicas twice",
        "divide once: pmean, or psum and / N",
        "NVIDIA/apex#696",
    ),
    "local_device_count": Fault(
        "the sum over all replicas is divided by the number of one host's devices",
        "divide by the world size: jax.device_count(), or pmean",
    ),
    "accumulation_not_divided": Fault(
        "the micro-batches' gradients are added and not divided by their number",
        "divide the loss of each by accumulation_steps",
    ),
    "synchronised_early": Fault(
        "gradients are averaged before the last micro-batch is added",
        "accumulate locally, average once, after the last",
        "huggingface/accelerate#1726",
    ),
    "mean_per_micro_batch": Fault(
        "each micro-batch's loss is a mean over its own tokens, however few they are",
        "sum the losses, and divide by the number of tokens of the whole step",
        "huggingface/transformers#34191",
    ),
    "mean_per_rank": Fault(
        "each rank's loss is a mean over its own tokens, however few they are",
        "divide by the number of tokens of all ranks",
        "huggingface/transformers#34242",
    ),
    "global_mean": Fault(
        "one mean over the tokens of all ranks, where the reference takes the mean of the ranks' means",
        "divide by each rank's own number, as torch DDP does; or let the reference divide by all",
        "huggingface/transformers#34242",
    ),
    "auxiliary_loss_scaled": Fault(
        "the factor that normalises the tokens' loss is applied to an auxiliary loss too",
        "scale each term by itself",
        "huggingface/transformers#48706",
    ),
    "clipped_before_mean": Fault(
        "each replica clips its own gradient, before the mean",
        "average, then clip",
        "tensorflow/tensorflow#25806",
    ),
    "clip_norm_local": Fault(
        "the norm that decides on clipping is not that of the averaged gradient",
        "take the norm of the averaged gradient, once",
        "pytorch/pytorch#170862",
    ),
    "clip_epsilon": Fault(
        "clipping divides by the norm; torch divides by the norm + 1e-6",
        "jaxddp.optim.clip_by_global_norm, or accept 1e-6/|g|",
    ),
    "clip_missing": Fault(
        "gradients are not clipped, where the reference clips them",
        "clip_grad_norm in the port, or optax.clip_by_global_norm before the optimizer",
    ),
    "compressed_all_reduce": Fault(
        "gradients are rounded to 16 bits on their way between the replicas",
        "reduce in float32",
        "pytorch/pytorch#106395",
    ),
    "different_start": Fault(
        "the replicas start from different weights",
        "initialise once, and replicate",
    ),
    "buffers_local": Fault(
        "each replica keeps its own buffers; torch DDP broadcasts rank 0's",
        "broadcast rank 0's buffers after each step",
        "pytorch/pytorch#13711",
    ),
    "buffers_averaged": Fault(
        "the buffers are averaged over the replicas; torch DDP keeps rank 0's",
        "broadcast rank 0's buffers after each step",
    ),
    "stale_parameters": Fault(
        "gradients are taken at the parameters of the step before",
        "differentiate at the parameters that the optimizer will update",
    ),
    "unused_parameters": Fault(
        "parameters that the loss does not reach get a gradient of zeros, and so decay and momentum; torch skips them",
        "leave them out with optax.masked",
        "pytorch/pytorch#43259",
    ),
    "aliased_buffers": Fault(
        "a tensor holds what belongs to another: a buffer was donated or shared, and used again",
        "copy before donating; block_until_ready before the host array is written again",
        "jax-ml/jax#39625",
    ),
    "tied_weights": Fault(
        "tied weights are not one tensor: its gradient lacks a part, or the norm counts it twice",
        "one nnx.Param used in both places",
        "NVIDIA/Megatron-LM#844",
    ),
    # Optimizer
    "coupled_decay": Fault(
        "weight decay goes through the optimizer's statistics (L2) where the reference decouples it, or the reverse",
        "for AdamW optax.adamw; for all others optax.add_decayed_weights before the rest of the chain",
        "google-deepmind/optax#417",
    ),
    "decay_value": Fault(
        "another weight decay; the defaults are 1e-2 in torch.optim.AdamW and 1e-4 in optax.adamw",
        "give it explicitly on both sides",
    ),
    "decay_without_lr": Fault(
        "weight decay is not multiplied by the learning rate",
        "add_decayed_weights before scale_by_learning_rate",
        "google-deepmind/optax#292",
    ),
    "decay_mask": Fault(
        "weight decay reaches other tensors: biases and norms decay on one side only",
        "the same groups on both sides: add_decayed_weights(..., mask=...)",
    ),
    "decay_rounded_away": Fault(
        "float32 rounds 1 - lr * weight_decay: the decay is lost or coarse",
        "a difference of numbers, not of meaning: nothing to mend in the port",
        "pytorch/pytorch#64475",
    ),
    "eps_in_root": Fault(
        "eps is added inside the root instead of outside, or the reverse",
        "optax.adam(eps=..., eps_root=0), rmsprop(eps_in_sqrt=False)",
    ),
    "eps_value": Fault("another eps", "give eps explicitly on both sides"),
    "loss_scale": Fault(
        "the loss, or the gradients that the optimizer sees, are multiplied by a number",
        "one loss on both sides (a mean or a sum; optax.l2_loss has 1/2), and a loss scale divided out again",
    ),
    "no_bias_correction": Fault("Adam without bias correction", "optax.scale_by_adam corrects; do not undo it"),
    "nesterov": Fault("Nesterov momentum on one side only", "nesterov= the same on both sides"),
    "lr_in_momentum": Fault(
        "momentum is summed up after the learning rate, as in TensorFlow, and remembers old rates",
        "optax.trace before optax.scale_by_learning_rate",
    ),
    "amsgrad": Fault(
        "AMSGrad on one side only, or as optax.amsgrad has it, which corrects before it takes the largest",
        "jaxddp.optim.adam(amsgrad=True)",
    ),
    "dampening": Fault(
        "another dampening of the momentum; optax.trace has none",
        "jaxddp.optim.sgd(dampening=...)",
    ),
    "rmsprop_decay": Fault(
        "RMSprop forgets at another rate; the defaults are alpha 0.99 in torch and decay 0.9 in optax",
        "optax.rmsprop(decay=0.99, eps_in_sqrt=False)",
        "google-deepmind/optax#532",
    ),
    "rmsprop_centred": Fault(
        "RMSprop centred on one side only, or its squares start from another value",
        "centered= and initial_scale=0. as in torch",
        "google-deepmind/optax#49",
    ),
    "adagrad_accumulator": Fault(
        "Adagrad's accumulator starts from another value; the defaults are 0 in torch and 0.1 in optax",
        "optax.adagrad(..., initial_accumulator_value=0.)",
    ),
    "lr_scaled": Fault(
        "the learning rate is multiplied, by the number of replicas or its root",
        "the reference's rate; scaling it is a choice that both sides make",
    ),
    "lr_off_by_one": Fault(
        "the schedule is a step ahead or behind",
        "update t (from 0) uses schedule(t)",
        "pytorch/torchtitan#1261",
    ),
    "scheduler_too_fast": Fault(
        "the schedule advances several times per optimizer step",
        "step it once per optimizer step, whatever the number of replicas",
        "huggingface/accelerate#1382",
    ),
    "resume_lost_state": Fault(
        "a resumed run begins with a fresh count or fresh moments",
        "save and restore the whole optimizer state",
    ),
    "betas": Fault("other betas or momentum", "give them explicitly on both sides"),
    # Data and randomness
    "set_epoch_missing": Fault(
        "every epoch comes in the order of the first",
        "sampler.set_epoch(epoch), or an order drawn from (seed, epoch)",
        "pytorch/pytorch#31771",
    ),
    "padding_or_dropping": Fault(
        "the end of an epoch is cut off where the reference fills it up, or the reverse",
        "drop_last the same on both sides",
        "pytorch/pytorch#25162",
    ),
    "same_shard": Fault("every replica gets the same examples", "replica r takes indices[r::world_size]"),
    "sampler_offset_lost": Fault(
        "a resumed run reads its epoch from the beginning",
        "skip the batches that were consumed before the checkpoint",
        "huggingface/accelerate#4071",
    ),
    "same_dropout_mask": Fault(
        "every replica draws the same random mask",
        "fold the replica's number into the key",
        "facebookresearch/detr#297",
    ),
    # Model
    "batch_norm_momentum": Fault(
        "BatchNorm's momentum is the complement: torch's 0.1 is flax's 0.9 (its default: 0.99)",
        "momentum=0.9 for torch's 0.1",
    ),
    "biased_variance": Fault(
        "the running variance is the biased one; torch keeps n/(n-1) of it",
        "track n/(n-1) times the batch's variance, as jaxddp.nn.layers.BatchNorm does",
        "pytorch/pytorch#19902",
    ),
    "batch_norm_eval": Fault(
        "BatchNorm uses its running statistics while it trains",
        "use_running_average=False, model.train()",
    ),
    "batch_norm_sync": Fault(
        "BatchNorm takes its statistics over all replicas where the reference takes each one's own, or the reverse",
        "axis_name=None for local statistics",
        "google/flax#2417",
    ),
    "fast_variance": Fault(
        "the variance is computed as E[x^2] - E[x]^2, which cancels where the mean is large",
        "use_fast_variance=False",
    ),
    "gelu_approximation": Fault(
        "GELU by tanh on one side and by erf on the other",
        "jax.nn.gelu(x, approximate=False) for torch's default",
        "jax-ml/jax#4428",
    ),
    "norm_epsilon": Fault(
        "a normalisation layer with another epsilon; LayerNorm's defaults are 1e-5 in torch and 1e-6 in flax",
        "epsilon= the reference's eps",
    ),
    "same_padding": Fault(
        "padding 'SAME' at stride 2 pads otherwise than a symmetric padding does",
        "padding=((1, 1), (1, 1)) for torch's padding=1",
        "google/flax#2993",
    ),
    "label_smoothing": Fault("another label smoothing", "optax.smooth_labels with torch's label_smoothing"),
    "ignore_index": Fault(
        "labels to be ignored count in the mean",
        "divide by the number of labels that are not ignored",
    ),
    "padding_idx": Fault(
        "the embedding's padding row gets a gradient",
        "stop_gradient on that row, or mask its gradient",
    ),
    "layout": Fault(
        "the same values in another order: a kernel's axes, or the axes that were flattened",
        "transpose to torch's order (N, C, H, W) before flattening; kernels (H, W, in, out)",
    ),
    "reduced_precision_matmul": Fault(
        "matrix products round their inputs to fewer bits (TF32, bfloat16)",
        'jax.default_matmul_precision("highest") to compare',
        "jax-ml/jax#12008",
    ),
}
