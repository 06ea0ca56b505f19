"""Print which share of a convnet's all-reduced bytes eight H100s cover, the same with a planted fault, and a 1.

The fault leaves out `kept_apart`. The 1 says that the trainer's program has the schedule of the planned one.

    PYTHONPATH=.venv/cuda-plugin:. .venv/bin/python tests/support/gpu_overlap.py

This needs no GPU, but jax's CUDA plugin in the version of jax, which `make test-all` installs.
"""

from functools import partial

import jax
from jax import numpy as jnp

from jaxddp import optim
from jaxddp.config.hardware import GPUS
from jaxddp.distributed.gpu_options import compiler_options
from jaxddp.distributed.replicas import Replicas
from jaxddp.nn.functional import Functional
from jaxddp.nn.losses import cross_entropy
from jaxddp.plan import roofline, topology
from jaxddp.plan.compiled import CompiledStep, Compiler
from jaxddp.plan.hlo import parse
from jaxddp.plan.links import Links
from jaxddp.plan.presets import ResNet50
from jaxddp.plan.timeline import Event, events, play
from jaxddp.plan.workload import Workload, nbytes
from jaxddp.step import replicated
from jaxddp.step.replica_step import ReplicaStep

H100 = GPUS["h100"]


def workload() -> Workload:
    functional = Functional(ResNet50(blocks=(1, 1, 1, 2)))
    step = ReplicaStep(functional.local_loss(cross_entropy, train=True), optim.sgd(0.1, momentum=0.9))
    example = {"x": jax.ShapeDtypeStruct((224, 224, 3), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)}
    return Workload("convnet", step, functional.params, functional.buffers, example, 128)


def planned(devices: list[jax.Device]) -> CompiledStep:
    """Compile as `jaxddp.plan` does: one lowered program, with options given to its compilation."""
    model = workload()
    return Compiler(model, Replicas(devices)).compile(128, compiler_options(nbytes(model.gradients)))


def trained(devices: list[jax.Device]) -> list[Event]:
    """Compile as the trainer does: `Replicas.map` with options."""
    model = workload()
    options = compiler_options(nbytes(model.gradients))
    return events(parse(model.lower(Replicas(devices), 128, options).compile().as_text()))


def covered(compiled: CompiledStep) -> float:
    return play(compiled.events, partial(roofline.seconds, gpu=H100), Links(H100, 8).seconds).covered_share


if __name__ == "__main__":
    eight = topology.gpus(H100, 8, 1)
    right = planned(eight)
    same = [event.what for event in right.events] == [event.what for event in trained(eight)]
    replicated.kept_apart = lambda params: params
    print(covered(right), covered(planned(eight)), int(same))
