"""`python -m jaxddp.train`: data, sampler, batch, replica step, mean over replicas, metrics, checkpoint."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxddp import cli

if __name__ == "__main__":
    with cli.one_line_errors(show_traceback=False), cli.variables_named("JAX_"):
        import jax.errors  # the first import of jax reads its environment variables

import jax

from jaxddp import models, optim
from jaxddp.config import TrainConfig
from jaxddp.data import datasets
from jaxddp.data.sampler import shard_table
from jaxddp.data_parallel import DataParallel
from jaxddp.distributed.devices import prepare
from jaxddp.distributed.replicas import Replicas
from jaxddp.errors import InputError, TrainingError
from jaxddp.loader import MAX_STEPS_PER_DISPATCH, Loader
from jaxddp.nn.torch_weights import save_weights, start_values, torch_name
from jaxddp.state import TrainState
from jaxddp.step.metrics import EpochSums, InFlight, means, step_metrics
from jaxddp.step.options import options
from jaxddp.tracking.gradient_metrics import explained, renamed
from jaxddp.tracking.run_folder import claim_output
from jaxddp.tracking.run_log import RunLog, check_same_epochs, frozen_notes, run_title

if TYPE_CHECKING:
    from jaxddp.checkpoint import Checkpoints

CHECKPOINT_FOLDER = "checkpoints"
WEIGHTS_FILE = "model.safetensors"
AVERAGED_FILE = "model_averaged.safetensors"


def main(config: TrainConfig) -> None:
    """Train as `config` asks, and print, log and save the results."""
    if config.resume is not None:
        config = dataclasses.replace(config, output=config.resume)
    with contextlib.ExitStack() as resources:
        resources.enter_context(jax.enable_x64(config.dtype == "float64"))
        # On GPUs jax would multiply float32 matrices in TF32, which keeps 10 bits; torch does not.
        resources.enter_context(jax.default_matmul_precision("highest"))
        run = build(config)
        if config.print_shards:
            print(shard_table(run.loader.indices(0), run.loader.per_replica_batch_size, run.loader.dataset_size))
            return
        checkpoints, state = open_output(run, resources)
        log = resources.enter_context(
            RunLog(
                dataclasses.replace(config, resume=None, devices=run.ddp.world_size),
                None if config.output is None else Path(config.output),
                title=run_title(config, run.ddp.world_size, f"JAX {run.ddp.replicas.devices[0].device_kind}"),
                notes=frozen_notes(map(torch_name, run.ddp.frozen_parameters)),
                examples_per_epoch=run.loader.examples_per_epoch,
                resume_step=int(state.step) if config.resume else None,
            )
        )
        train(run, state, log, checkpoints)


@dataclass(frozen=True)
class Run:
    """Parts of a run, which have been checked to fit each other; nothing has been written yet."""

    config: TrainConfig
    dataset: datasets.Dataset
    loader: Loader
    ddp: DataParallel
    start: TrainState

    def explain(self, sums: Mapping[str, float]) -> str | None:
        """Describe the gradients that are not finite, from a step's metrics; None without --detect-anomaly."""
        frozen = self.ddp.frozen_parameters
        learning = [name for name in self.ddp.functional.params if name not in frozen]
        return explained(sums, learning, torch_name) if self.config.detect_anomaly else None


def build(config: TrainConfig) -> Run:
    """Build the parts of a run.

    Raises:
        InputError: the parts do not fit each other, or the machine.
    """
    replicas = Replicas(prepare(config.devices, config.platform))
    config.per_replica_batch_size(replicas.world_size)
    dataset = datasets.load(config).astype(config.dtype)
    loader = make_loader(config, dataset, replicas)
    model = models.build(config, dataset)
    ddp = DataParallel(
        model,
        optim.from_config(config.with_scaled_lr(replicas.world_size), config.total_steps(loader.steps_per_epoch)),
        replicas=replicas,
        dtype=config.dtype,
        dropout_masks=config.dropout_masks,
        amp=config.amp,
        **options(config, model),
    )
    start = ddp.init() if config.resume is not None else _start(config, ddp)
    try:
        for last_batch in loader.host_batches(0, start_step=loader.steps_per_epoch - 1):  # the smallest batch
            ddp.check(start, last_batch)
            ddp.check(start, loader.without_padding(last_batch))
    except InputError as error:
        advice = "choose another size" if config.join else "choose another size, or --drop-last-batch"
        raise InputError(f"--global-batch-size {config.global_batch_size}: {error}; {advice}") from None
    return Run(config, dataset, loader, ddp, start)


def make_loader(config: TrainConfig, dataset: datasets.Dataset, replicas: Replicas) -> Loader:
    """Return the loader of the training set, with the options of `config`."""
    return Loader(
        dataset.train,
        replicas,
        global_batch_size=config.global_batch_size,
        accumulation_steps=config.accumulation_steps,
        steps_per_dispatch=config.steps_per_dispatch,
        max_steps_per_dispatch=min(MAX_STEPS_PER_DISPATCH, config.verify_every or MAX_STEPS_PER_DISPATCH),
        shuffle=config.shuffle,
        seed=config.seed,
        drop_last=config.drop_last,
        drop_last_batch=config.drop_last_batch,
        join=config.join,
    )


