"""A rank's training loop on DistributedDataParallel, watched. Imports no jax."""

from collections.abc import Sequence
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

from jaxddp.errors import InputError, listed
from jaxddp.parity.lazy_arrays import Arrays
from jaxddp.parity.processes import Tell
from jaxddp.parity.records import Record
from jaxddp.parity.torch_side.rank_recorder import RankRecorder, WatchedOptimizer, is_large, recording_hook
from jaxddp.parity.torch_side.shared import SharedParameters, may_share
from jaxddp.parity.torch_side.side import TorchSide
from torch_ref.data_parallel import WithLoss, buffers_option, loss_within
from torch_ref.distributed import World
from torch_ref.losses import Batch
from torch_ref.state import averaged_model
from torch_ref.step import train_step


class DdpLoop:
    """A loop whose steps are `torch_ref.step.train_step`.

    Args:
        side: model, loss and options of the loop.
        world: the ranks that take part.
        keeps_full: see `RankRecorder`.
        tell: reports to the parent what the rank is doing.
        folder: existing folder for a large model's files; None: each rank keeps its parameters to itself.

    Attributes:
        shared: parameters that all ranks hold in one copy; None: each rank has its own copy of all.
        recorder: records each step.
        optimizer: the optimizer.
        schedulers: its scheduler, if it has one.
        kind: class name of the optimizer.
    """

    def __init__(self, side: TorchSide, world: World, keeps_full: bool, tell: Tell, folder: Path | None = None):
        model = side.model
        self._side, self._world = side, world
        tell("torch_optimizer")  # before DDP, which expects gradients of all parameters that are not frozen then
        self.optimizer, self._scheduler = side.make_optimizer(model.parameters(), world)
        self._ddp = DistributedDataParallel(
            WithLoss(model, side.loss_fn) if side.loss_in_ddp else model,
            process_group=world.group,
            find_unused_parameters=side.find_unused_parameters,
            gradient_as_bucket_view=any(map(is_large, model.parameters())),  # saves one copy of the gradients
            **buffers_option(side.buffers),
        )
        self.recorder = RankRecorder(model, world, side, keeps_full)
        if side.loss_in_ddp:
            self.recorder.computes = loss_within
        self._ddp.register_comm_hook(self.recorder, recording_hook)
        self.schedulers = [self._scheduler] if self._scheduler is not None else []
        self.kind = type(self.optimizer).__name__
        sharing = folder is not None and may_share(model, self.optimizer, world)
        self.shared = SharedParameters(model, world, folder) if folder is not None and sharing else None
        self._watched = WatchedOptimizer(self.optimizer, self.recorder, self.shared)
        self._averaged = averaged_model(model, side.ema_decay)

    def take(
        self, micro_batches: Sequence[Batch], step: int, gradients: Arrays | None = None, records_given: bool = False
    ) -> Record:
        """Take a step and return its record.

        Args:
            micro_batches: this rank's examples.
            step: number of the step, from 0.
            gradients: replace the computed ones as the optimizer's input; None: no replacement.
            records_given: see `WatchedOptimizer`.

        Raises:
            InputError: DDP waits for the gradient of a parameter that the loss does not depend on.
        """
        side, recorder = self._side, self.recorder
        self._watched.gradients, self._watched.records_given = gradients, records_given
        recorder.start(micro_batches)
        sums = train_step(
            self._ddp,
            self._watched,  # type: ignore[arg-type]
            self._scheduler,
            micro_batches,
            self._world,
            loss_normalization=side.facts.loss_normalization,
            clip_grad_norm=side.facts.clip_grad_norm,
            clip_grad_value=side.facts.clip_grad_value,
            buffers=side.buffers,
            gradient_hooks=side.gradient_hooks,
            scaler=side.scaler,
            loss_fn=recorder.loss_fn,
            count_fn=side.count_fn,
            step=step,
        )
        self._check_averaged()
        if self._averaged is not None and not sums.get("skipped"):
            self._averaged.update_parameters(side.model)
        return recorder.record(self.optimizer, self._averaged)

    def _check_averaged(self) -> None:
        """Check that DDP has averaged all gradients; torch itself raises at the next step only."""
        trained = {name: x for name, x in self.recorder.parameters.items() if x.requires_grad}
        unused = [name for name, x in trained.items() if name not in self.recorder.reduced and x.grad is None]
        if unused and not self._side.find_unused_parameters:
            raise InputError(
                f"torch_loss: does not depend on {listed(unused, joint=', ')}, for whose gradients DDP waits; freeze "
                "these, or set find_unused_parameters = True"
            )
