"""Machines behind routers with NAT, in network namespaces, and a recording of all that passes between them.

client or server  --- router: masquerade, nothing is forwarded inwards --- .
10.0.N.2              10.0.N.1 | 198.51.100.N                              |  bridge: the internet, recorded
client or server with a public address, 198.51.100.N ----------------------'
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from tests.preloaded import NAMESPACE
from tests.train.serve.machines import Command, Machine, until

LACKS = next(
    (
        f"{tool} (apt-get install {package})"
        for tool, package in (("ip", "iproute2"), ("nft", "nftables"), ("ss", "iproute2"))
        if shutil.which(tool) is None
    ),
    None if os.geteuid() == 0 else "root",
)
_NAT = """
table ip nat {
  chain out { type nat hook postrouting priority 100; oifname "wan" masquerade; }
}
table ip filter {
  chain in { type filter hook forward priority 0; iifname "wan" ct state new drop; }
  chain own { type filter hook input priority 0; iifname "wan" ct state new drop; }
}
"""
_RECORD = """
import socket, sys
ends = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
ends.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
with open(sys.argv[1], "wb", buffering=0) as file:
    file.write(b"recording ")
    while True:
        file.write(ends.recv(1 << 17))
"""


class Place(Machine):
    """A machine in a network namespace; its commands run there with all processes that they start."""

    def __init__(self, folder: Path, namespace: str, address: str) -> None:
        super().__init__(folder)
        self.namespace, self.address = namespace, address  # where others reach it, if they do
        self.cable = "", ""  # the namespace and the name of its port at the bridge

    def type(self, *arguments: str, command: tuple[str, ...] = ("-m", "thinpipe"), **given: object) -> Command:
        return super().type(*arguments, command=command, environment={NAMESPACE: self.namespace}, **given)

    def plug(self, state: Literal["up", "down"]) -> None:
        """Plug its cable in, or out."""
        _inside(self.cable[0], f"ip link set {self.cable[1]} {state}")

    def let_in(self, address: str) -> None:
        """Drop new connections of all others."""
        drop = f'iifname "wan" ct state new ip saddr != {address} drop'
        rules = f"table ip f {{\n chain i {{\n type filter hook input priority 0;\n {drop};\n }}\n}}\n"
        _inside(self.namespace, "nft -f -", text=rules)

    def move(self, address: str) -> None:
        """Take another address, as in another network: packets to the old one arrive nowhere, without an error."""
        _inside(self.namespace, "ip address flush dev wan", f"ip address add {address}/24 dev wan")

    def is_connected(self, address: str) -> bool:
        """Return True if a connection of this namespace has an address here."""
        return f" {address}:" in _run("ip", "netns", "exec", self.namespace, "ss", "-Htn", "state", "established")

    def listeners(self) -> list[str]:
        """Return the addresses that listen for TCP in this namespace, as ``ss`` lists them."""
        listed = _run("ip", "netns", "exec", self.namespace, "ss", "-Htln")
        return [line.split()[3] for line in listed.splitlines()]


@contextmanager
def internet(
    folder: Path, places: Mapping[str, bool], *, records: bool = True
) -> Iterator[tuple[dict[str, Place], Path]]:
    """Machines by name, True for one behind NAT; and the file of all bytes that pass the bridge between them."""
    mark = f"tp{os.getpid()}"
    cloud, recording = f"{mark}-cloud", folder / "recording"
    namespaces = [cloud]
    found: dict[str, Place] = {}
    recorder = None
    try:
        _run("ip", "netns", "add", cloud)
        _inside(cloud, "ip link add cloud type bridge", "ip link set cloud up", "ip link set lo up")
        for number, (name, is_hidden) in enumerate(places.items(), 1):
            public, own = f"198.51.100.{number}", f"{mark}-{name}"
            namespaces.append(own)
            _run("ip", "netns", "add", own)
            _inside(own, "ip link set lo up")
            edge = own
            if is_hidden:
                edge = f"{own}-nat"
                namespaces.append(edge)
                _run("ip", "netns", "add", edge)
                _join(own, "wan", edge, "down")
                _inside(own, f"ip address add 10.0.{number}.2/24 dev wan", f"ip route add default via 10.0.{number}.1")
                _inside(edge, f"ip address add 10.0.{number}.1/24 dev down", "sysctl -qw net.ipv4.ip_forward=1")
            _join(edge, "wan", cloud, f"port{number}")
            _inside(cloud, f"ip link set port{number} master cloud")
            _inside(edge, f"ip address add {public}/24 dev wan")
            if is_hidden:
                _inside(edge, "nft -f -", text=_NAT)
            else:
                _inside(edge, "ip route add default via 198.51.100.254")
            found[name] = Place(folder / name, own, public)
            found[name].cable = cloud, f"port{number}"
        if records:
            recorder = subprocess.Popen(["ip", "netns", "exec", cloud, sys.executable, "-c", _RECORD, str(recording)])
        until(lambda: recording.exists() or not records, 60, lambda: "nothing is recorded")
        yield found, recording
    finally:
        for each in found.values():
            each.end()
        if recorder is not None:
            recorder.kill()
            recorder.wait()
        for each_name in namespaces:
            _end_all(each_name)
            subprocess.run(["ip", "netns", "delete", each_name], check=False, capture_output=True)


def _end_all(namespace: str) -> None:
    """Kill what still runs in a namespace of ours."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], check=False, capture_output=True, text=True).stdout
    for pid in listed.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    if listed:
        time.sleep(0.2)


def _join(one: str, name: str, other: str, other_name: str) -> None:
    _run("ip", "link", "add", name, "netns", one, "type", "veth", "peer", "name", other_name, "netns", other)
    _inside(one, f"ip link set dev {name} up")
    _inside(other, f"ip link set dev {other_name} up")


def _inside(namespace: str, *commands: str, text: str | None = None) -> None:
    for each in commands:
        _run("ip", "netns", "exec", namespace, *each.split(), text=text)


def _run(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
