"""Processes of a run: one per replica, started here or by torchrun; none is left behind.

A rank that fails ends the run: the other ranks are ended, and the launching process raises the error in one line that
names the rank.
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

from jaxddp.errors import InputError, TrainingError
from jaxddp.files import write_atomically
from torch_ref.config import TorchTrainerConfig
from torch_ref.devices import local_device, num_replicas, under_torchrun
from torch_ref.distributed import World, process_group

Main = Callable[[World, Any], Any]  # the second: the configuration that is passed to `launch`

LOCALHOST = "127.0.0.1"
SLOW_IMPORTS = ["torch", "torch._dynamo"]  # seconds each, so imported once for all ranks; optimizers use the second
PATIENCE = 3.0  # seconds that the other ranks have to end after the first failure


def launch(main: Main, config: TorchTrainerConfig) -> list[Any]:
    """Run `main(world, config)` on every rank, each in a separate process, and wait for all.

    Under torchrun this process is one of the ranks. A single rank runs in this process.

    Args:
        main: function at the top level of a module, which the ranks import. It may return tensors, numbers, strings,
            and lists, tuples and dictionaries of them.
        config: configuration with the number of devices, the platform and the strategy.

    Returns:
        The results of all ranks, in order; under torchrun, only of this rank. Tensors from other processes are on
        the CPU.

    Raises:
        TrainingError: a rank failed or was killed; the message names it.
        InputError: bad input on a rank.
    """
    if config.strategy == "single":
        return [main(World(device=local_device(config, 0)), config)]
    if under_torchrun():
        return [_join_torchrun(main, config)]
    if num_replicas(config) == 1:
        with process_group(0, 1, local_device(config, 0), dist.HashStore()) as world:
            return [main(world, config)]
    return _spawn(main, config, num_replicas(config))


def _join_torchrun(main: Main, config: TorchTrainerConfig) -> Any:
    rank = int(os.environ["RANK"])
    device = local_device(config, int(os.environ["LOCAL_RANK"]))
    try:
        return _run(main, config, rank, num_replicas(config), device, store=None)
    except Exception as error:
        raise _named(rank, type(error).__name__, str(error), getattr(error, "frames", ())) from error


def _spawn(main: Main, config: TorchTrainerConfig, world_size: int) -> list[Any]:
    # The ranks connect through a store in this process; the system picks a free port.
    store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="torch_ref-") as reports:
        args = (main, config, world_size, store.port, reports)
        mp.set_forkserver_preload(SLOW_IMPORTS)
        processes = mp.start_processes(_rank_process, args, world_size, False, start_method="forkserver").processes
        try:
            if _one_has_failed(processes):
                raise _cause([process.exitcode for process in processes], Path(reports))
            return [_result(reports, rank) for rank in range(world_size)]
        finally:
            _end(processes)


def _result(reports: str, rank: int) -> Any:
    return torch.load(Path(reports, f"{rank}.pt"), map_location="cpu", weights_only=True)


def _rank_process(rank: int, main: Main, config: TorchTrainerConfig, world_size: int, port: int, reports: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # tqdm's default is a semaphore, which a killed rank would leave behind
    try:
        store = dist.TCPStore(LOCALHOST, port, is_master=False)
        torch.save(_run(main, config, rank, world_size, local_device(config, rank), store), f"{reports}/{rank}.pt")
    except Exception as error:
        _report(Path(reports), rank, error)
        sys.stdout.flush()
        os._exit(1)


def _report(reports: Path, rank: int, error: Exception) -> None:
    """Write an error for the launcher, in one piece: it reads the reports while other ranks still write theirs."""
    report = {"rank": rank, "time": time.monotonic(), "kind": type(error).__name__, "message": str(error)}
    report |= {"traceback": "".join(traceback.format_exception(error)), "frames": getattr(error, "frames", ())}
    write_atomically(reports / f"{rank}.json", json.dumps(report).encode())


def _end_with_launcher() -> None:
    """Interrupt this rank if the launcher is killed, so that it closes its files."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "runs in a rank's process"
    launcher.join()
    main = threading.main_thread().ident
    assert main is not None, "it runs"
    signal.pthread_kill(main, signal.SIGINT)


def _run(
    main: Main, config: TorchTrainerConfig, rank: int, world_size: int, device: torch.device, store: dist.Store | None
) -> Any:
    if device.type == "cpu":
        torch.set_num_threads(1)  # the replicas share the cores
    with process_group(rank, world_size, device, store) as world:
        return main(world, config)


def _one_has_failed(processes: list[BaseProcess]) -> bool:
    """Wait until all processes have ended or one has failed; return whether one has."""
    running = list(processes)
    while running and not any(process.exitcode for process in processes):
        wait([process.sentinel for process in running])
        running = [process for process in running if process.exitcode is None]
    return any(process.exitcode for process in processes)


def _end(processes: list[BaseProcess]) -> None:
    """End all ranks, after giving them `PATIENCE` to close their files."""
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
        process.kill()
        process.join()


def _cause(exitcodes: list[int | None], reports: Path) -> Exception:
    """Return the error of the rank that failed first; the others fail because it is missing."""
    for rank, exitcode in enumerate(exitcodes):
        if exitcode is not None and exitcode < 0:
            return TrainingError(f"rank {rank}: killed by {signal.Signals(-exitcode).name}")
    errors = [json.loads(path.read_text()) for path in reports.glob("*.json")]
    if not errors:
        rank = next(rank for rank, exitcode in enumerate(exitcodes) if exitcode)
        return TrainingError(f"rank {rank}: ended with exit code {exitcodes[rank]}")
    first = min(errors, key=lambda report: report["time"])
    error = _named(first["rank"], first["kind"], first["message"], tuple(first["frames"]))
    error.__cause__ = _RankTraceback(first["traceback"])
    return error


class _RankTraceback(Exception):
    """Traceback of an error in another process, shown with --traceback."""

    def __str__(self) -> str:
        return "\n" + self.args[0]


def _named(rank: int, kind: str, message: str, frames: tuple[str, ...]) -> InputError | TrainingError:
    # The project's own errors are the same on all ranks, and already name a rank that caused them.
    if kind == InputError.__name__:
        return InputError(message, frames)
    if kind == TrainingError.__name__:
        return TrainingError(message)
    return TrainingError(f"rank {rank}: {kind}: {message.strip().partition(chr(10))[0]}")
