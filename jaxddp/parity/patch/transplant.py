"""Edits that make the JAX file say what the torch file says: the parts in which two alike statements differ.

Torch's code is translated: functions and options by name, as far as the two libraries agree. Axes and layouts stay as
they are, so an edit may be wrong, and has to be tried.
"""

import ast
import copy
import difflib
from collections.abc import Iterator
from functools import cached_property

import jax

from jaxddp.parity.patch.edits import jax_name, wrapped
from jaxddp.parity.user_code.file_text import Edit, FileText, assigned, calls, last_name, nested

FUNCTIONS = {"forward": "__call__"}
ALIKE = 0.7  # similarity of a statement to the one that it translates


class Mirror:
    """Statements of a torch file next to those of a JAX file.

    Args:
        jax: the JAX file.
        torch: the torch file.

    Attributes:
        torch: as above.
    """

    def __init__(self, jax: FileText, torch: FileText):
        self._jax, self.torch = jax, torch

    def edits(self, jax_line: int, torch_line: int) -> Iterator[Edit]:
        """Yield edits of the statement at a line, then of its function, then of constants of the same names."""
        here, there = self._jax.at(jax_line), self.torch.at(torch_line)
        if here is not None and there is not None:
            yield from self._of_statement(here, self._translated(there))
            yield from self._lacking(here, self._translated(there))
        of_jax, of_torch = self._jax.function_at(jax_line), self.torch.function_at(torch_line)
        if of_jax is not None and of_torch is not None:
            yield from self._of_function(of_jax, of_torch)
        yield from self.of_constants()
        functions = [x for x in self._jax.statements if isinstance(x, ast.FunctionDef) and x.name != "__init__"]
        for function in (x for x in functions if x is not of_jax):
            twin = self._functions.get(self._name(self._jax, function))
            if twin is not None:
                yield from self._of_function(function, twin)

    def twin(self, torch_line: int) -> list[ast.stmt]:
        """Return the statements of the JAX function that has the name of torch's at a line."""
        of_torch = self.torch.function_at(torch_line)
        functions = [x for x in self._jax.statements if isinstance(x, ast.FunctionDef)]
        names = {self._name(self._jax, x): x for x in functions}
        found = None if of_torch is None else names.get(self._name(self.torch, of_torch))
        return [] if found is None else nested(found)

    def of_constants(self) -> Iterator[Edit]:
        """Yield torch's values of the constants at the top level that the JAX file has under the same names."""
        theirs = {ast.unparse(target): value for x in self.torch.tree.body for target, value in assigned(x)}
        for statement in self._jax.tree.body:
            for target, value in assigned(statement):
                other = theirs.get(ast.unparse(target))
                both = isinstance(value, ast.Constant) and isinstance(other, ast.Constant)
                if other is not None and both and ast.unparse(value) != ast.unparse(other):
                    yield value, self.torch.segment(other)

    @cached_property
    def _functions(self) -> dict[str, ast.FunctionDef]:
        functions = [x for x in self.torch.statements if isinstance(x, ast.FunctionDef)]
        return {self._name(self.torch, x): x for x in functions}

    def _name(self, source: FileText, function: ast.FunctionDef) -> str:
        """Return class and name of a function, by which it finds its twin."""
        classes = [x for x in source.statements if isinstance(x, ast.ClassDef) and function in x.body]
        name = FUNCTIONS.get(function.name, function.name).removeprefix("jax_").removeprefix("torch_")
        return f"{classes[-1].name}.{name}" if classes else name

    def _translated(self, statement: ast.stmt) -> ast.stmt:
        translated: ast.stmt = Translator(self._jax).visit(copy.deepcopy(statement))
        return ast.fix_missing_locations(translated)

    def _of_function(self, jax: ast.FunctionDef, torch: ast.FunctionDef) -> Iterator[Edit]:
        """Yield edits of the statements in which two functions differ: other parts, one more, one less."""
        ours = [x for x in nested(jax) if not isinstance(x, ast.FunctionDef)]
        theirs = [self._translated(x) for x in nested(torch) if not isinstance(x, ast.FunctionDef)]
        matcher = difflib.SequenceMatcher(None, [*map(_form, ours)], [*map(_form, theirs)], autojunk=False)
        for tag, i1, i2, j1, j2 in matcher.get_opcodes():
            if tag == "equal":
                continue
            for mine in ours[i1:i2]:
                near = [x for x in theirs[j1:j2] if _likeness(mine, x) > 0]
                for other in sorted(near, key=lambda x: -_likeness(mine, x)):
                    yield from self._of_statement(mine, other)
            for number, other in enumerate(theirs[j1:j2]):
                if self._knows(other) and not any(_likeness(x, other) > ALIKE for x in ours[i1:i2]):
                    places = [x for x in (i1 + number, i2) if x < len(ours)]
                    yield from (self._before(ours[place], other) for place in dict.fromkeys(places))

    @staticmethod
    def _before(place: ast.stmt, statement: ast.stmt) -> Edit:
        """Return the edit that puts a statement before another one."""
        mark = ast.Pass(lineno=place.lineno, col_offset=place.col_offset)
        mark.end_lineno, mark.end_col_offset = place.lineno, place.col_offset
        return mark, f"{ast.unparse(statement)}\n{' ' * place.col_offset}"

    def _of_statement(self, jax: ast.stmt, torch: ast.stmt) -> Iterator[Edit]:
        """Yield the smallest edits first: replace the parts of a statement that differ from torch's."""
        if type(jax) is not type(torch):
            return
        pairs = [pair for pair in _differing(jax, torch) if isinstance(pair[0], ast.expr)]
        for mine, other in sorted(pairs, key=lambda pair: len(ast.unparse(pair[0]))):
            if self._knows(other) and _stands_alone(mine) and _stands_alone(other):
                yield mine, self._rendered(mine, other)
        for mine, other in pairs:
            if self._knows(other) and _stands_alone(mine):
                yield from ((mine, code) for code in self._around(mine, other))

    def _lacking(self, jax: ast.stmt, torch: ast.stmt) -> Iterator[Edit]:
        """Yield the calls that only torch's statement has around each value of the JAX file's."""
        known = {last_name(call.func) for call in calls(jax)}
        for call in calls(torch):
            if call.args and last_name(call.func) not in known:
                call.args[0] = ast.Name(UNKNOWN, ast.Load())
                code = ast.unparse(call)
                if code.count(UNKNOWN) == 1 and self._knows(FileText(code.replace(UNKNOWN, "0")).tree):
                    yield from wrapped(
                        self._jax, jax, code.replace("{", "{{").replace("}", "}}").replace(UNKNOWN, "{}")
                    )

    def _around(self, mine: ast.AST, other: ast.AST) -> Iterator[str]:
        """Yield the outermost call or operation of torch's expression with the JAX file's own expression in it."""
        filling = {UNKNOWN: self._jax.segment(mine)}
        places: list[tuple[str, int | None]] = []
        if isinstance(other, ast.Call) and other.args and _form(other.func) != _form(getattr(mine, "func", mine)):
            places = [("args", 0)]
            yield FileText(f"{ast.unparse(other.func)}({UNKNOWN})").filled(filling)
        elif isinstance(other, ast.BinOp) and not isinstance(mine, ast.BinOp):
            places = [("left", None), ("right", None)]
        for name, position in places:
            hole: ast.expr = ast.Name(UNKNOWN, ast.Load())
            made = copy.deepcopy(other)
            setattr(made, name, hole if position is None else [hole, *getattr(made, name)[1:]])
            yield FileText(ast.unparse(made)).filled(filling)

    def _rendered(self, mine: ast.AST, other: ast.AST) -> str:
        """Return code of torch's expression, with the text of the JAX file where the two say the same."""
        same = {_form(x): self._jax.segment(x) for x in ast.walk(mine) if isinstance(x, ast.expr)}
        if (known := same.get(_form(other))) is not None:
            return known
        names: dict[str, str] = {}

        class Marked(ast.NodeTransformer):
            def visit(self, node: ast.AST) -> ast.AST:
                text = same.get(_form(node)) if isinstance(node, ast.Call | ast.BinOp | ast.Subscript) else None
                if text is None:
                    return self.generic_visit(node)
                names[f"__{len(names)}__"] = text
                return ast.Name(f"__{len(names) - 1}__", ast.Load())

        return FileText(ast.unparse(Marked().visit(copy.deepcopy(other)))).filled(names)

    def _knows(self, node: ast.AST) -> bool:
        """Return whether the JAX file has all names that code uses."""
        known = {x.id for x in ast.walk(self._jax.tree) if isinstance(x, ast.Name)}
        known |= {x.arg for x in ast.walk(self._jax.tree) if isinstance(x, ast.arg)}
        known |= {x.name for x in self._jax.statements if isinstance(x, ast.FunctionDef | ast.ClassDef)}
        known |= {x.asname or x.name for x in ast.walk(self._jax.tree) if isinstance(x, ast.alias)}
        known |= set(dir(__builtins__)) if not isinstance(__builtins__, dict) else set(__builtins__)
        made = {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
        return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)} <= known | made


