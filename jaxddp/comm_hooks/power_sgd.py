"""PowerSGD: gradients sent as products of two thin matrices, with the approximation error added to the next gradient.

With M_r the gradient of replica r (n, m), E_r its accumulated error, N replicas and a rank:

    M_r <- M_r + E_r
    P   =  orthogonal(sum_r M_r orthogonal(Q))    n x rank numbers sent
    Q   =  1/N sum_r M_r^T P                      m x rank numbers sent
    g   =  P Q^T,    E_r = M_r - g

The first Q holds the random numbers that torch draws; each later step starts from the Q of the step before. Tensors
too small to gain from compression are averaged, and so are all tensors in the first steps. `PowerSGD` compresses each
tensor separately, `BatchedPowerSGD` compresses all tensors as one square matrix.

Matrices have torch's layout, (out, in x kernel size), because the approximation of a transposed matrix differs. torch
draws Q and stacks tensors in the order of DDP's bucket, which `jaxddp.nn.functional.gradient_order` returns.

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
from jaxddp.config.ranges import check_range
from jaxddp.data.torch_rng import Generator
from jaxddp.distributed.collectives import alike, all_reduce, all_reduce_mean, world_size
from jaxddp.errors import InputError
from jaxddp.state import Params
from jaxddp.torch_layout import from_torch_layout, to_torch_layout

Matrices = list[jax.Array]


class PowerSGDState(NamedTuple):
    """State of the hook on one replica.

    Attributes:
        iteration: int32 scalar, number of calls so far.
        error: E_r of each matrix; () without error feedback.
        q: Q (m, rank) of each compressed matrix, the same on all replicas; () without warm start.
    """

    iteration: jax.Array
    error: Any
    q: Any


@dataclass(frozen=True, kw_only=True)
class LowRank(ABC):
    """Base class of both hooks, with torch's names and defaults.

    Attributes:
        matrix_approximation_rank: number of columns of P and Q.
        start_power_sgd_iter: torch's start_powerSGD_iter, the number of first calls that compress nothing.
        use_error_feedback: whether to add the error of one call to the gradient of the next.
        warm_start: whether to start from the Q of the previous call; if not, each call draws Q again, on the host.
        orthogonalization_epsilon: added to a column's norm, so that a matrix of zeros yields no NaN; torch's batched
            hook has none.
        random_seed: seed of Q.
        order: parameter names in the order of torch's bucket; None: reverse alphabetical.

    Raises:
        InputError: an option is out of range.
    """

    matrix_approximation_rank: int = 1
    start_power_sgd_iter: int = 1000
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    order: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_range("matrix_approximation_rank", self.matrix_approximation_rank)
        # torch also allows 0, but DDP lays out its first bucket differently.
        check_range("start_power_sgd_iter", self.start_power_sgd_iter)
        if self.start_power_sgd_iter < 2 and (self.use_error_feedback or self.warm_start):
            given = f"start_power_sgd_iter {self.start_power_sgd_iter}"
            raise InputError(f"{given}: must be at least 2 with error feedback or warm start")
        if not self.orthogonalization_epsilon >= 0:
            raise InputError(f"orthogonalization_epsilon {self.orthogonalization_epsilon}: must be at least 0")
        if not 0 <= self.random_seed < 2**32:
            raise InputError(f"random_seed {self.random_seed}: must be from 0 to 2**32 - 1")

    @abstractmethod
    def pack(self, gradients: Params) -> Matrices:
        """Lay out gradients as matrices."""

    @abstractmethod
    def unpack(self, matrices: Matrices, like: Params) -> Params:
        """Invert `pack`; `like` has the shapes and dtypes."""

    @abstractmethod
    def compresses(self, rows: int, columns: int) -> bool:
        """Return whether a matrix of this size is sent as P and Q."""

    def init(self, params: Params) -> PowerSGDState:
        """Return the state before the first call."""
        packed = self.pack(params)
        error = jax.tree.map(jnp.zeros_like, packed) if self.use_error_feedback else ()
        q = jax.tree.map(jnp.asarray, self._drawn(self._shapes(packed), 0)) if self.warm_start else ()
        return PowerSGDState(jnp.zeros((), jnp.int32), error, q)

    def reduce(self, gradients: Params, state: PowerSGDState) -> tuple[Params, PowerSGDState]:
        """Return the reduced gradients, the same on all replicas, and the new state of this replica."""
        iteration = alike(state.iteration)

        def uncompressed() -> tuple[Params, Any, Any]:
            return all_reduce_mean(gradients), state.error, state.q

        def compressed() -> tuple[Params, Any, Any]:
            given = self.pack(gradients)
            if self.use_error_feedback:
                given = jax.tree.map(jnp.add, given, state.error)
            reduced, q = self._approximated(given, state.q if self.warm_start else self._redrawn(given, iteration))
            error = jax.tree.map(jnp.subtract, given, reduced) if self.use_error_feedback else ()
            return self.unpack(reduced, gradients), error, q if self.warm_start else ()

        reduced, error, q = lax.cond(iteration < self.start_power_sgd_iter, uncompressed, compressed)
        return reduced, PowerSGDState(state.iteration + 1, error, q)

    def _approximated(self, matrices: Matrices, q: Matrices) -> tuple[Matrices, Matrices]:
        """Return P Q^T of each compressed matrix and the mean of each other one, and the next Q."""
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
        """Return the indices of the compressed matrices, those of one shape together, as in torch."""
        chosen = [number for number, matrix in enumerate(matrices) if self.compresses(*matrix.shape)]
        shapes = [matrices[number].shape for number in chosen]
        return sorted(chosen, key=lambda number: shapes.index(matrices[number].shape))

    def _drawn(self, shapes: Sequence[jax.ShapeDtypeStruct], number: int) -> list[np.ndarray]:
        """Return the Q that torch's hook draws in its `number`-th draw, counted from 0."""
        generator = Generator(int(_seeds(self.random_seed, 1 << number.bit_length())[number]))
        return [generator.normal(x.shape, dtype=x.dtype) for x in shapes]

    def _redrawn(self, matrices: Matrices, iteration: jax.Array) -> Matrices:
        """Draw Q for this call inside a compiled program, by a callback to the host."""
        shapes = self._shapes(matrices)

        # As bytes: jax runs the callback in another thread, where float64 is not enabled and would be rounded.
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
        """Return the shape and dtype of each Q."""
        chosen = [matrices[number] for number in self._chosen(matrices)]
        ranks = [min(*x.shape, self.matrix_approximation_rank) for x in chosen]
        return [jax.ShapeDtypeStruct((x.shape[1], r), x.dtype) for x, r in zip(chosen, ranks, strict=True)]

    def _names(self, gradients: Params) -> list[str]:
        """Return the names of the gradients in the order of torch's bucket."""
        if self.order is None:
            return sorted(gradients, reverse=True)
        if missing := sorted(gradients.keys() - self.order):
            raise InputError(f"order: must hold each parameter's name; {', '.join(missing)} is missing")
        return [name for name in self.order if name in gradients]  # frozen parameters have no gradient


