"""Recorder of an unchanged training loop: a folder of steps, which `jaxddp compare` reads.

    run/
        rank0/
            run.jsonl           line 1: the run; then one line per recorded step
            000001.safetensors  arrays of step 1, "stage|name"
            000002.safetensors
        rank1/                  of the second process

Nothing that is read from these files can run code. Stages of a step, with one process's values:

    samples             per entry of the batch and example: a hash, and sketches of floating-point values
    local_loss          "loss" of each replica of the process, (R,)
    local_gradients     before the all-reduce, (R, ...); left out in a run of one replica
    gradients           as the all-reduce returns them; rank 0, like all that follow
    replica_gradients   the same on each replica, (R, ...); of JAX only where the replicas differ
    clipped_gradients   as the optimizer gets them, where they differ from the gradients
    params              before the step
    update              what the step adds to the parameters
    buffers             after the step
    optimizer_state     after the step, "exp_avg:0.weight"
    params_changes_before, params_changes_after
                        what else was added to the parameters, since the step before and after the update; in torch
                        also optimizer_state_changes_before and _after
    norms               "stage|name" -> norm of a tensor that the record has an excerpt of

Names and layouts are those of the side's own framework; the comparison pairs them.
"""
