"""Which hosts cannot be reached over the network of the ranks: asked when all ranks wait and none moves.

    own_address("eth1")                         by which others reach this rank; "": as its host is called
    unreachable({0: "10.0.0.1", 1: ...})        ranks whose address does not answer

A host that is there answers a connection to a closed port at once, with a refusal: so nothing has to listen.
What does not answer within PATIENCE_S, or what the kernel knows no way to, is cut off.
"""

from __future__ import annotations

import fcntl
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from errno import ECONNREFUSED, EINPROGRESS

PATIENCE_S = 1.0
PORT = 1
"""Nothing listens there (tcpmux), and whether something does makes no difference."""
SIOCGIFADDR = 0x8915


def own_address(interface: str) -> str:
    """Nothing where it cannot be said."""
    try:
        if not interface:
            return socket.gethostbyname(socket.gethostname())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            request = struct.pack("256s", interface[:15].encode())
            return socket.inet_ntoa(fcntl.ioctl(asking.fileno(), SIOCGIFADDR, request)[20:24])
    except OSError:
        return ""


def unreachable(addresses: Mapping[int, str], patience_s: float = PATIENCE_S) -> list[int]:
    """The ranks at addresses that do not answer; those without an address are not asked."""
    answers: set[str] = set()
    until = time.monotonic() + patience_s
    with selectors.DefaultSelector() as selector:
        for address in sorted({address for address in addresses.values() if address}):
            asking = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            asking.setblocking(False)
            try:
                code = asking.connect_ex((address, PORT))
            except OSError:
                code = -1  # no address at all
            if code == EINPROGRESS:
                selector.register(asking, selectors.EVENT_WRITE, address)
                continue
            asking.close()
            answers |= {address} if code in (0, ECONNREFUSED) else set()
        while selector.get_map() and (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                assert isinstance(key.fileobj, socket.socket)
                code = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                answers |= {key.data} if code in (0, ECONNREFUSED) else set()
                selector.unregister(key.fileobj)
                key.fileobj.close()
        for key in [*selector.get_map().values()]:
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
    return sorted(rank for rank, address in addresses.items() if address and address not in answers)
