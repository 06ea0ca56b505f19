"""Examination of the diagnosis: faults that its catalogue lacks, in ports as their users write them.

A port is a pair of source files, `<port>_torch.py` and `<port>_jax.py`; `<port>.py` lists its faults.
"""

from pathlib import Path

from . import actor_critic, contrastive, convnet, diffusion, encoder, gpt, mlp, recurrent, vae
from .fault import STEPS, WORLD_SIZE, OutsideFault, write_files

PORTS = tuple(STEPS)
OUTSIDE: dict[str, OutsideFault] = {
    f"{fault.port}/{name}": fault
    for listed in (mlp, convnet, gpt, encoder, recurrent, vae, diffusion, actor_critic, contrastive)
    for name, fault in listed.FAULTS.items()
}

__all__ = ["OUTSIDE", "PORTS", "STEPS", "WORLD_SIZE", "OutsideFault", "write_correct_port", "write_port"]


def write_port(fault: OutsideFault, folder: Path) -> Path:
    """Write the port with the fault into an empty folder, and return the path of the program."""
    return write_files(fault.port, fault.edits, folder)


def write_correct_port(port: str, folder: Path) -> Path:
    """Write the port without a fault into an empty folder, and return the path of the program."""
    return write_files(port, (), folder)
