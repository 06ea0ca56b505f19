"""Floating-point operations and memory traffic of each instruction of a compiled program."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from jaxddp.plan.hlo import Array, CompiledProgram, Instruction

Kind = Literal["matrix", "convolution", "rest"]
# Opcodes that compute and move nothing.
FREE = {
    *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "replica-id"),
    *("add-dependency", "opt-barrier", "domain"),
}
# Opcodes that move or create elements without arithmetic.
_MOVES = FREE | {
    *("broadcast", "reshape", "transpose", "slice", "concatenate", "copy", "iota", "convert", "gather", "pad"),
    *("dynamic-slice", "dynamic-update-slice", "reverse", "scatter", "bitcast-convert", "fusion", "call", "while"),
    *("conditional", "custom-call", "dot", "convolution", "reduce", "reduce-window", "select-and-scatter", "sort"),
}
_PARTIAL = ("slice", "dynamic-slice", "gather")  # read no more of their first operand than they return
_IN_PLACE = ("dynamic-update-slice", "scatter")  # leave the rest of their first operand as it is


@dataclass(frozen=True)
class Cost:
    """Work of one instruction on one device.

    Attributes:
        matrix, convolution, rest: floating-point operations of matrix products, of convolutions, and all others.
        bytes: bytes read from and written to memory.
        dtype: dtype of the operands of its products: "bf16", "f32", "tf32", ...; "" without products.
        kernels: kernels that are launched.
    """

    matrix: float = 0
    convolution: float = 0
    rest: float = 0
    bytes: float = 0
    dtype: str = ""
    kernels: int = 0

    @property
    def flops(self) -> float:
        """All floating-point operations."""
        return self.matrix + self.convolution + self.rest

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.matrix + other.matrix,
            self.convolution + other.convolution,
            self.rest + other.rest,
            self.bytes + other.bytes,
            self.dtype or other.dtype,
            self.kernels + other.kernels,
        )


@dataclass(frozen=True)
class Costs:
    """Costs of the instructions of a program."""

    program: CompiledProgram

    def of(self, computation: str, one: Instruction) -> Cost:
        """Return the cost of an instruction other than a loop, branch or message."""
        if one.opcode in FREE or one.opcode.endswith("-done"):
            return Cost()
        names = self.program.by_name[computation]
        operands = [names[name] for name in one.operands if name in names]
        if one.opcode == "fusion":
            body = one.called[0]
            inside = self._flops_inside(body)
            return inside + Cost(bytes=self._traffic(body, operands, one), kernels=1)
        arrays = [array for operand in operands for array in operand.results]
        moved = one.bytes + sum(array.bytes for array in arrays)
        if one.opcode in _PARTIAL:
            moved = 2 * one.bytes
        elif one.opcode in _IN_PLACE:
            moved = 2 * sum(array.bytes for array in arrays[1:])
        return self._flops(one, arrays) + Cost(bytes=moved, kernels=1)

    def _flops_inside(self, computation: str) -> Cost:
        total = self._inside.get(computation)
        if total is None:
            names = self.program.by_name[computation]
            total = Cost()
            for one in self.program.computations[computation]:
                if one.opcode in ("fusion", "call"):  # nested in a Triton fusion
                    total += self._flops_inside(one.called[0])
                else:
                    total += self._flops(one, [a for name in one.operands for a in names[name].results])
            self._inside[computation] = total
        return total

    @cached_property
    def _inside(self) -> dict[str, Cost]:
        return {}

    def _flops(self, one: Instruction, operands: Sequence[Array]) -> Cost:
        """Return the floating-point operations of one instruction, given the arrays of its operands."""
        if one.opcode == "dot":
            contracted = math.prod(operands[0].shape[axis] for axis in one.sizes("lhs_contracting_dims"))
            return Cost(matrix=2 * one.results[0].size * contracted, dtype=_dtype(one, operands))
        if one.opcode == "convolution":
            return Cost(
                convolution=_convolution(one, operands, one.results[0], operands[1]), dtype=_dtype(one, operands)
            )
        if one.opcode == "custom-call":
            return _library_call(one, operands)
        if one.opcode in ("reduce", "reduce-window", "select-and-scatter"):
            return Cost(rest=operands[0].size if operands else 0)
        is_float = bool(one.results) and re.match(r"b?f\d", one.results[0].dtype) is not None
        return Cost(rest=one.results[0].size) if is_float and one.opcode not in _MOVES else Cost()

    def _traffic(self, body: str, operands: Sequence[Instruction], fusion: Instruction) -> float:
        """Return the bytes that a fusion reads and writes; a slice of a large operand counts as the slice."""
        inside = self.program.computations[body]
        users: dict[str, list[Instruction]] = {}
        for one in inside:
            for name in one.operands:
                users.setdefault(name, []).append(one)
        parameters = [one for one in inside if one.opcode == "parameter"]
        read = sum(min(_read(one, users), one.bytes) for one in parameters)
        return read + sum(_written(one, self.program.by_name[body]) for one in inside if one.is_root)


def _read(one: Instruction, users: dict[str, list[Instruction]]) -> float:
    """Return the bytes of a value that its users read."""
    total = 0.0
    for user in users.get(one.name, []):
        if user.opcode == "bitcast":
            total += _read(user, users)
        elif user.opcode in _PARTIAL and user.operands[0] == one.name:
            total += user.bytes
        elif not (user.opcode in _IN_PLACE and user.operands[0] == one.name):
            return one.bytes
    return total


def _written(root: Instruction, names: dict[str, Instruction]) -> float:
    """Return the bytes that a fusion's result costs; an update in place costs the updated part."""
    if root.opcode == "tuple":
        return sum(_written(names[name], names) for name in root.operands)
    if root.opcode == "bitcast" and root.operands[0] in names:
        return _written(names[root.operands[0]], names)
    if root.opcode in _IN_PLACE:
        return names[root.operands[-1 if root.opcode == "scatter" else 1]].bytes
    return root.bytes


