"""Choose the styles of each port, so that all are used about equally often, and write the port's text."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent, indent

from .families import FAMILIES, SPELLINGS, Family, Text
from .frameworks import FRAMEWORKS, KEYED, OWN, TREE_HELPERS, TREES, Net
from .optimizers import CLIPS, LION, MEANS, MOMENTS, OPTIMIZERS, RULES, SCHEDULES, STEP
from .optimizers import OWN as BY_HAND
from .pieces import ACTIVATIONS, PIECES, Piece

NUMBER = 100
SEED = 49
BUFFERED = "batch_norms"  # the family whose model has buffers
WITH_STYLES = ("nnx", "linen", "compact")
RATE = {"sgd": 0.05, "nesterov": 0.05, "adadelta": 0.2}
PENALTIES = {
    "torch": "1e-3 * sum(p.square().sum() for p in model.parameters())",
    "nnx": "1e-3 * sum(jnp.sum(x**2) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))",
    "equinox": "1e-3 * sum(jnp.vdot(x, x) for x in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))",
    "tree": "1e-3 * optax.tree.norm(model, squared=True)",
}
LABELS = (
    "lambda tree: jax.tree_util.tree_map_with_path("
    'lambda path, _: "frozen" if "teacher" in str(path) else "rest", tree)'
)
TORCH_HEAD = """
import math

import torch
from torch import nn
from torch.nn import functional as F
"""
JAX_HEAD = """
from typing import NamedTuple

import jax
import numpy as np
import optax
{}
from jax import lax
from jax import numpy as jnp

