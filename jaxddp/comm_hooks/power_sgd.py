"""PowerSGD: a gradient travels as the product of two thin matrices, and what that leaves out travels later.

With M_r replica r's gradient (n, m), E_r what it has not sent so far, N replicas and a rank:

    M_r <- M_r + E_r
    P   =  orthogonal(sum_r M_r orthogonal(Q))    n x rank numbers are sent
    Q   =  1/N sum_r M_r^T P                      m x rank
    g   =  P Q^T,    E_r = M_r - g

Q starts as what torch draws, and goes on from step to step. What is too small to gain by it is averaged, and so is
everything in the first steps. `PowerSGD` takes each tensor by itself, `BatchedPowerSGD` all of them as one square.

A matrix is a tensor as torch has it, (out, in x size of the kernel): approximations by its rows are not those by its
columns. torch draws and stacks in the order of DDP's bucket, which `jaxddp.nn.functional.gradient_order` tells.

Source: Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019, arxiv.org/abs/1905.13727;
torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.flatten_util import ravel_pytree

from jaxddp.config.checks import square_side
from jaxddp.data.torch_rng import Generator
from jaxddp.distributed.collectives import alike, all_reduce, all_reduce_mean, world_size
from jaxddp.errors import InputError
from jaxddp.nn.torch_weights import from_torch_layout, to_torch_layout
from jaxddp.state import Params

Matrices = list[jax.Array]


class PowerSGDState(NamedTuple):
    """What a replica remembers.

    Attributes:
        iteration: int32 scalar, how often the hook was called.
        error: for each matrix what was not sent, E_r; () without error feedback.
        q: for each compressed matrix its Q (m, rank), the same on all replicas; () without warm start.
    """

    iteration: jax.Array
    error: Any
    q: Any


@dataclass(frozen=True, kw_only=True)
class LowRank(ABC):
    """What both hooks have in common; names and defaults are torch's.

    Attributes:
        matrix_approximation_rank: columns of P and Q.
        start_power_sgd_iter: torch's start_powerSGD_iter: so many first calls take the mean of the whole gradients.
        use_error_feedback: whether what was not sent is added to the next gradient.
        warm_start: whether Q goes on from call to call; if not, it is drawn anew in each, on the host.
        orthogonalization_epsilon: added to a column's norm, so that a matrix of zeros makes no NaN; torch's batched
            hook has none.
        random_seed: of Q.
        order: the parameters' names in the order of torch's bucket; None: reverse alphabetical.

    Raises:
        InputError: an option that makes no sense.
    """

    matrix_approximation_rank: int = 1
    start_power_sgd_iter: int = 1000
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    order: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not self.matrix_approximation_rank >= 1:
            raise InputError(f"matrix_approximation_rank {self.matrix_approximation_rank}: must be at least 1")
        memory = self.use_error_feedback or self.warm_start
        least = 2 if memory else 1  # torch's rule; its 0 would meet DDP's first bucket, which is laid out otherwise
        if not self.start_power_sgd_iter >= least:
            why = " with error feedback or warm start" if memory else ""
            raise InputError(f"start_power_sgd_iter {self.start_power_sgd_iter}: must be at least {least}{why}")
        if not self.orthogonalization_epsilon >= 0:
            raise InputError(f"orthogonalization_epsilon {self.orthogonalization_epsilon}: must be at least 0")
        if not 0 <= self.random_seed < 2**32:
            raise InputError(f"random_seed {self.random_seed}: must be from 0 to 2**32 - 1")

    @abstractmethod
    def pack(self, gradients: Params) -> Matrices:
        """Gradients as matrices."""

    @abstractmethod
    def unpack(self, matrices: Matrices, like: Params) -> Params:
        """The inverse of `pack`."""

    @abstractmethod
    def compresses(self, rows: int, columns: int) -> bool:
        """Whether a matrix is sent as P and Q."""

    def init(self, params: Params) -> PowerSGDState:
        """The state before the first call."""
        packed = self.pack(params)
        error = jax.tree.map(jnp.zeros_like, packed) if self.use_error_feedback else ()
        q = jax.tree.map(jnp.asarray, self._drawn(self._shapes(packed), 0)) if self.warm_start else ()
        return PowerSGDState(jnp.zeros((), jnp.int32), error, q)

    def reduce(self, gradients: Params, state: PowerSGDState) -> tuple[Params, PowerSGDState]:
        """The gradients of all replicas as one, and what this replica remembers."""

        iteration = alike(state.iteration)

        def whole() -> tuple[Params, Any, Any]:
            return all_reduce_mean(gradients), state.error, state.q

        def compressed() -> tuple[Params, Any, Any]:
            given = self.pack(gradients)
            if self.use_error_feedback:
                given = jax.tree.map(jnp.add, given, state.error)
            reduced, q = self._approximated(given, state.q if self.warm_start else self._redrawn(given, iteration))
            error = jax.tree.map(jnp.subtract, given, reduced) if self.use_error_feedback else ()
            return self.unpack(reduced, gradients), error, q if self.warm_start else ()

        reduced, error, q = lax.cond(iteration < self.start_power_sgd_iter, whole, compressed)
        return reduced, PowerSGDState(state.iteration + 1, error, q)

    def _approximated(self, matrices: Matrices, q: Matrices) -> tuple[Matrices, Matrices]:
        """P Q^T of what is compressed, and the mean of the others; the next Q."""
        chosen = self._chosen(matrices)
        m = [matrices[number] for number in chosen]
        others = {number: matrix for number, matrix in enumerate(matrices) if number not in chosen}
        q = [orthogonalize(matrix, self.orthogonalization_epsilon) for matrix in q]
        sums, p = _in_one(all_reduce, (others, [_product(a, b) for a, b in zip(m, q, strict=True)]))
        p = [orthogonalize(matrix, self.orthogonalization_epsilon) for matrix in p]
        q = _in_one(all_reduce_mean, [_product(a.T, b) for a, b in zip(m, p, strict=True)])
        reduced = {number: _product(a, b.T) for number, a, b in zip(chosen, p, q, strict=True)}
        reduced |= {number: total / world_size() for number, total in sums.items()}
        return [reduced[number] for number in range(len(matrices))], q

    def _chosen(self, matrices: Matrices) -> list[int]:
        """The numbers of the matrices that are compressed; torch takes those of one shape together."""
        chosen = [number for number, matrix in enumerate(matrices) if self.compresses(*matrix.shape)]
        shapes = [matrices[number].shape for number in chosen]
        return sorted(chosen, key=lambda number: shapes.index(matrices[number].shape))

    def _drawn(self, shapes: Sequence[jax.ShapeDtypeStruct], number: int) -> list[np.ndarray]:
        """The Q that torch's hook draws the `number`-th time, from 0 on."""
        generator = Generator(int(_seeds(self.random_seed, 1 << number.bit_length())[number]))
        return [generator.normal(x.shape, dtype=x.dtype) for x in shapes]

    def _redrawn(self, matrices: Matrices, iteration: jax.Array) -> Matrices:
        """The same inside of a compiled program, for this call."""
        shapes = self._shapes(matrices)

        # As bytes: jax calls back from a thread of its own, where float64 is not enabled and would not come through.
        def draw(number: jax.Array) -> list[np.ndarray]:
            return [q[..., None].view(np.uint8) for q in self._drawn(shapes, int(number))]

        drawn = jax.pure_callback(
            draw,
            [jax.ShapeDtypeStruct((*x.shape, x.dtype.itemsize), np.uint8) for x in shapes],
            iteration - self.start_power_sgd_iter,
            vmap_method="sequential",
        )
        return [lax.bitcast_convert_type(q, x.dtype) for q, x in zip(drawn, shapes, strict=True)]

    def _shapes(self, matrices: Matrices) -> list[jax.ShapeDtypeStruct]:
        """Of each Q."""
        chosen = [matrices[number] for number in self._chosen(matrices)]
        ranks = [min(*x.shape, self.matrix_approximation_rank) for x in chosen]
        return [jax.ShapeDtypeStruct((x.shape[1], r), x.dtype) for x, r in zip(chosen, ranks, strict=True)]

    def _names(self, gradients: Params) -> list[str]:
        """In the order of torch's bucket."""
        if self.order is None:
            return sorted(gradients, reverse=True)
        if missing := sorted(gradients.keys() - set(self.order)):
            raise InputError(f"order: must hold each parameter's name; {', '.join(missing)} is missing")
        return [name for name in self.order if name in gradients]  # what is frozen has no gradient


