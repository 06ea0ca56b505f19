"""torch DDP as a contender: ranks in child processes that stay up and train on request; needs no jax."""

import contextlib
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from jaxddp.config import TrainConfig
from torch_ref.config import TorchConfig
from torch_ref.devices import local_device
from torch_ref.distributed import World, process_group
from torch_ref.metrics import all_reduce_sums, means, total
from torch_ref.step import train_step
from torch_ref.train import Run, build

TIMEOUT = 300.0  # seconds that a rank may take to answer

Timing = tuple[float, float]  # seconds, and the mean loss of the last epoch


class TorchRanks:
    """Ranks, seen from the parent process."""

    def __init__(self, connections: Sequence[Connection]):
        self._connections = connections

    def train(self, world_size: int, config: TrainConfig, epochs: range) -> Timing:
        """Train from the start on the first `world_size` ranks.

        Returns:
            The seconds of the slowest rank, and the mean loss of the last epoch.
        """
        connections = self._connections[:world_size]
        for connection in connections:
            connection.send((world_size, config, epochs))
        timings = _answers(connections)
        return max(seconds for seconds, _ in timings), timings[0][1]


@contextlib.contextmanager
def torch_ranks(size: int, platform: str) -> Iterator[TorchRanks]:
    """Start the ranks, and end all of them on exit."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        pipes = [context.Pipe() for _ in range(size)]
        processes = [
            context.Process(
                target=_serve, args=(rank, size, platform, str(Path(folder) / "store"), theirs), daemon=True
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        try:
            for process, (_, theirs) in zip(processes, pipes, strict=True):
                process.start()
                theirs.close()  # so that the connection ends when the rank does
            _answers([ours for ours, _ in pipes])
            yield TorchRanks([ours for ours, _ in pipes])
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
            for ours, _ in pipes:
                ours.close()


def _answers(connections: Sequence[Connection]) -> list[Timing]:
    answers: dict[int, Timing] = {}
    while len(answers) < len(connections):
        waiting = [rank for rank in range(len(connections)) if rank not in answers]
        ready = wait([connections[rank] for rank in waiting], TIMEOUT)
        if not ready:
            raise RuntimeError(f"torch ranks {waiting} have not answered for {TIMEOUT:.0f} s")
        for rank in waiting:
            if connections[rank] in ready:
                answers[rank] = connections[rank].recv()
                if isinstance(answers[rank], str):
                    raise RuntimeError(f"torch rank {rank} failed:\n{answers[rank]}")
    return [answers[rank] for rank in range(len(connections))]


def _serve(rank: int, size: int, platform: str, store_file: str, connection: Connection) -> None:
    if platform == "cpu":
        torch.set_num_threads(1)  # as in torch_ref.train: the replicas share the cores
    try:
        device = local_device(TorchConfig(platform=platform), rank)
        with process_group(rank, size, device, dist.FileStore(store_file, size)) as everyone:
            # A collective call: all processes must take part, also those outside of the group.
            groups = {count: dist.new_group(list(range(count))) for count in range(1, size + 1)}
            runs: dict[int, tuple[TrainConfig, Run]] = {}
            connection.send((0.0, 0.0))
            while True:
                world_size, config, epochs = connection.recv()
                if world_size not in runs or runs[world_size][0] != config:
                    world = World(rank, world_size, everyone.device, groups[world_size])
                    torch_config = TorchConfig(**vars(config) | {"devices": world_size, "platform": platform})
                    runs[world_size] = config, build(world, torch_config)
                connection.send(_train(runs[world_size][1], epochs))
    except EOFError:
        pass  # the benchmark has ended
    except Exception:
        connection.send(traceback.format_exc())


def _train(run: Run, epochs: range) -> Timing:
    """Run the training loop of torch_ref.train without log, evaluation and checkpoints; restore the initial state."""
    module, optimizer, scheduler = run.state.module, run.state.optimizer, run.state.scheduler
    start = {name: value.clone() for name, value in module.state_dict().items()}
    run.model.train()
    run.world.all_reduce(torch.zeros(1, device=run.world.device)).item()  # start together
    loss, started = 0.0, time.perf_counter()
    for epoch in epochs:
        sums = [
            train_step(run.model, optimizer, scheduler, micro_batches, run.world)
            for micro_batches in run.loader.epoch(epoch)
        ]
        loss = means(total(all_reduce_sums(sums, run.world)))["loss"]
    seconds = time.perf_counter() - started
    module.load_state_dict(start)
    optimizer.state.clear()
    return seconds, loss
