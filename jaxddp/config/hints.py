"""What flags and their values are called in Hugging Face's Trainer, Lightning, Accelerate and torchrun.

None of these names is a flag here: an error says the one that is.
"""

# Flag of another trainer -> flags of jaxddp.
OTHER_TRAINERS = {
    # Hugging Face's TrainingArguments.
    "--learning-rate": "--lr",
    "--num-train-epochs": "--epochs",
    "--per-device-train-batch-size": "--global-batch-size, over all devices",
    "--train-batch-size": "--global-batch-size",
    "--gradient-accumulation-steps": "--accumulation-steps",
    "--max-grad-norm": "--clip-grad-norm",
    "--bf16": "--amp bf16",
    "--fp16": "--amp fp16",
    "--optim": "--optimizer",
    "--adam-epsilon": "--eps",
    "--lr-scheduler-type": "--schedule",
    "--output-dir": "--output",
    "--resume-from-checkpoint": "--resume",
    "--save-steps": "--checkpoint-every",
    "--save-total-limit": "--keep-checkpoints",
    "--load-best-model-at-end": "--keep-best",
    "--metric-for-best-model": "--best-metric",
    "--eval-steps": "--evaluate-every",
    "--logging-steps": "--log-every",
    "--report-to": "--track",
    "--gradient-checkpointing": "--remat",
    "--dataloader-num-workers": "--data-workers",
    "--dataloader-drop-last": "--drop-last-batch",
    "--label-smoothing-factor": "--label-smoothing",
    # Lightning's Trainer.
    "--max-epochs": "--epochs",
    "--accumulate-grad-batches": "--accumulation-steps",
    "--gradient-clip-val": "--clip-grad-norm",
    "--precision": "--amp",
    "--accelerator": "--platform",
    "--default-root-dir": "--output",
    "--ckpt-path": "--resume",
    "--limit-train-batches": "--steps-per-epoch",
    "--check-val-every-n-epoch": "--evaluate-every",
    "--val-check-interval": "--evaluate-every",
    "--log-every-n-steps": "--log-every",
    "--logger": "--track",
    "--sync-batchnorm": "--sync-batch-norm",
    # Accelerate and torchrun.
    "--mixed-precision": "--amp",
    "--world-size": "--devices",
    "--gpus": "--devices",
    "--num-gpus": "--devices",
    "--replicas": "--devices",
    "--nproc-per-node": "--devices",
    "--main-process-ip": "--coordinator",
    # Other scripts.
    "--batch-size": "--global-batch-size",
    "--wd": "--weight-decay",
    "--warmup": "--warmup-steps",
    "--scheduler": "--schedule",
    "--resume-from": "--resume",
    "--limit": "--time-limit",
    "--timeout": "--stall-timeout",
}

# Option -> value in another trainer, in lower case -> value here.
VALUES = {
    "amp": {
        **dict.fromkeys(("no", "off", "false", "32", "fp32", "float32", "32-true"), "none"),
        **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true"), "bf16"),
        **dict.fromkeys(("16", "float16", "half", "16-mixed"), "fp16"),
    },
    "dtype": {"fp32": "float32", "float": "float32", "32": "float32", "fp64": "float64", "double": "float64"},
    "optimizer": {"adamw_torch": "adamw", "adamw_hf": "adamw", "rms_prop": "rmsprop"},
    "schedule": {
        "none": "constant",
        "constant_with_warmup": "linear",
        "cosine_with_restarts": "cosine_restarts",
        "cosine_with_warmup": "warmup_cosine",
        "onecycle": "one_cycle",
        "reduce_lr_on_plateau": "plateau",
    },
    "platform": {"cuda": "gpu"},
    "comm_hook": {"none": "allreduce", "powersgd": "powerSGD"},
}