def _form(node: ast.AST) -> str:
    """Return code in a form that does not depend on the names of modules, or on the order of sums and products."""

    class Plain(ast.NodeTransformer):
        def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
            self.generic_visit(node)
            return ast.Name(node.attr, ast.Load()) if root_of(node) in MODULES else node

        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            return ast.Constant(float(node.value)) if type(node.value) is int else node

    plain = Plain().visit(copy.deepcopy(node))
    if isinstance(plain, ast.BinOp) and isinstance(plain.op, ast.Add | ast.Mult):
        return f"{type(plain.op).__name__}{sorted((_form(plain.left), _form(plain.right)))}"
    return ast.unparse(plain)


def _stands_alone(node: ast.AST) -> bool:
    """Return whether a node is an expression by itself, and no slice, starred value or part of an f-string."""
    try:
        return isinstance(ast.parse(ast.unparse(node), mode="eval").body, ast.expr)
    except SyntaxError:
        return False


def _target(statement: ast.stmt) -> str:
    return next((ast.unparse(target) for target, _ in assigned(statement)), type(statement).__name__)


def _likeness(one: ast.stmt, other: ast.stmt) -> float:
    """Return how alike two statements are, from 0 to 1; of other targets they are not."""
    if type(one) is not type(other) or _target(one) != _target(other):
        return 0.0
    return difflib.SequenceMatcher(None, _form(one), _form(other)).ratio()


def _differing(one: ast.AST, other: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield the parts of two trees that differ, the whole and what differs in it."""
    if _form(one) == _form(other):
        return
    yield one, other
    if type(one) is not type(other):
        return
    mine, theirs = ([*ast.iter_child_nodes(x)] for x in (one, other))
    if len(mine) == len(theirs):
        for left, right in zip(mine, theirs, strict=True):
            yield from _differing(left, right)


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
