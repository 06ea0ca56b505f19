"""Which of many cases `make test` takes."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """All as parameters: `make test` takes one in `count`, as they come in families of a few, `make test-all` each."""
    parameters = [case if hasattr(case, "marks") else pytest.param(case) for case in cases]
    return [
        parameter._replace(marks=[pytest.mark.large]) if number % count else parameter
        for number, parameter in enumerate(parameters)
    ]
