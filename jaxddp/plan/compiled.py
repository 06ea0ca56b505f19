"""Programs that XLA compiles for the GPUs, with the memory that they need."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError, reason
from jaxddp.plan.hlo import CompiledProgram, parse
from jaxddp.plan.timeline import Event, events
from jaxddp.plan.workload import Workload

NO_TILES = "output tile sizes"  # what XLA says of a product of width 48, for instance, that Triton cannot tile
CUBLAS: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}  # leaves products to cuBLAS, which tiles any


@dataclass(frozen=True)
class CompiledStep:
    """A compiled training step.

    Attributes:
        text: the program, as HLO text.
        batch_size: examples per replica.
        arguments, outputs, aliased, temporaries: bytes per device; aliased outputs share the arguments' memory.
        seconds: time of the compilation.
        fallback: XLA's options in addition to those asked for, without which it cannot compile the step.
    """

    text: str
    batch_size: int
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    seconds: float
    fallback: Mapping[str, Any] = field(default_factory=dict)

    @property
    def memory(self) -> int:
        """Bytes that a device needs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @cached_property
    def program(self) -> CompiledProgram:
        """Parsed program."""
        return parse(self.text)

    @cached_property
    def events(self) -> list[Event]:
        """Schedule."""
        return events(self.program)


class Compiler:
    """Compiler of a workload for given replicas; it lowers each batch size once.

    Args:
        workload: the training step.
        replicas: replicas on the devices of `jaxddp.plan.topology`.
    """

    def __init__(self, workload: Workload, replicas: Replicas):
        self._workload, self._replicas = workload, replicas
        self._lowered: dict[int, Any] = {}
        self._fallback: dict[str, Any] = {}

    def compile(self, batch_size: int, options: Mapping[str, Any]) -> CompiledStep:
        """Compile one optimizer step.

        Args:
            batch_size: examples per replica.
            options: XLA's options.

        Raises:
            InputError: XLA cannot compile it.
        """
        if batch_size not in self._lowered:
            self._lowered = {batch_size: self._workload.lower(self._replicas, batch_size)}
        started = time.perf_counter()
        try:
            compiled = self._lowered[batch_size].compile(compiler_options={**options, **self._fallback} or None)
        except RuntimeError as error:
            if NO_TILES in str(error) and not self._fallback:
                self._fallback = CUBLAS
                return self.compile(batch_size, options)
            raise InputError(f"--batch-size {batch_size}: XLA cannot compile the step: {reason(error)}") from error
        memory = compiled.memory_analysis()
        return CompiledStep(
            compiled.as_text(),
            batch_size,
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
            time.perf_counter() - started,
            self._fallback,
        )