def open_output(run: Run, resources: contextlib.ExitStack) -> "tuple[Checkpoints | None, TrainState]":
    """Claim the run folder; with --resume, restore the state of the last checkpoint.

    Raises:
        InputError: the folder belongs to another run, or its checkpoint to another model.
    """
    output, resume = run.config.output, run.config.resume is not None
    if output is None:
        return None, run.start
    from jaxddp.checkpoint import Checkpoints  # imports Orbax, which takes 0.2 s

    folder = claim_output(output, resume)
    checkpoints = Checkpoints(folder / CHECKPOINT_FOLDER)
    resources.callback(checkpoints.close)
    if not resume:
        return checkpoints, run.start
    check_same_epochs(folder, run.loader.steps_per_epoch)
    if checkpoints.latest_step is None:  # the run ended before its first checkpoint
        return checkpoints, _start(run.config, run.ddp)
    return checkpoints, run.ddp.place_state(checkpoints.restore(run.ddp.whole(run.start)))


def train(run: Run, state: TrainState, log: RunLog, checkpoints: "Checkpoints | None") -> TrainState:
    """Train from `state` to the end of the last epoch.

    Raises:
        TrainingError: a loss is not finite, or replicas differ; checkpoints saved before remain valid.
    """
    config, ddp, loader = run.config, run.ddp, run.loader
    test_set, test = ddp.place(run.dataset.test), {}

    def tested(state: TrainState) -> dict[str, float]:
        return means(jax.device_get(ddp.evaluate_placed(state, test_set)))

    started = time.perf_counter()
    try:
        ddp.verify(state)
        for epoch in range(int(state.step) // loader.steps_per_epoch, config.epochs):
            state, train_means, speed = train_epoch(run, state, epoch, log)
            test = tested(state)
            if not math.isfinite(test["loss"]):  # the last update comes after the last training loss
                raise TrainingError(f"test loss is {test['loss']} at step {int(state.step)}")
            averaged = None
            if config.ema_decay is not None:
                averaged = tested(ddp.averaged(state))
            log.epoch(int(state.step), epoch + 1, train_means, test, speed, averaged)
            if checkpoints is not None and config.checkpoint_every and (epoch + 1) % config.checkpoint_every == 0:
                ddp.verify(state)
                checkpoints.save(ddp.whole(state))
        ddp.verify(state)
        if checkpoints is not None:
            checkpoints.save(ddp.whole(state))
    except TrainingError as error:
        raise TrainingError(f"{error}; {_last_good(checkpoints, config)}") from None
    if config.output is not None:
        save_weights(Path(config.output) / WEIGHTS_FILE, *ddp.values(state))
        if config.ema_decay is not None:
            save_weights(Path(config.output) / AVERAGED_FILE, *ddp.values(ddp.averaged(state)))
    log.summary((test or tested(state))["accuracy"], time.perf_counter() - started, config.agreement)
    return state


def train_epoch(run: Run, state: TrainState, epoch: int, log: RunLog) -> tuple[TrainState, dict[str, float], float]:
    """Train for one epoch, or for the part of it after `state.step`.

    Returns:
        The state at the end, the means over the examples, and examples per second.
    """
    started = time.perf_counter()
    step, examples = int(state.step), 0
    in_flight, totals = InFlight(first_step=step + 1, explain=run.explain), EpochSums()

    def report(wait: bool) -> int:
        seen = 0
        for number, by_jax_name in in_flight.finished(wait):
            sums = renamed(by_jax_name, torch_name)
            size = run.loader.examples_in(number - 1)
            log.step(number, epoch + 1, step_metrics(sums), examples=size)
            totals.add(sums)
            seen += size
        return seen

    for batches in run.loader.epoch(epoch, start_step=step % run.loader.steps_per_epoch):
        state, sums = run.ddp.steps(state, batches)
        in_flight.add(sums)
        examples += report(wait=False)
        before, step = step, step + len(sums.table)
        if run.config.verify_every and before // run.config.verify_every != step // run.config.verify_every:
            run.ddp.verify(state)
    examples += report(wait=True)
    log.histograms(step, totals.histograms())
    return state, totals.means(), examples / (time.perf_counter() - started)


def _start(config: TrainConfig, ddp: DataParallel) -> TrainState:
    """Return the state before the first step, with the values of --weights or of the model."""
    if config.weights is None:
        return ddp.init()
    return ddp.init(*start_values(config.weights, ddp.functional.params, ddp.functional.buffers))


def _last_good(checkpoints: "Checkpoints | None", config: TrainConfig) -> str:
    if checkpoints is None or checkpoints.latest_step is None:
        return "there is no checkpoint yet"
    return f"the last good checkpoint is of step {checkpoints.latest_step}; continue with --resume {config.output}"


if __name__ == "__main__":
    cli.run(main, TrainConfig, "python -m jaxddp.train")
