"""Starts one process per replica, or joins those of torchrun, and leaves none behind.

A rank that fails ends the run: its error is raised in the launching process, in one line that
names the rank, and the other ranks are ended.
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
from torch_ref.config import TorchConfig
from torch_ref.devices import local_device, num_replicas, under_torchrun
from torch_ref.distributed import World, process_group

Main = Callable[[World, TorchConfig], Any]

LOCALHOST = "127.0.0.1"
SLOW_IMPORTS = ["torch", "torch._dynamo"]  # seconds each, and optimizers want the second: once for all ranks
PATIENCE = 3.0  # seconds, after the first rank has failed


def launch(main: Main, config: TorchConfig) -> list[Any]:
    """Run `main(world, config)` on every rank, each in a process of its own, and wait for all.

    Under torchrun this process is one of the ranks. A single rank runs in this process.

    Args:
        main: at the top level of a module, as the ranks import it.

    Returns:
        What it has returned on each rank; under torchrun, on this one. Tensors (of other processes: on the CPU),
        numbers, strings, and lists, tuples and dictionaries of them.

    Raises:
        TrainingError: a rank failed or was killed; the message names it.
        InputError: a rank found bad input.
    """
    if config.strategy == "single":
        return [main(World(device=local_device(config, 0)), config)]
    if under_torchrun():
        return [_join_torchrun(main, config)]
    if num_replicas(config) == 1:
        with process_group(0, 1, local_device(config, 0), dist.HashStore()) as world:
            return [main(world, config)]
    return _spawn(main, config, num_replicas(config))


def _join_torchrun(main: Main, config: TorchConfig) -> Any:
    rank = int(os.environ["RANK"])
    device = local_device(config, int(os.environ.get("LOCAL_RANK", rank)))
    try:
        return _run(main, config, rank, num_replicas(config), device, store=None)
    except Exception as error:
        raise _named(rank, type(error).__name__, str(error)) from error


def _spawn(main: Main, config: TorchConfig, world_size: int) -> list[Any]:
    # The ranks meet at a store in this process, whose port the system picks: nothing to collide with.
    store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="torch_ref-") as reports:
        args = (main, config, world_size, store.port, reports)
        mp.set_forkserver_preload(SLOW_IMPORTS)
        processes = mp.start_processes(_rank_process, args, world_size, False, start_method="forkserver").processes
        try:
            if _one_has_failed(processes):
                raise _cause([process.exitcode for process in processes], Path(reports))
            return [_answer(reports, rank) for rank in range(world_size)]
        finally:
            _end(processes)


def _answer(reports: str, rank: int) -> Any:
    return torch.load(Path(reports, f"{rank}.pt"), map_location="cpu", weights_only=True)


def _rank_process(rank: int, main: Main, config: TorchConfig, world_size: int, port: int, reports: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell has started in its background
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # tqdm's own is a semaphore, which a rank that is ended would leave behind
    try:
        store = dist.TCPStore(LOCALHOST, port, is_master=False)
        torch.save(_run(main, config, rank, world_size, local_device(config, rank), store), f"{reports}/{rank}.pt")
    except Exception as error:
        report = {"rank": rank, "time": time.time(), "kind": type(error).__name__, "message": str(error)}
        report["traceback"] = traceback.format_exc()
        Path(reports, f"{rank}.json").write_text(json.dumps(report))
        sys.stdout.flush()
        os._exit(1)


def _end_with_launcher() -> None:
    """Interrupt this rank, which closes its files then, should the launcher be killed."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "runs in a rank's process"
    launcher.join()
    main = threading.main_thread().ident
    assert main is not None, "it runs"
    signal.pthread_kill(main, signal.SIGINT)


def _run(
    main: Main, config: TorchConfig, rank: int, world_size: int, device: torch.device, store: dist.Store | None
) -> Any:
    if device.type == "cpu":
        torch.set_num_threads(1)  # the replicas share the cores
    with process_group(rank, world_size, device, store) as world:
        return main(world, config)


def _one_has_failed(processes: list[BaseProcess]) -> bool:
    """Wait until all processes have ended, or one has failed."""
    running = list(processes)
    while running and not any(process.exitcode for process in processes):
        wait([process.sentinel for process in running])
        running = [process for process in running if process.exitcode is None]
    return any(process.exitcode for process in processes)


def _end(processes: list[BaseProcess]) -> None:
    """End all ranks; those that fail alike, or for want of one that failed, get the time to close their files."""
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
        process.kill()
        process.join()


def _cause(exitcodes: list[int | None], reports: Path) -> Exception:
    """Why the run failed: not all that failed is to blame, as the others fail for want of the first."""
    for rank, exitcode in enumerate(exitcodes):
        if exitcode is not None and exitcode < 0:
            return TrainingError(f"rank {rank}: killed by {signal.Signals(-exitcode).name}")
    found = [json.loads(path.read_text()) for path in reports.glob("*.json")]
    if not found:
        rank = next(rank for rank, exitcode in enumerate(exitcodes) if exitcode)
        return TrainingError(f"rank {rank}: ended with exit code {exitcodes[rank]}")
    first = min(found, key=lambda report: report["time"])
    error = _named(first["rank"], first["kind"], first["message"])
    error.__cause__ = _RankTraceback(first["traceback"])
    return error


class _RankTraceback(Exception):
    """Where it happened, in another process; shown with --traceback."""

    def __str__(self) -> str:
        return "\n" + self.args[0]


def _named(rank: int, kind: str, message: str) -> InputError | TrainingError:
    # Our own errors are raised on every rank alike, and where one rank is to blame they name it.
    if kind == InputError.__name__:
        return InputError(message)
    if kind == TrainingError.__name__:
        return TrainingError(message)
    return TrainingError(f"rank {rank}: {kind}: {message.strip().partition(chr(10))[0]}")
