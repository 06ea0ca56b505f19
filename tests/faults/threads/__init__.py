"""Public threads about JAX programs that train unlike PyTorch's, each re-enacted as a small port.

The programs are written for this project from what the threads describe; no line is theirs. `verdicts.json` has what
the check said to each; `python -m benchmarks.scoreboard --parts threads --threads-page docs/threads.md` writes both
anew.
"""

from . import losses, models, open_questions, optimizers, replicas, silent_evaluation, silent_start, silent_training
from .thread import Thread, write_port

__all__ = ["GROUPS", "THREADS", "Thread", "write_port"]

# Heading on the page -> name -> thread.
GROUPS: dict[str, dict[str, Thread]] = {
    "Layers and weights": models.THREADS,
    "Losses": losses.THREADS,
    "Optimizers": optimizers.THREADS,
    "Replicas, micro-batches and schedules": replicas.THREADS,
    "Silent: initial weights, types, random numbers": silent_start.THREADS,
    "Silent: schedules, clipping, devices": silent_training.THREADS,
    "Silent: evaluation, weights outside of the step, data": silent_evaluation.THREADS,
    "Open": open_questions.THREADS,
}
THREADS: dict[str, Thread] = {name: thread for group in GROUPS.values() for name, thread in group.items()}
