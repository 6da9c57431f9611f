"""Addresses and interfaces of this machine, of IPv4 and IPv6."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from thinpipe.comm.errors import WorkerError

LOOPBACK = "lo"
_SIOCGIFADDR, _SIOCGIFFLAGS = 0x8915, 0x8913  # of <linux/sockios.h>; the first knows IPv4 only
_IFF_UP = 1  # of <linux/if.h>
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def address_and_port(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int, *, backlog: int | None = None) -> socket.socket:
    """Return a socket that listens at an address of either family; raise OSError if it cannot."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family, backlog=backlog)


def address_towards(host: str) -> str:
    """Return the local address used to reach a host; raise OSError without a route or for an unknown name."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of UDP: nothing is sent
        return str(probe.getsockname()[0])


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface, as gloo would choose it, or else its IPv6 address."""
    found = _ipv4_of(interface) or next(iter(_ipv6_of(interface)), None)
    if found is not None and _is_up(interface):
        return found
    remedy = (
        f"bring it up: ip link set {interface} up"
        if interface == LOOPBACK
        else "give it one, or name another interface in GLOO_SOCKET_IFNAME"
    )
    kind = "the loopback interface" if interface == LOOPBACK else "interface"
    raise WorkerError(f"{kind} {interface}, over which workers connect, is down or has no address: {remedy}", code=2)


def interface_with(address: str) -> str | None:
    """Return the interface that has an address; None if there is none."""
    wanted = address.partition("%")[0]  # without the scope of a link-local address
    for _, name in socket.if_nameindex():
        if wanted in (_ipv4_of(name), *_ipv6_of(name)):
            return name
    return None


def _is_up(interface: str) -> bool:
    answer = _ask(interface, _SIOCGIFFLAGS)
    return answer is not None and bool(struct.unpack_from("H", answer, 16)[0] & _IFF_UP)


def _ipv4_of(interface: str) -> str | None:
    answer = _ask(interface, _SIOCGIFADDR)
    return None if answer is None else socket.inet_ntoa(answer[20:24])


def _ask(interface: str, request: int) -> bytes | None:
    """Return the kernel's answer, a ``struct ifreq``; None if there is no such interface or address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None


def _ipv6_of(interface: str) -> list[str]:
    """Return the IPv6 addresses of an interface; link-local ones, which need a scope, last."""
    try:
        rows = [line.split() for line in _IPV6_ADDRESSES.read_text().splitlines()]
    except OSError:  # no IPv6, or not Linux
        return []
    found = [ipaddress.IPv6Address(int(row[0], 16)) for row in rows if row[-1] == interface]
    return [str(address) for address in sorted(found, key=lambda address: address.is_link_local)]
