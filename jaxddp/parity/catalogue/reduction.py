"""Faults between the loss and the optimizer: reduction, synchronisation, clipping."""

from jaxddp.parity.catalogue.fault import Fault

FAULTS: dict[str, Fault] = {
    "sum_not_mean": Fault(
        "gradients are summed over the replicas instead of averaged",
        "use jax.lax.pmean instead of jax.lax.psum: gradients = jax.lax.pmean(gradients, axis_name)",
        "TianhongDai/hindsight-experience-replay#4",
    ),
    "check_vma": Fault(
        "shard_map already sums the gradients of replicated parameters, and they are reduced a second time",
        "pass check_vma=False to shard_map and average once, gradients = jax.lax.pmean(gradients, axis_name); "
        "or keep check_vma, differentiate the mean, jax.grad(lambda params: jax.lax.pmean(loss(params), "
        "axis_name)), and do not reduce again",
        "jax-ml/jax#3970",
    ),
    "collective_in_loss": Fault(
        "the differentiated loss contains a collective: grad(psum(loss)) is N times the local gradient",
        "differentiate the loss of the replica, jax.value_and_grad(local_loss), without a collective in it; "
        "then average: gradients = jax.lax.pmean(gradients, axis_name)",
        "jax-ml/jax#3970",
    ),
    "no_sync": Fault(
        "gradients are not averaged over the replicas, so the replicas diverge",
        "average before the optimizer: gradients = jax.lax.pmean(gradients, axis_name)",
        "pytorch/pytorch#104336",
    ),
    "averaged_twice": Fault(
        "gradients are divided by the number of replicas twice",
        "divide once: gradients = jax.lax.pmean(gradients, axis_name) and no other division",
        "NVIDIA/apex#696",
    ),
    "local_device_count": Fault(
        "the sum over all replicas is divided by the number of one host's devices",
        "divide jax.lax.psum by the number of all replicas, jax.lax.axis_size(axis_name), or use jax.lax.pmean",
    ),
    "accumulation_not_divided": Fault(
        "micro-batch gradients are added up but not divided by the number of micro-batches",
        "differentiate loss / accumulation_steps of each micro-batch",
    ),
    "synchronised_early": Fault(
        "gradients are averaged over the replicas before the last micro-batch is added",
        "accumulate locally, and average once, after the last micro-batch is added: if part == "
        "accumulation_steps - 1: gradients = jax.lax.pmean(gradients, axis_name)",
        "huggingface/accelerate#1726",
    ),
    "mean_per_micro_batch": Fault(
        "each micro-batch's loss is the mean over the tokens of that micro-batch, whatever their number",
        "sum the losses, and divide by the number of tokens in the whole step: return (losses, weights) with "
        'loss_normalization="global"; or losses.sum() / tokens * parts, if the step then averages over so '
        "many parts (replicas times micro-batches)",
        "huggingface/transformers#34191",
    ),
    "mean_per_rank": Fault(
        "each rank's loss is the mean over the tokens of that rank, whatever their number",
        "divide by the number of tokens on all ranks: before the mean, multiply each rank's loss and "
        "gradients by tokens / jax.lax.pmean(tokens, axis_name)",
        "huggingface/transformers#34242",
    ),
    "global_mean": Fault(
        "the loss is one mean over the tokens of all ranks; the reference takes the mean of the ranks' means",
        "divide by the number of tokens of each rank, like torch DDP: average the ranks' means without "
        "weights; or make the reference divide by the total",
        "huggingface/transformers#34242",
    ),
    "auxiliary_loss_scaled": Fault(
        "a term of the loss has another factor, or the factor that normalises the token loss is applied to an "
        "auxiliary loss too",
        "give each term of the loss the factor that it has in the reference: the port's, divided by the number that "
        "is said; one that normalises the token loss is not the auxiliary loss's: token_loss * factor + auxiliary_loss",
        "huggingface/transformers#48706",
    ),
    "clipped_before_mean": Fault(
        "each replica clips its local gradient, before the mean",
        "average first, then clip: clip(jax.lax.pmean(gradients, axis_name))",
        "tensorflow/tensorflow#25806",
    ),
    "clip_norm_local": Fault(
        "clipping uses a norm that is not the norm of the averaged gradient",
        "compute the norm of the averaged gradient, once, without a further collective: "
        "optax.tree.norm(jax.lax.pmean(gradients, axis_name))",
        "pytorch/pytorch#170862",
    ),
    "clip_norm": Fault(
        "clipping starts at another norm than in the reference, or at each tensor's own, or only one side clips",
        "give both sides the same max_norm: clip_grad_norm = max_norm in the program, or "
        "optax.stateless(lambda g, _: jaxddp.optim.clip_by_global_norm(g, max_norm)[0]) in the chain; if the "
        "reference does not clip, do not clip in the port",
    ),
    "clip_by_value": Fault(
        "each element of the gradients is clipped by itself; the reference clips by the norm of all, at another value, "
        "or not at all",
        "clip like the reference: by its value, or by the global norm, optax.stateless(lambda g, _: "
        "jaxddp.optim.clip_by_global_norm(g, max_norm)[0]) in place of optax.clip; if it does not clip, do "
        "not clip in the port; or use torch.nn.utils.clip_grad_value_ in the reference",
    ),
    "clip_epsilon": Fault(
        "clipping divides by the norm; torch divides by the norm + 1e-6",
        "clip by optax.stateless(lambda g, _: jaxddp.optim.clip_by_global_norm(g, max_norm)[0]) in place of "
        "optax.clip_by_global_norm, or accept a relative difference of 1e-6/|g|",
    ),
    "clip_missing": Fault(
        "gradients are not clipped where the reference clips them",
        "set clip_grad_norm = max_norm, or clip_grad_value, in the program, or put optax.stateless(lambda g, _: "
        "jaxddp.optim.clip_by_global_norm(g, max_norm)[0]), or optax.clip(value), before the optimizer; if the port "
        "clips already, give it the reference's value, or norm, of all gradients together, before the optimizer",
    ),
    "compressed_all_reduce": Fault(
        "gradients are rounded to 16 bits for the all-reduce",
        "all-reduce in the dtype of the parameters, without a cast: gradients = jax.lax.pmean(gradients, axis_name)",
        "pytorch/pytorch#106395",
    ),
    "different_start": Fault(
        "the replicas start from different weights",
        "initialise with one key on all replicas, jax.random.key(seed) without the rank, or initialise once "
        "and replicate",
    ),
    "buffers_local": Fault(
        "each replica keeps its own buffers; torch DDP broadcasts those of rank 0",
        "keep the buffers of rank 0 after each step: buffers = jax.tree.map(lambda b: jax.lax.all_gather(b, "
        "axis_name)[0], buffers)",
        "pytorch/pytorch#13711",
    ),
    "buffers_averaged": Fault(
        "the buffers are averaged over the replicas; torch DDP keeps those of rank 0",
        "keep the buffers of rank 0 after each step, and not their mean: buffers = jax.tree.map(lambda b: "
        "jax.lax.all_gather(b, axis_name)[0], buffers)",
    ),
    "stale_parameters": Fault(
        "gradients are computed at the parameters of the previous step",
        "differentiate at the parameters that the optimizer will update: jax.value_and_grad(local_loss, "
        "has_aux=True)(params, ...), then optimizer.update(gradients, opt_state, params)",
    ),
    "unused_parameters": Fault(
        "parameters that the loss does not use get zero gradients, and with them decay and momentum; torch skips them",
        "exclude them: optax.masked(optimizer, used), where used is a tree of bools, False for parameters "
        "that the loss does not use",
        "pytorch/pytorch#43259",
    ),
    "aliased_buffers": Fault(
        "a tensor holds the data of another tensor: a buffer was donated or shared, then used again",
        "copy before the memory is used again: hand over buffer.copy() before the loader writes to a NumPy "
        "array again, jnp.copy(x) before x is donated; call block_until_ready before writing to the host "
        "array",
        "jax-ml/jax#39625",
    ),
    "tied_weights": Fault(
        "tied weights are not one tensor: the gradient lacks a part, or the norm counts it twice",
        "use one nnx.Param in both places: logits = embed.attend(x) of the nnx.Embed that looks the tokens up",
        "NVIDIA/Megatron-LM#844",
    ),
}