@dataclass(frozen=True, kw_only=True)
class PowerSGD(LowRank):
    """torch's powerSGD_hook: each tensor by itself, where that saves enough.

    A tensor (n, m) is compressed if (n + m) x rank x min_compression_rate < n x m.

    Attributes:
        min_compression_rate: how much less must be sent, at least.

    >>> hook = PowerSGD(matrix_approximation_rank=2)
    >>> state = hook.init({"fc.kernel": jnp.zeros((30, 20)), "fc.bias": jnp.zeros(20)})
    >>> [q.shape for q in state.q]
    [(30, 2)]
    """

    min_compression_rate: float = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.min_compression_rate >= 0:
            raise InputError(f"min_compression_rate {self.min_compression_rate}: must be at least 0")

    def pack(self, gradients: Params) -> Matrices:
        """One matrix per tensor, in torch's layout."""
        return [_as_matrix(name, gradients[name]) for name in self._names(gradients)]

    def unpack(self, matrices: Matrices, like: Params) -> Params:
        """Each tensor from its matrix."""
        names = self._names(like)
        return {name: _from_matrix(name, x, like[name]) for name, x in zip(names, matrices, strict=True)}

    def compresses(self, rows: int, columns: int) -> bool:
        """Whether it saves enough."""
        sent = (rows + columns) * min(rows, columns, self.matrix_approximation_rank)
        return sent * self.min_compression_rate < rows * columns


