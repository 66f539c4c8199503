"""Network interfaces and listening sockets: a run is reachable through one address only."""

import fcntl
import os
import socket
import struct

SIOCGIFADDR = 0x8915
"""Linux's ioctl that returns the address of an interface"""


def use_interface_of(address: str) -> None:
    """Make gloo use the interface of an address (default), instead of resolving the host name.

    NCCL chooses the fastest interface itself, but a loopback cluster must stay on loopback.
    """
    name = interface_of(address)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if address.startswith("127."):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def listen_at(address: str) -> socket.socket:
    """Return a socket that listens on one address of this machine only, at a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def interface_of(address: str) -> str | None:
    """Return the interface of an IPv4 address; None where the system does not report it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                reply = fcntl.ioctl(probe, SIOCGIFADDR, request)
            except OSError:
                continue  # no IPv4 address, or not Linux
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
