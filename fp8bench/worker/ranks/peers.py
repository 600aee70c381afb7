"""Whether those that a rank is connected with are its owner's processes: whoever is on the machine can reach a port."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_ESTABLISHED = "01"
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def check_peers() -> None:
    """Raise ConnectionError where another user's process is at the other end of a connection within this machine.

    Linux tells whose it is; elsewhere nothing is known. gloo takes whoever connects first for the rank it waits for.
    """
    ours = _own_sockets()
    ends: dict[tuple[str, str], int] = {}
    mine = []
    for line in _rows():
        here, there, state, owner, inode = line[1], line[2], line[3], int(line[7]), line[9]
        if state == _ESTABLISHED:
            ends[here, there] = owner
            mine += [(here, there)] if inode in ours else []
    for here, there in mine:
        owner = ends.get((there, here), os.getuid())
        if owner != os.getuid():
            raise ConnectionError(
                f"a process of user {owner} has connected to port {int(here.rpartition(':')[2], 16)} of this rank, "
                "which is for ranks of this run alone: what they would send each other cannot be believed"
            )


def _rows() -> list[list[str]]:
    rows = []
    for table in _TABLES:
        with contextlib.suppress(OSError):
            rows += [line.split() for line in Path(table).read_text().splitlines()[1:]]
    return rows


def _own_sockets() -> set[str]:
    """Inodes of the sockets of this process."""
    found = set()
    with contextlib.suppress(OSError):
        for file in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                name = str(file.readlink())
                if name.startswith("socket:["):
                    found.add(name[len("socket:[") : -1])
    return found