@dataclass(frozen=True, kw_only=True)
class BatchedPowerSGD(LowRank):
    """torch's batched_powerSGD_hook: all tensors in a row, cut into the rows of a square, with zeros at the end.

    >>> state = BatchedPowerSGD().init({"fc.kernel": jnp.zeros((30, 20)), "fc.bias": jnp.zeros(20)})
    >>> [q.shape for q in state.q]  # 25 x 25 is the first square with room for 620 numbers
    [(25, 1)]
    """

    def pack(self, gradients: Params) -> Matrices:
        """The square."""
        flat = jnp.concatenate([_as_matrix(name, gradients[name]).ravel() for name in self._names(gradients)])
        side = square_side(flat.size)
        if side < (rank := self.matrix_approximation_rank):
            raise InputError(f"matrix_approximation_rank {rank}: must be at most {side}, the square's side")
        return [jnp.pad(flat, (0, side**2 - flat.size)).reshape(side, side)]

    def unpack(self, matrices: Matrices, like: Params) -> Params:
        """The tensors from its rows."""
        names = self._names(like)
        ends = np.cumsum([like[name].size for name in names])
        parts = jnp.split(matrices[0].ravel(), ends)
        return {name: _from_matrix(name, part, like[name]) for name, part in zip(names, parts, strict=False)}

    def compresses(self, rows: int, columns: int) -> bool:
        """Always."""
        return True


def orthogonalize(matrix: jax.Array, epsilon: float = 0) -> jax.Array:
    """An orthonormal basis of the columns: by Gram-Schmidt up to rank 2 and in 16 bits, else by Householder's QR.

    Args:
        matrix: (n, rank), n >= rank.
        epsilon: added to a column's norm before it is divided by it; QR has no need of it.

    >>> print(orthogonalize(jnp.array([[3.0, 1.0], [0.0, -2.0]])))
    [[ 1.  0.]
     [ 0. -1.]]
    """
    rank = matrix.shape[1]
    if rank > 2 and matrix.dtype.itemsize > 2:
        return jnp.linalg.qr(matrix).Q
    columns = []
    for _ in range(rank):
        column, matrix = matrix[:, :1], matrix[:, 1:]
        column = column / (jnp.linalg.norm(column) + epsilon)
        columns.append(column)
        matrix = matrix - column * (column * matrix).sum(axis=0, keepdims=True)
    return jnp.concatenate(columns, axis=1)


def _as_matrix(name: str, x: jax.Array) -> jax.Array:
    tensor = jnp.atleast_1d(to_torch_layout(name, x))
    return tensor.reshape(len(tensor), -1)


def _from_matrix(name: str, x: jax.Array, like: jax.Array) -> jax.Array:
    shape = jax.eval_shape(lambda: to_torch_layout(name, like)).shape
    return from_torch_layout(name, x.reshape(shape)).astype(like.dtype)


def _in_one(collective: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    """One message, where XLA might make several of them that wait for each other."""
    flat, unravel = ravel_pytree(tree)
    return unravel(collective(flat))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")  # GPUs would round to TF32, as torch does not


@lru_cache(maxsize=4)
def _seeds(random_seed: int, count: int) -> np.ndarray:
    """The first so many that torch's hook takes for Q; a stream has no shorter way to a later one."""
    return np.random.RandomState(random_seed).randint(1_000_000_000, size=count)
