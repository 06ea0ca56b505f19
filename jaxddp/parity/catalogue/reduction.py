"""Faults between the loss and the optimizer: reduction, synchronisation, clipping."""

from jaxddp.parity.catalogue.fault import Fault

FAULTS: dict[str, Fault] = {
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
}
