"""Functions that no call was seen of are those that nothing but a run could have called."""

import importlib.util
import sys
from pathlib import Path

from jaxddp.parity.user_code.uncalled import calls_noted, uncalled

TEXT = """
from functools import cache

def forward(x):
    return helper(x) if x > 0 else negative(x)

def helper(x):
    return x

def negative(x):
    return deeper(x)

def deeper(x):
    return -x

@cache
def traced_once(x):
    return within(x)

def within(x):
    return x

def metrics(x):
    return measured(x)

def measured(x):
    return x

class Layer:
    def __call__(self, x):
        return forward(x)

    def generate(self):
        return []

def main():
    printed()

def printed():
    print()

def of_table():
    return of_entry()

def of_entry():
    return 1

TABLE = {"a": of_table}

if __name__ == "__main__":
    main()
"""


def loaded(folder: Path) -> object:
    (folder / "port.py").write_text(TEXT)
    spec = importlib.util.spec_from_file_location("port_of_calls", folder / "port.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(folder: Path, x: int) -> list[str]:
    module = loaded(folder)
    before = sys.gettrace()
    with calls_noted(f"{folder / 'port.py'}") as called:
        module.Layer()(x)  # type: ignore[attr-defined]
    assert sys.gettrace() is before
    return [name for name, line in uncalled(f"{folder / 'port.py'}", called, ["metrics"])]


def test_a_branch_that_no_step_took_and_an_unused_method_are_found(tmp_path: Path) -> None:
    assert names(tmp_path, 1) == ["negative", "deeper", "generate"]
    assert names(tmp_path, -1) == ["helper", "generate"]


def test_a_file_that_is_gone_has_no_functions(tmp_path: Path) -> None:
    assert uncalled(f"{tmp_path / 'port.py'}", [], []) == []
