"""Lines at which a library's modules are made, also those that a user's module makes."""

from torch import nn

from jaxddp.parity.torch_side.made_lines import lines_of_layers, noted


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)  # in a user's module


def test_a_librarys_modules_have_the_lines_that_make_them() -> None:
    with noted(nn.Module) as made:
        model = nn.Sequential(
            Own(),
            nn.GELU(),  # in a container
        )
    texts = {name: line.text for name, line in lines_of_layers(model, made).items()}
    assert set(texts) == {"", "0.inner", "1"}  # a user's module is made on many lines
    assert "# in a user's module" in texts["0.inner"] and "# in a container" in texts["1"]
    count = len(made)
    nn.GELU()
    assert len(made) == count
