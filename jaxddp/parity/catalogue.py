"""Faults that the diagnosis knows by name: what the JAX side does wrong, and the fix.

The `thread` of a fault is a public report of it. A port with one of these faults is reported as different, and
the fault is named if the reference, replayed with the same fault, reproduces what the port does.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """A kind of mistake.

    Attributes:
        title: what the JAX side does.
        fix: what it should do instead.
        thread: a public report of the fault, as owner/repository#number; "" if there is none.
    """

    title: str
    fix: str
    thread: str = ""


FAULTS: dict[str, Fault] = {
    # Reduction and synchronisation
    "sum_not_mean": Fault(
        "gradients are summed over the replicas instead of averaged",
        "use jax.lax.pmean instead of jax.lax.psum",
        "TianhongDai/hindsight-experience-replay#4",
    ),
    "check_vma": Fault(
        "shard_map already sums the gradients of replicated parameters, and they are reduced a second time",
        "pass check_vma=False to shard_map, or differentiate the pmean of the loss and do not reduce again",
        "jax-ml/jax#3970",
    ),
    "collective_in_loss": Fault(
        "the differentiated loss contains a collective: grad(psum(loss)) is N times the local gradient",
        "differentiate the local loss, then average the gradients",
        "jax-ml/jax#3970",
    ),
    "no_sync": Fault(
        "gradients are not averaged over the replicas, so the replicas diverge",
        "average before the optimizer: gradients = jax.lax.pmean(gradients, axis_name)",
        "pytorch/pytorch#104336",
    ),
    "averaged_twice": Fault(
        "gradients are divided by the number of replicas twice",
        "divide once: use pmean, or psum and divide by N",
        "NVIDIA/apex#696",
    ),
    "local_device_count": Fault(
        "the sum over all replicas is divided by the number of one host's devices",
        "divide by the world size, jax.device_count(), or use pmean",
    ),
    "accumulation_not_divided": Fault(
        "micro-batch gradients are added up but not divided by the number of micro-batches",
        "divide the loss of each micro-batch by accumulation_steps",
    ),
    "synchronised_early": Fault(
        "gradients are averaged over the replicas before the last micro-batch is added",
        "accumulate locally, and average once, after the last micro-batch",
        "huggingface/accelerate#1726",
    ),
    "mean_per_micro_batch": Fault(
        "each micro-batch's loss is the mean over the tokens of that micro-batch, whatever their number",
        "sum the losses, and divide by the number of tokens in the whole step",
        "huggingface/transformers#34191",
    ),
    "mean_per_rank": Fault(
        "each rank's loss is the mean over the tokens of that rank, whatever their number",
        "divide by the number of tokens on all ranks",
        "huggingface/transformers#34242",
    ),
    "global_mean": Fault(
        "the loss is one mean over the tokens of all ranks; the reference takes the mean of the ranks' means",
        "divide by the token count of each rank, as torch DDP does, or make the reference divide by the total",
        "huggingface/transformers#34242",
    ),
    "auxiliary_loss_scaled": Fault(
        "the factor that normalises the token loss is applied to an auxiliary loss too",
        "scale each term separately",
        "huggingface/transformers#48706",
    ),
    "clipped_before_mean": Fault(
        "each replica clips its local gradient, before the mean",
        "average first, then clip",
        "tensorflow/tensorflow#25806",
    ),
    "clip_norm_local": Fault(
        "clipping uses a norm that is not the norm of the averaged gradient",
        "compute the norm of the averaged gradient, once",
        "pytorch/pytorch#170862",
    ),
    "clip_norm": Fault(
        "clipping starts at another norm than in the reference, or only one side clips",
        "give both sides the same max_norm",
    ),
    "clip_by_value": Fault(
        "each element of the gradients is clipped by itself; the reference clips by the norm of all, or not at all",
        "clip by the global norm, as the reference does, or use torch.nn.utils.clip_grad_value_ there",
    ),
    "clip_epsilon": Fault(
        "clipping divides by the norm; torch divides by the norm + 1e-6",
        "clip by optax.stateless(lambda g, _: jaxddp.optim.clip_by_global_norm(g, max_norm)[0]), or accept a relative "
        "difference of 1e-6/|g|",
    ),
    "clip_missing": Fault(
        "gradients are not clipped; the reference clips them",
        "set clip_grad_norm in the port, or put optax.clip_by_global_norm before the optimizer",
    ),
    "compressed_all_reduce": Fault(
        "gradients are rounded to 16 bits for the all-reduce",
        "all-reduce in float32",
        "pytorch/pytorch#106395",
    ),
    "different_start": Fault(
        "the replicas start from different weights",
        "initialise once, then replicate",
    ),
    "buffers_local": Fault(
        "each replica keeps its own buffers; torch DDP broadcasts those of rank 0",
        "broadcast the buffers of rank 0 after each step",
        "pytorch/pytorch#13711",
    ),
    "buffers_averaged": Fault(
        "the buffers are averaged over the replicas; torch DDP keeps those of rank 0",
        "broadcast the buffers of rank 0 after each step",
    ),
    "stale_parameters": Fault(
        "gradients are computed at the parameters of the previous step",
        "differentiate at the parameters that the optimizer will update",
    ),
    "unused_parameters": Fault(
        "parameters that the loss does not use get zero gradients, and with them decay and momentum; torch skips them",
        "exclude them with optax.masked",
        "pytorch/pytorch#43259",
    ),
    "aliased_buffers": Fault(
        "a tensor holds the data of another tensor: a buffer was donated or shared, then used again",
        "copy before donating; call block_until_ready before writing to the host array again",
        "jax-ml/jax#39625",
    ),
    "tied_weights": Fault(
        "tied weights are not one tensor: the gradient lacks a part, or the norm counts it twice",
        "use one nnx.Param in both places",
        "NVIDIA/Megatron-LM#844",
    ),
    # Optimizer
    "coupled_decay": Fault(
        "weight decay goes through the optimizer's statistics (L2) where the reference decouples it, or vice versa",
        "use optax.adamw for AdamW, and optax.add_decayed_weights before the rest of the chain for all others",
        "google-deepmind/optax#417",
    ),
    "decay_value": Fault(
        "weight decay differs; the defaults are 1e-2 in torch.optim.AdamW and 1e-4 in optax.adamw",
        "set it explicitly on both sides",
    ),
    "decay_without_lr": Fault(
        "weight decay is not multiplied by the learning rate",
        "put add_decayed_weights before scale_by_learning_rate",
        "google-deepmind/optax#292",
    ),
    "decay_mask": Fault(
        "weight decay applies to different tensors: biases and norms decay on one side only",
        "use the same groups on both sides: add_decayed_weights(..., mask=...)",
    ),
    "decay_rounded_away": Fault(
        "float32 rounds 1 - lr * weight_decay, so the decay is lost or coarse",
        "nothing to fix in the port: the two sides mean the same and round differently",
        "pytorch/pytorch#64475",
    ),
    "eps_in_root": Fault(
        "eps is added inside the square root instead of outside, or vice versa",
        "use optax.adam(eps=..., eps_root=0), optax.rmsprop(eps_in_sqrt=False) or jaxddp.optim.adagrad(eps=...)",
    ),
    "eps_value": Fault("eps differs", "set eps explicitly on both sides"),
    "loss_scale": Fault(
        "the loss, or the gradient that the optimizer sees, is multiplied by a number",
        "use the same loss on both sides (a mean or a sum; optax.l2_loss has a factor 1/2), and undo any loss scale",
    ),
    "no_bias_correction": Fault(
        "Adam without bias correction", "optax.scale_by_adam corrects the bias; do not undo it"
    ),
    "nesterov": Fault("Nesterov momentum on one side only", "use the same nesterov= on both sides"),
    "lr_in_momentum": Fault(
        "momentum accumulates after the learning rate is applied, as in TensorFlow, and so remembers old rates",
        "put optax.trace before optax.scale_by_learning_rate",
    ),
    "amsgrad": Fault(
        "AMSGrad on one side only, or optax.amsgrad, which corrects the bias before it takes the maximum",
        "use jaxddp.optim.adam(amsgrad=True)",
    ),
    "dampening": Fault(
        "the dampening of the momentum differs; optax.trace has none",
        "use jaxddp.optim.sgd(dampening=...)",
    ),
    "rmsprop_decay": Fault(
        "the decay rate of RMSprop differs; the defaults are alpha 0.99 in torch and decay 0.9 in optax",
        "use optax.rmsprop(decay=0.99, eps_in_sqrt=False)",
        "google-deepmind/optax#532",
    ),
    "rmsprop_centred": Fault(
        "RMSprop is centred on one side only, or its mean square starts from a different value",
        "set centered= and initial_scale=0. as in torch",
        "google-deepmind/optax#49",
    ),
    "adagrad_accumulator": Fault(
        "Adagrad's accumulator starts from a different value; the defaults are 0 in torch and 0.1 in optax",
        "use optax.adagrad(..., initial_accumulator_value=0.)",
    ),
    "lr_scaled": Fault(
        "the learning rate is multiplied by the number of replicas or its square root",
        "use the learning rate of the reference, or scale it on both sides",
    ),
    "lr_off_by_one": Fault(
        "the schedule is one step ahead or behind",
        "use schedule(t) for update t, counted from 0",
        "pytorch/torchtitan#1261",
    ),
    "scheduler_too_fast": Fault(
        "the schedule advances several times per optimizer step",
        "advance it once per optimizer step, whatever the number of replicas",
        "huggingface/accelerate#1382",
    ),
    "resume_lost_state": Fault(
        "a resumed run starts with a fresh step count or fresh moments",
        "save and restore the whole optimizer state",
    ),
    "betas": Fault("the betas or the momentum differ", "set them explicitly on both sides"),
    # Data and randomness
    "set_epoch_missing": Fault(
        "every epoch has the order of the first",
        "call sampler.set_epoch(epoch), or draw the order from (seed, epoch)",
        "pytorch/pytorch#31771",
    ),
    "padding_or_dropping": Fault(
        "the end of an epoch is dropped where the reference pads it, or vice versa",
        "use the same drop_last on both sides",
        "pytorch/pytorch#25162",
    ),
    "same_shard": Fault("every replica gets the same examples", "give replica r the examples indices[r::world_size]"),
    "sampler_offset_lost": Fault(
        "a resumed run reads its epoch from the beginning again",
        "skip the batches consumed before the checkpoint",
        "huggingface/accelerate#4071",
    ),
    "same_dropout_mask": Fault(
        "every replica draws the same random mask",
        "fold the rank of the replica into the key",
        "facebookresearch/detr#297",
    ),
    # Model
    "batch_norm_momentum": Fault(
        "BatchNorm's momentum is not the complement of torch's: 0.1 in torch is 0.9 in flax (default: 0.99)",
        "use momentum=0.9 in flax for 0.1 in torch",
    ),
    "biased_variance": Fault(
        "the running variance is the biased one; torch keeps n/(n-1) times it",
        "track n/(n-1) times the batch variance, as jaxddp.nn.layers.BatchNorm does",
        "pytorch/pytorch#19902",
    ),
    "batch_norm_eval": Fault(
        "BatchNorm uses its running statistics during training",
        "pass use_running_average=False, or call model.train()",
    ),
    "batch_norm_sync": Fault(
        "BatchNorm computes its statistics over all replicas and the reference for each replica, or vice versa",
        "use axis_name=None for local statistics",
        "google/flax#2417",
    ),
    "fast_variance": Fault(
        "the variance is computed as E[x^2] - E[x]^2, which cancels if the mean is large",
        "set use_fast_variance=False",
    ),
    "gelu_approximation": Fault(
        "GELU uses the tanh approximation on one side and erf on the other",
        "use jax.nn.gelu(x, approximate=False) for torch's default",
        "jax-ml/jax#4428",
    ),
    "norm_epsilon": Fault(
        "the epsilon of a normalisation layer differs; LayerNorm's defaults are 1e-5 in torch and 1e-6 in flax",
        "set epsilon= to the reference's eps",
    ),
    "same_padding": Fault(
        "'SAME' padding at stride 2 differs from symmetric padding",
        "use padding=((1, 1), (1, 1)) for torch's padding=1",
        "google/flax#2993",
    ),
    "label_smoothing": Fault("label smoothing differs", "use optax.smooth_labels with torch's label_smoothing"),
    "dropout_rate": Fault("dropout has another rate", "give nnx.Dropout or linen's torch's p as its rate"),
    "ignore_index": Fault(
        "labels that should be ignored count in the mean",
        "divide by the number of labels that are not ignored",
    ),
    "padding_idx": Fault(
        "the embedding's padding row gets a gradient",
        "apply stop_gradient to that row, or mask its gradient",
    ),
    "layout": Fault(
        "the values are right but in another order: a kernel's axes, or the axes that were flattened",
        "transpose to torch's order (N, C, H, W) before flattening, or declare flax's order in names: flattened(...); "
        "store kernels as (H, W, in, out)",
    ),
    "reduced_precision_matmul": Fault(
        "matrix products round their inputs to fewer bits (TF32, bfloat16)",
        'compare under jax.default_matmul_precision("highest")',
        "jax-ml/jax#12008",
    ),
}