@dataclass(frozen=True, kw_only=True)
class PowerSGD(LowRank):
    """Per-tensor PowerSGD, torch's powerSGD_hook.

    A tensor (n, m) is compressed if (n + m) x rank x min_compression_rate < n x m.

    Attributes:
        min_compression_rate: smallest ratio of uncompressed to compressed size that is worth compressing.

    >>> hook = PowerSGD(matrix_approximation_rank=2)
    >>> state = hook.init({"fc.kernel": jnp.zeros((30, 20)), "fc.bias": jnp.zeros(20)})
    >>> [q.shape for q in state.q]
    [(30, 2)]
    """

    min_compression_rate: float = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("min_compression_rate", self.min_compression_rate)

    def pack(self, gradients: Params) -> Matrices:
        """Reshape each tensor to a matrix in torch's layout."""
        return [_as_matrix(name, gradients[name]) for name in self._names(gradients)]

    def unpack(self, matrices: Matrices, like: Params) -> Params:
        """Reshape each matrix back to its tensor."""
        names = self._names(like)
        return {name: _from_matrix(name, x, like[name]) for name, x in zip(names, matrices, strict=True)}

    def compresses(self, rows: int, columns: int) -> bool:
        """Return whether P and Q are smaller than the matrix by more than `min_compression_rate`."""
        sent = (rows + columns) * min(rows, columns, self.matrix_approximation_rank)
        return sent * self.min_compression_rate < rows * columns


@dataclass(frozen=True, kw_only=True)
class BatchedPowerSGD(LowRank):
    """PowerSGD of all tensors concatenated, zero-padded and reshaped to a square, torch's batched_powerSGD_hook.

    >>> state = BatchedPowerSGD().init({"fc.kernel": jnp.zeros((30, 20)), "fc.bias": jnp.zeros(20)})
    >>> [q.shape for q in state.q]  # 25 x 25 is the smallest square with room for 620 numbers
    [(25, 1)]
    """

    def pack(self, gradients: Params) -> Matrices:
        """Concatenate all tensors into one square matrix."""
        flat = jnp.concatenate([_as_matrix(name, gradients[name]).ravel() for name in self._names(gradients)])
        side = square_side(flat.size)
        if side < (rank := self.matrix_approximation_rank):
            raise InputError(f"matrix_approximation_rank {rank}: must be at most {side}, the square's side")
        return [jnp.pad(flat, (0, side**2 - flat.size)).reshape(side, side)]

    def unpack(self, matrices: Matrices, like: Params) -> Params:
        """Split the square matrix back into tensors."""
        names = self._names(like)
        ends = np.cumsum([like[name].size for name in names])
        parts = jnp.split(matrices[0].ravel(), ends)
        return {name: _from_matrix(name, part, like[name]) for name, part in zip(names, parts, strict=False)}

    def compresses(self, rows: int, columns: int) -> bool:
        """Return True: the square is always compressed."""
        return True


def orthogonalize(matrix: jax.Array, epsilon: float = 0) -> jax.Array:
    """Return an orthonormal basis of the columns, by Gram-Schmidt up to rank 2 and in 16 bits, else by Householder QR.

    Args:
        matrix: (n, rank), n >= rank.
        epsilon: added to a column's norm before the division; not used by QR.

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
    """Apply a collective to a tree as one message, which XLA might otherwise split."""
    flat, unravel = ravel_pytree(tree)
    return unravel(collective(flat))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")  # GPUs would round to TF32, which torch does not do


@lru_cache(maxsize=4)
def _seeds(random_seed: int, count: int) -> np.ndarray:
    """Return the seeds of torch's first `count` draws of Q; a later seed needs all before it."""
    return np.random.RandomState(random_seed).randint(1_000_000_000, size=count)
