"""Private parts of jax, flax, torch and tyro that jaxddp uses, each with its reason; it knows no framework.

`tests/unit/test_private_parts.py` says which of them an upgrade has changed, and that there are no others.
"""

from typing import NamedTuple


class Part(NamedTuple):
    """A private part of another package, or a public one that is replaced while a check runs.

    Attributes:
        path: its dotted path.
        used_in: files that use it.
        reason: what it is needed for.
    """

    path: str
    used_in: tuple[str, ...]
    reason: str


# jax's modules, and the function of jax.vmap, within which one traced draw stands for several, or is traced only once.
REPEATING = tuple(f"jax._src.{name}" for name in ("pjit", "lax.control_flow", "ad_checkpoint", "shard_map", "pmap"))
MAPPING = "vmap_f"
RANDOM = ("jax._src.random.", "jax.random.")  # modules, or a package of them
LIBRARIES = ("flax.", "jax._src.nn.")  # modules whose casts to float32 the port did not write
INTERNAL = ("jax.", "jax._src.")
# Files of jax between a user's line and the function that it calls.
FRAMES = tuple(
    f"/jax/_src/{name}"
    for name in ("core.py", "source_info_util.py", "pjit.py", "api.py", "traceback_util.py", "linear_util.py")
    + ("custom_derivatives.py", "ad_checkpoint.py", "interpreters/", "numpy/ufunc")
    + ("numpy/array_methods.py",)
)

_JAX_SIDE, _TORCH_SIDE = "jaxddp/parity/jax_side", "jaxddp/parity/torch_side"
PARTS = (
    *(
        Part(path, (f"{_JAX_SIDE}/draws.py",), "a draw within it is refused: one trace stands for several draws")
        for path in (*REPEATING, "jax._src.api.vmap")
    ),
    Part("jax._src.random", (f"{_JAX_SIDE}/widened.py",), "casts of a draw are no casts of the port's"),
    Part("jax._src.nn", (f"{_JAX_SIDE}/widened.py",), "casts within jax.nn's functions are the library's"),
    Part("jax._src", (f"{_JAX_SIDE}/watched_program.py",), "frames between a user's line and what it calls"),
    Part(
        "jax.extend.core.get_opaque_trace_state",
        (f"{_JAX_SIDE}/draws.py", f"{_JAX_SIDE}/idle_members.py"),
        "tells whether a call is traced by a transformation of the port's",
    ),
    Part(
        "jax.interpreters.partial_eval.dce_jaxpr",
        (f"{_JAX_SIDE}/equations.py", f"{_JAX_SIDE}/evaluation.py", f"{_JAX_SIDE}/watched_program.py"),
        "leaves out of a program what its results do not need",
    ),
    Part(
        "jax.extend.core.primitives.random_seed_p.bind",
        (f"{_JAX_SIDE}/initial_weights.py",),
        "other seeds for a port's keys, to see how it initialises",
    ),
    *(
        Part(f"jax.extend.core.primitives.{name}.bind", (f"{_JAX_SIDE}/widened.py",), "casts to narrower types")
        for name in ("convert_element_type_p", "iota_p", "dot_general_p", "conv_general_dilated_p")
    ),
    Part("flax.nnx.Variable.__init__", (f"{_JAX_SIDE}/held_types.py",), "the line that makes an array"),
    *(
        Part(f"flax.linen.Module.{name}", (f"{_JAX_SIDE}/held_types.py",), "the line that makes an array")
        for name in ("param", "variable")
    ),
    Part("flax.nnx.Optimizer.__init__", (f"{_JAX_SIDE}/multi_loss_step.py",), "an optimizer that a step makes"),
    *(
        Part(
            "torch.utils._python_dispatch.TorchDispatchMode",
            (f"{_TORCH_SIDE}/{name}.py",),
            "each operation of a loss: its draws, and the types that it asks for",
        )
        for name in ("draws", "held_types")
    ),
    Part("torch.nn.Module._buffers", (f"{_TORCH_SIDE}/widened.py",), "tables of a model that are no parameters"),
    Part("torch._dynamo", ("jaxddp/parity/preload.py", "torch_ref/launch.py"), "imported once, not for each optimizer"),
    Part(
        "torch._dynamo.OptimizedModule._orig_mod",
        ("jaxddp/parity/recorder/torch_loop.py",),
        "the model inside of torch.compile",
    ),
    Part("tyro._errors.on_parse_error", ("jaxddp/cli/flags.py",), "the reason of a refused command line, as data"),
)
