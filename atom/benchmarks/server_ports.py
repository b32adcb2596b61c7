"""Free ports of this host, none of them given out twice."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

from atom.errors import BadInput

#: below the ports that systems hand out by themselves
_PORTS = range(20_000, 32_768)


class PortLease:
    """A free TCP port of this host, held against other leases until :meth:`release`.

    Two leases at once never share a port, in one process or in several. Who takes ports without a
    lease can still come first: then the server cannot listen and does not start.
    """

    def __init__(self, seed: int | None = None) -> None:
        folder = Path(tempfile.gettempdir()) / f"atom-ports-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        ports = list(_PORTS)
        random.Random(seed).shuffle(ports)
        for port in ports:
            lock = (folder / str(port)).open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                continue
            if _is_free(port):
                self.port = port
                self._lock: IO[str] | None = lock
                return
            lock.close()
        raise BadInput(f"no free port from {_PORTS[0]} to {_PORTS[-1]}: end what listens there")

    def release(self) -> None:
        """Let others have the port."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _is_free(port: int) -> bool:
    for family, host in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # an old connection that is only waiting to be forgotten keeps nobody out
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family is socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((host, port))
        except OSError:
            if family is socket.AF_INET or _has_ipv6():
                return False
    return True


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
