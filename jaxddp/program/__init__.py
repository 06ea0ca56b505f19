'''A user's program in one file, which the trainers, the parity check and the plan load alike.

A program is plain Python. Its top-level names are those of a port (`jaxddp.parity.port`), the data, and flags of
the trainer with the file's values:

    epochs, global_batch_size, optimizer, lr = 20, 64, "adamw", 1e-3

    @dataclass
    class Options:
        width: int = 64
        """Width of the hidden layer."""

    def train_data(): return {"x": ..., "y": ...}     # arrays, or anything with a length and items
    def test_data(): return {"x": ..., "y": ...}
    def jax_model(options): return FlaxNet(options.width, rngs=nnx.Rngs(0))
    def jax_loss(model, batch): return softmax_cross_entropy(model(batch["x"]), batch["y"]).mean()
    def torch_model(options): return TorchNet(options.width)
    def torch_loss(model, batch): return F.cross_entropy(model(batch["x"]), batch["y"])

A function gets by name what it asks for: `options`, the file's Options; `config`, the trainer's flags; a loss, `train`
and a random `key`; an optimizer, `total_steps` and `steps_per_epoch`. This package imports neither framework.
'''

from jaxddp.program.calls import asks_for, bound, takes
from jaxddp.program.config import check_flags, config_class, default_config
from jaxddp.program.loading import built_in, load_program, program_of
from jaxddp.program.program import NAMES, Program

__all__ = [
    "NAMES",
    "Program",
    "asks_for",
    "bound",
    "built_in",
    "check_flags",
    "config_class",
    "default_config",
    "load_program",
    "program_of",
    "takes",
]
