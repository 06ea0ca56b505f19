"""`python -m benchmarks.recorder`: what `jaxddp.parity.Recorder` costs a step, recorded and between recorded steps.

Loops with and without a recorder take turns in one process. Of each loop the fastest turn counts, which other work on
the machine has disturbed least.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from jaxddp import cli
from jaxddp.cli.flags import parse_plain
from jaxddp.errors import InputError
from jaxddp.parity import Recorder

PROG = "python -m benchmarks.recorder"
FEATURES, CLASSES = 64, 10
Step = Callable[["Recorder | None"], None]


@dataclass(frozen=True)
class RecorderOptions:
    """Measure the time of a step with an idle recorder, and with one that records, over that without one."""

    width: int = 128
    """Width of the two hidden layers of the MLP that trains."""
    examples: int = 32
    """Examples of a step."""
    rounds: int = 200
    """Turns of each loop."""
    steps: int = 20
    """Steps of a turn."""

    def __post_init__(self) -> None:
        for name in ("width", "examples", "rounds", "steps"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} {getattr(self, name)}: must be at least 1")


def main(argv: Sequence[str]) -> dict[str, dict[str, float]]:
    """Measure, print a line per framework, and return the ratios."""
    with cli.one_line_errors(show_traceback=False):
        options = parse_plain(RecorderOptions, argv, PROG)
    found = {}
    for side, make in (("torch", torch_step), ("jax", jax_step)):
        with tempfile.TemporaryDirectory() as folder, make(options) as (step, watch):
            found[side] = _ratios(options, Path(folder), step, watch)
        of_side = found[side]
        print(
            f"{side:5}  {of_side['microseconds']:6.0f} us a step; with an idle recorder x {of_side['idle']:.3f}, "
            f"whose call takes {of_side['call']:.1f} us; "
            f"recorded x {of_side['recorded']:.1f}"
        )
    return found


def _ratios(options: RecorderOptions, folder: Path, step: Step, watch: Callable[[Recorder], None]) -> dict[str, float]:
    """Return the time of a step, and the ratios to it."""
    idle, busy = Recorder(folder / "idle", [10**9]), Recorder(folder / "busy", 10**6)
    watch(idle)
    _seconds(step, None, options.steps)  # compiles, and warms the caches
    watch(busy)
    turns: list[tuple[Recorder | None, int]] = [(None, options.steps), (idle, options.steps), (busy, 1)]
    fastest = dict.fromkeys(range(3), float("inf"))
    for _ in range(options.rounds):
        for place, (recorder, steps) in enumerate(turns):
            fastest[place] = min(fastest[place], _seconds(step, recorder, steps))
    plain, call = fastest[0], min(_seconds(_call, idle, 1000) for _ in range(20))
    return {"microseconds": 1e6 * plain, "call": 1e6 * call, "idle": fastest[1] / plain, "recorded": fastest[2] / plain}


def _call(recorder: Recorder | None) -> None:
    if recorder is not None:
        recorder.step(None, None)


def _seconds(step: Step, recorder: Recorder | None, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step(recorder)
    return (time.perf_counter() - start) / steps


def _batch(options: RecorderOptions) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(options.examples, FEATURES)).astype("float32"), rng.integers(0, CLASSES, options.examples)


@contextmanager
def torch_step(options: RecorderOptions) -> Iterator[tuple[Step, Callable[[Recorder], None]]]:
    """Yield a step of Adam on an MLP in torch, and what a recorder is to watch."""
    import torch
    from torch import nn

    sizes = (FEATURES, options.width, options.width, CLASSES)
    layers = [one for pair in pairwise(sizes) for one in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x, y = map(torch.from_numpy, _batch(options))

    def step(recorder: Recorder | None) -> None:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if recorder is not None:
            recorder.step((x, y), loss)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield step, lambda recorder: recorder.watch(model, optimizer)
    torch.set_num_threads(threads)


@contextmanager
def jax_step(options: RecorderOptions) -> Iterator[tuple[Step, Callable[[Recorder], None]]]:
    """Yield the same step in JAX, whose program returns the gradients with a recorder and without one."""
    import jax
    import optax
    from jax import numpy as jnp

    sizes = (FEATURES, options.width, options.width, CLASSES)
    rng = np.random.default_rng(1)
    params = [jnp.asarray(0.1 * rng.normal(size=pair), "float32") for pair in pairwise(sizes)]
    tx = optax.adam(1e-3)
    x, y = _batch(options)

    def loss_of(params: list[jax.Array]) -> jax.Array:
        hidden = jax.nn.relu(jax.nn.relu(x @ params[0]) @ params[1])
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ params[2], y).mean()

    @jax.jit
    def update(params: list[jax.Array], state: optax.OptState) -> tuple[object, ...]:
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = tx.update(grads, state, params)
        return loss, grads, optax.apply_updates(params, updates), state

    @jax.jit
    def lean(params: list[jax.Array], state: optax.OptState) -> tuple[object, ...]:
        loss, _, params, state = update(params, state)
        return loss, None, params, state

    now = [params, tx.init(params)]

    def step(recorder: Recorder | None) -> None:
        loss, grads, now[0], now[1] = (lean if recorder is None else update)(*now)
        jax.block_until_ready(now[0])
        if recorder is not None:
            recorder.step((x, y), loss, grads=grads, params=now[0], opt_state=now[1])

    step(None)
    update(*now)
    yield step, lambda recorder: recorder.watch(now[0])


if __name__ == "__main__":
    main(sys.argv[1:])
