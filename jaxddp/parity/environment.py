"""Hardware and versions with which a result was obtained."""

import os
import platform
from datetime import date
from importlib.metadata import version

PACKAGES = ("jax", "flax", "optax", "torch", "numpy")


def environment() -> dict[str, str]:
    """Return the date, the hardware and the versions, by name.

    >>> sorted(environment())
    ['date', 'flax', 'hardware', 'jax', 'numpy', 'optax', 'python', 'torch']
    """
    hardware = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    packages = {package: version(package) for package in PACKAGES}
    return {"date": date.today().isoformat(), "hardware": hardware, "python": platform.python_version(), **packages}
