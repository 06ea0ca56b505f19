"""Translate torch's expressions to jax's, as far as the two libraries agree: functions, methods and options by name."""

import ast
import copy

import jax

from jaxddp.parity.patch.edits import jax_name
from jaxddp.parity.user_code.file_text import FileText, last_name

HOMES = {"jnp": jax.numpy, "jax.nn": jax.nn, "jax.lax": jax.lax}
UNKNOWN = "_unknown_"  # placeholder for a function that jax does not have under torch's name
KEYWORDS = {"dim": "axis", "keepdim": "keepdims", "eps": "epsilon"}
METHODS = {"view": "reshape", "permute": "transpose", "amax": "max", "amin": "min", "clamp": "clip"}
# Methods that jax has as functions only -> their module.
AS_FUNCTIONS = {
    **dict.fromkeys("exp log sqrt rsqrt tanh sin cos square tril triu log1p expm1 abs".split(), "jnp"),  # noqa: SIM905
    "detach": "jax.lax",
}
ACTIVATIONS = frozenset(
    "relu gelu silu sigmoid softplus elu celu selu leaky_relu softmax log_softmax mish log_sigmoid hard_tanh".split()  # noqa: SIM905
)
DROPPED = frozenset(("float", "double", "long", "contiguous", "to"))  # methods that change nothing in float64


class Translator(ast.NodeTransformer):
    """Translate torch's code to jax's.

    Args:
        source: the JAX file, whose names of modules are used.
    """

    def __init__(self, source: FileText):
        self._source = source

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Translate the function and the options of a call."""
        name, function = last_name(node.func), node.func
        is_method = isinstance(function, ast.Attribute) and not _is_torch(function.value)
        if isinstance(function, ast.Attribute) and not is_method:
            node.func = self._function(jax_name(name), "jax.nn" if jax_name(name) in ACTIVATIONS else "jnp")
        self.generic_visit(node)
        for keyword in node.keywords:
            keyword.arg = KEYWORDS.get(keyword.arg or "", keyword.arg)
        if not (is_method and isinstance(node.func, ast.Attribute)):
            return node
        of = node.func.value
        if name in DROPPED:
            return of
        if name == "masked_fill" and len(node.args) == 2:
            return ast.Call(self._function("where", "jnp"), [*node.args, of], [])
        if name == "pow" and len(node.args) == 1:
            return ast.BinOp(of, ast.Pow(), node.args[0])
        if name in AS_FUNCTIONS or name in ACTIVATIONS:
            home = AS_FUNCTIONS.get(name, "jax.nn")
            of_jax = self._function("stop_gradient" if name == "detach" else name, home)
            return ast.Call(of_jax, [of, *node.args], node.keywords)
        node.func.attr = METHODS.get(name, name)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Translate a constant of torch, such as torch.pi."""
        self.generic_visit(node)
        return self._function(node.attr, "jnp") if _is_torch(node.value) else node

    def _function(self, name: str, home: str) -> ast.expr:
        """Return a function by the name that the JAX file gives it, or by its usual one; `UNKNOWN` if jax lacks it."""
        known = [x for x in ast.walk(self._source.tree) if isinstance(x, ast.Attribute) and x.attr == name]
        known = [x for x in known if isinstance(x.value, ast.Name | ast.Attribute) and root_of(x) in MODULES]
        if known:
            return copy.deepcopy(known[0])
        if any(isinstance(x, ast.FunctionDef) and x.name == name for x in self._source.statements):
            return ast.Name(name, ast.Load())
        return ast.parse(f"{home}.{name}" if hasattr(HOMES[home], name) else UNKNOWN, mode="eval").body


MODULES = frozenset(("jax", "jnp", "nn", "nnx", "linen", "lax", "optax", "np"))


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", "")


def _is_torch(node: ast.expr) -> bool:
    """Return whether an expression is torch or one of its modules, under their usual names."""
    return isinstance(node, ast.Name | ast.Attribute) and root_of(node) in ("torch", "F", "nn", "math")
