"""XLA's flags of smoke runs and tests, which compile more than they compute; needs neither jax nor torch."""

import importlib.metadata
import os

# An older code generator of XLA, with fewer optimizations and without splitting a program into 32 parts that several
# cores compile (91 tests of the step: 30 s of CPU time, 38 s with it). Users have the newer one. Level 0 is too low:
# XLA 0.10 then computes wrong gradients of convolutions.
FAST_COMPILER = (
    "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=1 --xla_cpu_parallel_codegen_split_count=1"
)


def compile_faster() -> None:
    """Set XLA_FLAGS for this process and its children, if this jaxlib has the flags."""
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        os.environ["XLA_FLAGS"] = f"{FAST_COMPILER} {os.environ.get('XLA_FLAGS', '')}".strip()
