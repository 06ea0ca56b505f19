"""Tables of names are proposed by kinds of layers and the order of their use."""

import pytest
import torch
from torch import nn

from jaxddp.parity.convert import Converter, NamesError
from jaxddp.parity.convert.proposal import Unpaired, folded, paired


class Attention(nn.Module):
    """A block whose layers are defined in another order than they are used in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.attn = nn.MultiheadAttention(4, 2)
        self.norm = nn.LayerNorm(4)
        self.first = nn.Linear(4, 4)


FLAX = {
    "MultiHead_0.query.kernel": (4, 2, 2),
    "MultiHead_0.query.bias": (2, 2),
    "MultiHead_0.key.kernel": (4, 2, 2),
    "MultiHead_0.key.bias": (2, 2),
    "MultiHead_0.value.kernel": (4, 2, 2),
    "MultiHead_0.value.bias": (2, 2),
    "MultiHead_0.out.kernel": (2, 2, 4),
    "MultiHead_0.out.bias": (4,),
    "Norm_0.scale": (4,),
    "Norm_0.bias": (4,),
    "Dense_0.kernel": (4, 4),
    "Dense_0.bias": (4,),
    "Dense_1.kernel": (4, 4),
    "Dense_1.bias": (4,),
}
USE = ("attn", "norm", "first", "last")


def unpaired(module: nn.Module, jax: dict[str, tuple[int, ...]]) -> Unpaired:
    tensors = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    return Unpaired([*jax], [*tensors], jax, tensors, dict(module.named_modules()))


def test_layers_pair_off_by_kind_in_the_order_of_use() -> None:
    found = unpaired(Attention(), FLAX)
    right = {"MultiHead_0": "attn", "Norm_0": "norm", "Dense_0": "first", "Dense_1": "last"}
    assert paired(found.in_order((), USE)).pairs == right
    # By the order of definition the two layers of one size change places.
    assert paired(found).pairs == right | {"Dense_0": "last", "Dense_1": "first"}


def test_kinds_of_which_one_side_has_more_are_left_out() -> None:
    jax = {name: shape for name, shape in FLAX.items() if not name.startswith("Dense_1")}
    assert paired(unpaired(Attention(), jax)).pairs == {"MultiHead_0": "attn", "Norm_0": "norm"}


def test_an_embedding_is_no_layer_of_the_same_size() -> None:
    module = nn.ModuleDict({"words": nn.Embedding(4, 4), "fc": nn.Linear(4, 4, bias=False)})
    jax = {"Dense_0.kernel": (4, 4), "Embed_0.embedding": (4, 4)}
    assert paired(unpaired(module, jax)).pairs == {"Dense_0": "fc", "Embed_0": "words"}


def test_an_embedding_bag_is_an_embedding() -> None:
    module = nn.ModuleDict({"words": nn.EmbeddingBag(4, 4), "fc": nn.Linear(4, 4, bias=False)})
    jax = {"Dense_0.kernel": (4, 4), "Embed_0.embedding": (4, 4)}
    assert paired(unpaired(module, jax)).pairs == {"Dense_0": "fc", "Embed_0": "words"}


def test_arrays_of_the_model_itself_have_a_line_each() -> None:
    """ "" is no prefix of a name."""
    module = nn.ModuleDict({"fc": nn.Linear(3, 5), "head": nn.ParameterDict({"bias": torch.zeros(2)})})
    jax = {"kernel": (3, 5), "bias": (5,), "out.bias": (2,)}
    names = paired(unpaired(module, jax)).pairs
    assert names == {"kernel": "fc.kernel", "bias": "fc.bias", "out": "head"}
    Converter(module, jax, names)


def test_the_counter_of_a_batch_norm_follows_its_layer() -> None:
    module = nn.ModuleDict({"bn": nn.BatchNorm1d(3)})
    jax = {f"norm.{leaf}": (3,) for leaf in ("scale", "bias", "mean", "var")} | {"norm.num_batches_tracked": ()}
    with pytest.raises(NamesError) as caught:
        Converter(module, jax)
    assert [candidate.table for candidate in caught.value.candidates()] == [{"norm": "bn"}]


class OwnNorm(nn.Module):
    """A norm as models bring their own: nanoGPT's LayerNorm, a Llama's RMSNorm."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.bias = nn.Parameter(torch.zeros(4)) if bias else None


@pytest.mark.parametrize("leaf", ["scale", "weight"])  # Flax's, Equinox's
@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_of_the_model_itself_is_a_norm(leaf: str, bias: bool) -> None:
    module = nn.ModuleDict({"fc": nn.Linear(4, 1, bias=False), "ln": OwnNorm(bias), "ln_f": nn.LayerNorm(4)})
    jax = {
        "LayerNorm_0." + leaf: (4,),
        "LayerNorm_1." + leaf: (4,),
        "LayerNorm_1.bias": (4,),
        "Dense_0.kernel": (4, 1),
    }
    jax |= {"LayerNorm_0.bias": (4,)} if bias else {}
    names = {"LayerNorm_0": "ln", "LayerNorm_1": "ln_f", "Dense_0": "fc"}
    assert paired(unpaired(module, jax)).pairs == names
    assert {piece.torch for piece in Converter(module, jax, names).pieces} == module.state_dict().keys()


def test_a_stack_of_norms_is_a_norm_too() -> None:
    module = nn.ModuleDict({"h": nn.ModuleList([nn.ModuleDict({"ln": nn.LayerNorm(4)}) for _ in range(3)])})
    jax = {"blocks.norm.weight": (3, 4), "blocks.norm.bias": (3, 4)}
    with pytest.raises(NamesError) as caught:
        Converter(module, jax)
    assert [candidate.table for candidate in caught.value.candidates()] == [{"blocks.norm": "h.{}.ln"}]


def test_a_branch_with_equal_names_is_one_line() -> None:
    block = nn.ModuleDict({"fc1": nn.Linear(3, 5), "fc2": nn.Linear(5, 3)})
    module = nn.ModuleDict({"layers": nn.ModuleList([block, nn.ModuleDict({"other": nn.Linear(2, 3)})])})
    jax = {f"Block_0.{fc}.{leaf}": shape for fc, leaf, shape in SHAPES}
    pairs = paired(unpaired(module, jax | {"Dense_0.kernel": (2, 3), "Dense_0.bias": (3,)})).pairs
    assert folded(pairs) == {"Block_0": "layers.0", "Dense_0": "layers.1.other"}


SHAPES = (
    ("fc1", "kernel", (3, 5)),
    ("fc1", "bias", (5,)),
    ("fc2", "kernel", (5, 3)),
    ("fc2", "bias", (3,)),
)
