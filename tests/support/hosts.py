"""Hosts on one machine: network namespaces with addresses, joined by a switch (iproute2, as root)."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SWITCH = "jaxddp-switch"


@dataclass(frozen=True)
class Host:
    """A network namespace.

    Attributes:
        number: number of the host, from 0.
    """

    number: int

    @property
    def name(self) -> str:
        """Name of the namespace."""
        return f"jaxddp-host{self.number}"

    @property
    def address(self) -> str:
        """Address of the host, in the loopback range: it cannot leave the machine."""
        return f"127.77.0.{self.number + 1}"

    @property
    def port(self) -> str:
        """Switch's end of the host's cable."""
        return f"port{self.number}"

    def command(self, *words: str) -> list[str]:
        """Return the command that runs a command on this host."""
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self) -> None:
        """Unplug the cable."""
        ip("-n", SWITCH, "link", "set", self.port, "down")


def run(*command: str) -> None:
    """Run a command; raise an error with its words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stderr)


def ip(*words: str) -> None:
    """Run `ip`."""
    run("ip", *words)


def missing() -> str:
    """Return why this machine can have no hosts; "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    made = subprocess.run(["ip", "netns", "add", "jaxddp-try"], capture_output=True)
    if made.returncode:
        return "the system allows no network namespaces"
    ip("netns", "delete", "jaxddp-try")
    return ""


@contextlib.contextmanager
def hosts(count: int, delay: float = 0.0) -> Iterator[list[Host]]:
    """Create hosts that reach each other, and remove them with all that runs on them.

    Args:
        count: number of hosts.
        delay: seconds for which the cable of each host holds a packet back.
    """
    made = [Host(number) for number in range(count)]
    try:
        ip("netns", "add", SWITCH)
        ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "bridge", "up")
        with contextlib.ExitStack() as cables:
            for host in made:
                ip("netns", "add", host.name)
                if delay:
                    cables.enter_context(_delayed(host, delay))
                else:
                    ends = ("netns", SWITCH, "type", "veth", "peer", "name", "cable", "netns", host.name)
                    ip("link", "add", host.port, *ends)
                _plug_in(host)
            yield made
    finally:
        for host in made:
            _remove(host)
        subprocess.run(["ip", "netns", "delete", SWITCH], capture_output=True)


@contextlib.contextmanager
def _delayed(host: Host, delay: float) -> Iterator[None]:
    """Lay a cable that delays all packets."""
    ends = (SWITCH, host.port, host.name, "cable")
    command = [sys.executable, "-m", "tests.support.delayed_cable", f"{delay}", *ends]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as carrier:
        assert carrier.stdout is not None
        try:
            assert carrier.stdout.readline() == b"laid\n"
            yield
        finally:
            carrier.kill()


def _plug_in(host: Host) -> None:
    ip("-n", SWITCH, "link", "set", host.port, "master", "bridge", "up")
    inside = ("ip", "netns", "exec", host.name)
    run(*inside, "sysctl", "-qw", "net.ipv4.conf.all.route_localnet=1", "net.ipv4.conf.default.route_localnet=1")
    # By default all of 127.0.0.0/8 is this host.
    ip("-n", host.name, "link", "set", "lo", "up")
    ip("-n", host.name, "address", "del", "127.0.0.1/8", "dev", "lo")
    ip("-n", host.name, "address", "add", "127.0.0.1/32", "dev", "lo")
    ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "cable")
    ip("-n", host.name, "link", "set", "cable", "up")
    # gloo listens on the address of the host's name.
    names = Path("/etc/netns", host.name, "hosts")
    names.parent.mkdir(parents=True, exist_ok=True)
    names.write_text(f"127.0.0.1 localhost\n{host.address} {socket.gethostname()}\n")


def _remove(host: Host) -> None:
    listed = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True)
    for pid in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), 9)
    subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)
    shutil.rmtree(Path("/etc/netns", host.name), ignore_errors=True)
