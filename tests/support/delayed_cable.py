"""`python -m tests.support.delayed_cable`: a cable between two network namespaces that delays every packet.

Both of its ends are tap devices, whose frames this process carries from one to the other. A kernel without netem can
delay packets in no other way.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time
from pathlib import Path

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
CLONE_NEWNET = 0x40000000
FRAME = 65536  # bytes of the longest


def tap(namespace: str, device: str) -> int:
    """Create a tap device in a namespace, which this process enters; return its descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


def carry(one: int, other: int, delay: float) -> None:
    """Carry frames between two devices, each `delay` seconds after it came, until this process is killed."""
    ends = {one: other, other: one}
    under_way: list[tuple[float, int, int, bytes]] = []  # due time, number, device, frame
    number = 0
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for come in select.select(list(ends), [], [], wait)[0]:
            number += 1
            heapq.heappush(under_way, (time.monotonic() + delay, number, ends[come], os.read(come, FRAME)))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, device, frame = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # an end that is not up yet loses the frame
                os.write(device, frame)


def main(delay: str, *ends: str) -> None:
    """Lay the cable; `ends` are the namespace and the device of one end, and those of the other."""
    one, other = tap(*ends[:2]), tap(*ends[2:])
    print("laid", flush=True)
    carry(one, other, float(delay))


if __name__ == "__main__":
    main(*sys.argv[1:])
