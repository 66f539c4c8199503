"""The network interface of a run: that of the address by which Ray knows a machine."""

import fcntl
import os
import socket
import struct

ADDRESS_OF_INTERFACE = 0x8915
"""Linux's number for the question"""


def stay_on_interface(address: str) -> None:
    """Let gloo use the interface of an address, unless told otherwise; it would ask for the name.

    NCCL chooses the fastest one on its own, but on a loopback cluster it has to stay there.
    """
    name = interface_of(address)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if address.startswith("127."):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def listener_at(address: str) -> socket.socket:
    """Return a socket that is reached through one address of this machine only, at a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def interface_of(address: str) -> str | None:
    """Return the interface of an IPv4 address, where the system tells."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            question = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, ADDRESS_OF_INTERFACE, question)
            except OSError:
                continue  # it has no such address, or this is not Linux
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