from jaxddp import optim, schedules
from jaxddp.nn import layers
from jaxddp.optim import cycles
from jaxddp.state import TrainState
"""
IMPORTS = {"nnx": "from flax import nnx", "linen": "from flax import linen as nn", "equinox": "import equinox as eqx"}
IMPORTS |= {"compact": IMPORTS["linen"], "tree": "", "haiku": ""}


@dataclass(frozen=True)
class RightPort:
    """A correct port.

    Attributes:
        name: family and styles.
        styles: axis -> style.
        texts: file -> text; the program is "port.py".
    """

    name: str
    styles: dict[str, str]
    texts: dict[str, str]

    def write(self, folder: Path, *edits: tuple[str, str]) -> Path:
        """Write the port into a folder, with pieces of its JAX half replaced; return the program.

        Raises:
            ValueError: the JAX half does not have a piece once.
        """
        for name, text in self.texts.items():
            for old, new in edits if name == "jax_half.py" else ():
                if text.count(old) != 1:
                    raise ValueError(f"{self.name}: has {old!r} {text.count(old)} times; must have it once")
                text = text.replace(old, new)
            (folder / name).write_text(text)
        return folder / "port.py"


class Styles:
    """Choice of the least used style of each axis, at random among these."""

    def __init__(self, seed: int):
        self._rng, self._used = random.Random(seed), Counter[tuple[str, str]]()
        self.chosen: dict[str, str] = {}

    def choose(self, axis: str, styles: Iterable[str]) -> str:
        """Return a style, and note it for the port."""
        options = sorted(styles)
        fewest = min(self._used[axis, style] for style in options)
        style = self._rng.choice([style for style in options if self._used[axis, style] == fewest])
        self._used[axis, style] += 1
        self.chosen[axis] = style
        return style


@cache
def right_ports() -> tuple[RightPort, ...]:
    """Return the ports, always the same ones."""
    styles, names = Styles(SEED), [*FAMILIES]
    ports = []
    for number in range(NUMBER):
        family = names[number % len(names)]
        styles.chosen = {}
        texts = dict(_texts(family, FAMILIES[family], styles))
        short = [styles.chosen[axis] for axis in ("framework", "optimizer", "schedule")]
        ports.append(RightPort(f"{number:02d}_{family}/{'-'.join(short)}", styles.chosen, texts))
    return tuple(ports)


def _texts(name: str, family: Family, styles: Styles) -> Iterator[tuple[str, str]]:
    framework = styles.choose("framework", WITH_STYLES if name == BUFFERED else FRAMEWORKS)
    framework = "nnx" if "PENALTY" in family.loss and framework in ("linen", "compact") else framework
    styles.chosen["framework"] = framework
    loss = styles.choose("LOSS", ("cross_entropy", "smoothed")) if "LOSS" in family.loss else ""
    pieces = {"act": ACTIVATIONS[styles.choose("activation", family.activations)], **PIECES}
    drawn = {"framework": framework, "loss": family.loss.replace("LOSS", loss) if loss else family.loss}
    torch, jax = (_half(half, family, styles, pieces, drawn) for half in ("torch", "jax"))
    optimizers, options = _optimizers(name, family, styles)
    yield "torch_half.py", f"{TORCH_HEAD.strip()}\n\n\n{torch}\n\n{optimizers['torch'].strip()}\n"
    head = JAX_HEAD.format(IMPORTS[framework]).strip()
    yield (
        "jax_half.py",
        f"{head}\n\nLR = {RATE.get(styles.chosen['optimizer'], 0.01)}\n\n\n{jax}\n\n{optimizers['jax'].strip()}\n",
    )
    yield "port.py", _port(family, framework, options)


def _half(half: str, family: Family, styles: Styles, pieces: dict[str, Piece], drawn: dict[str, str]) -> str:
    framework = "torch" if half == "torch" else drawn["framework"]
    body = _style(f"{half} body", family.torch if half == "torch" else family.jax, styles, framework)
    kinds = {text.split()[0] for text in family.layers.values()}
    own = frozenset(k for k in OWN if k in kinds and styles.choose(f"{framework} {k}", ("own", "library")) == "own")
    own = own - {"batch"} if half == "torch" else own | ({*OWN} & kinds if framework in TREES else {*()})
    own |= {"batch"} if framework in ("linen", "compact") else set()
    helpers = {kind: styles.choose(f"tree {kind}", of) for kind, of in TREE_HELPERS.items() if kind in kinds}
    net = Net(family, framework, own, helpers, body)
    loss = dedent(drawn["loss"]).strip().replace("PENALTY", PENALTIES.get(framework, PENALTIES["tree"]))
    text = net.written() + loss
    used = [name for name in pieces if f"{name}(" in text]
    functions = [
        pieces[x].written(half, styles.choose(f"{half} {pieces[x].signature}", getattr(pieces[x], half))) for x in used
    ]
    keyed = ", key" if family.draws and framework in KEYED else ""
    signature = f"def {'torch' if half == 'torch' else 'jax'}_loss(model, batch{keyed}):"
    whole = "\n\n".join([*functions, net.written(), f"{signature}\n{indent(net.loss(loss), ' ' * 4)}\n"])
    for word, spellings in SPELLINGS.items():
        whole = whole.replace(word, spellings[half == "jax"])
    return whole


def _style(axis: str, text: Text, styles: Styles, framework: str) -> str:
    if isinstance(text, str):
        return text
    return text[styles.choose(axis, [x for x in text if x != "scan" or framework not in ("linen", "compact")])]


def _optimizers(name: str, family: Family, styles: Styles) -> tuple[dict[str, str], list[str]]:
    """Return the text of both optimizers, and lines of the program."""
    kind = styles.choose("optimizer", [x for x in OPTIMIZERS if not (family.frozen and x in ("adamw", "two_rates"))])
    schedule = styles.choose("schedule", SCHEDULES)
    made = OPTIMIZERS[kind].torch[styles.choose(f"torch {kind}", OPTIMIZERS[kind].torch)]
    style = styles.choose(f"jax {kind}", OPTIMIZERS[kind].jax)
    rates = SCHEDULES[schedule].torch[styles.choose(f"torch {schedule}", SCHEDULES[schedule].torch)]
    rate = SCHEDULES[schedule].jax[styles.choose(f"jax {schedule}", SCHEDULES[schedule].jax)]
    clip, transformation = CLIPS[styles.choose("clip", CLIPS)]
    jax = OPTIMIZERS[kind].jax[style].replace("MOMENTS", str(MOMENTS.get(kind, 1)))
    before = BY_HAND.lstrip("\n") + RULES[kind].strip() + "\n\n\n" if style == "by_hand" else ""
    chained = f"optax.chain({transformation}, {jax})" if transformation else jax
    if family.frozen:
        chained = f'optax.partition({{"rest": {chained}, "frozen": optax.set_to_zero()}}, {LABELS})'
    framework, step = styles.chosen["framework"], ""
    given = clip.startswith("clip") or name == BUFFERED
    means = styles.choose("step", ("jaxddp", "accumulated") if given else ("jaxddp", "accumulated", *MEANS))
    if means in MEANS:
        step = STEP.replace("MEAN", MEANS[means])
    shape = (
        "nnx.Optimizer" if framework == "nnx" and not step and styles.choose("nnx", ("optax", "nnx")) == "nnx" else ""
    )
    optimizer = f"jax_optimizer = {chained}\n"
    if shape:
        optimizer = f"def jax_optimizer(model):\n    return nnx.Optimizer(model, {chained}, wrt=nnx.Param)\n"
    lines = [clip, "accumulation_steps = 2" if means == "accumulated" else ""]
    return {"torch": _torch_optimizer(made, rates, styles), "jax": f"{before}{rate}\n\n\n{optimizer}\n{step}"}, lines


def _torch_optimizer(made: str, rates: str, styles: Styles) -> str:
    lr = str(RATE.get(styles.chosen["optimizer"], 0.01))
    before = LION.strip() + "\n\n\n" if made.startswith("Lion") else ""
    made = made.replace("LR / 2", f"{lr} / 2").replace("LR", lr)
    if styles.choose("torch optimizers", ("two functions", "one function")) == "one function":
        result = f"optimizer = {made}\nreturn optimizer, {rates}" if rates else f"return {made}"
        return (
            f"{before}def configure_optimizers(model):\n    params = [*model.parameters()]\n{indent(result, ' ' * 4)}\n"
        )
    scheduler = f"\n\ndef torch_scheduler(optimizer):\n    return {rates}\n" if rates else ""
    return f"{before}def torch_optimizer(parameters):\n    params = [*parameters]\n    return {made}\n{scheduler}"


def _port(family: Family, framework: str, options: list[str]) -> str:
    names = {"tree": "", "haiku": '\nnames = {"net": ""}'}.get(framework, "")
    return (
        '"""A port of the torch half to JAX."""\n\nimport numpy as np\nfrom jax_half import *  # noqa: F403\n'
        "from torch_half import *  # noqa: F403\n\n\n"
        "def batch(step, rank):\n    rng = np.random.default_rng((step, rank))\n"
        f"    return {{{family.batch}}}\n\n" + "\n".join(filter(None, options)) + names + "\n"
    )