def _dtype(one: Instruction, operands: Sequence[Array]) -> str:
    """Return the dtype in which tensor cores multiply; "tf32" for float32 products of default precision."""
    dtype = max(operands[:2], key=lambda array: array.bits).dtype
    exact = re.search(r"operand_precision=\{highest|\"operand_precision\":\[\"HIGHEST\"", one.attributes)
    if dtype != "f32" or exact or "algorithm=dot_f32_f32_f32" in one.attributes:
        return dtype
    algorithm = one.text("algorithm")
    return algorithm.split("_")[1] if algorithm.startswith("dot_") else "tf32"


def _convolution(one: Instruction, operands: Sequence[Array], output: Array, filters: Array) -> float:
    """Return 2 x (values of one channel of the output) x (numbers of the filter)."""
    labels = one.text("dim_labels").partition("->")[2]
    return 2 * output.size / output.shape[labels.index("f")] * filters.size


def _library_call(one: Instruction, operands: Sequence[Array]) -> Cost:
    """Return the products of a call of cuBLAS or cuDNN."""
    target = one.text("custom_call_target")
    if "$conv" in target:
        output, filters = one.results[0], operands[1]
        if "BackwardInput" in target:
            output = operands[0]
        elif "BackwardFilter" in target:
            output, filters = operands[1], one.results[0]
        return Cost(convolution=_convolution(one, operands, output, filters), dtype=_dtype(one, operands))
    if "matmul" in target or "gemm" in target:
        match = re.search(r'"dot_dimension_numbers":(\{.*?\})', one.attributes)
        axes = json.loads(match[1]).get("lhs_contracting_dimensions", []) if match else []
        contracted = math.prod(operands[0].shape[int(axis)] for axis in axes)
        return Cost(matrix=2 * one.results[0].size * contracted, dtype=_dtype(one, operands))
    return Cost()
