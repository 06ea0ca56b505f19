"""`python -m benchmarks.versions`: print the row of this environment for the table of docs/versions.md."""

import datetime
import platform
from importlib.metadata import version

PACKAGES = ("jax", "flax", "optax", "torch", "orbax-checkpoint", "tyro")


def row() -> str:
    """Return date, Python and the packages' versions as a row of a table.

    >>> row().count("|") == len(PACKAGES) + 3
    True
    """
    cells = [datetime.date.today().isoformat(), platform.python_version(), *map(version, PACKAGES)]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(row())
