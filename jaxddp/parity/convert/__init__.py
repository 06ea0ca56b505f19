"""Conversion of weights between a torch module and its jax twin: names and layouts, both ways, nothing left over.

    torch                                   jax
    Linear           weight (out, in)       kernel (in, out); LinearGeneral's (*in, *out)
    Conv1d..3d       weight (out, in/g, *k) kernel (*k, in/g, out)
    ConvTranspose    weight (in, out, *k)   kernel (*k, in, out) with k reversed, or (*k, out, in)
    Embedding        weight (num, features) embedding
    norms            weight, running_mean   scale, mean; running_var: var
    MultiheadAttention
        in_proj_weight (3 E, E)             query, key, value: kernel (E, heads, E / heads)
        out_proj.weight                     out.kernel (heads, E / heads, E)
    Conv1D (Hugging Face) weight (in, out)  kernel (in, out), or FlaxConv1D's (out, in)
    any other parameter                     the same name and shape

In trees of arrays w, b, offset and embeddings are Haiku's names of these, weight and bias Equinox's, the weight in
torch's layout; where the shape shows another layout than the name, the shape counts. Square arrays have the layout of
the other layers of their class.

Stacks, fused layers and other arrangements are rules of `names`, see `jaxddp.parity.port.rules`.
`Converter` converts in memory, `jaxddp convert` converts files. All maps but sums only permute
elements, so gradients, updates and moments convert like the weights.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxddp.parity.convert.converter import Converter, NamesError, tied_names, under_all_names
    from jaxddp.parity.convert.entries import RuleError, find_entry
    from jaxddp.parity.convert.pieces import Piece

__all__ = ["Converter", "NamesError", "Piece", "RuleError", "find_entry", "tied_names", "under_all_names"]

_HOMES = {"Piece": "pieces", "RuleError": "entries", "find_entry": "entries"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that the command prints its help without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'converter')}"), name)
