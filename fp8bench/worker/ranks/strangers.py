"""Whether somebody else is connected to this rank: gloo takes whoever comes first, and asks nobody who he is.

Linux alone tells whose a connection is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_ESTABLISHED, _LISTENING = "01", "0A"


class _End(NamedTuple):
    """One end of a connection of this machine, as /proc/net/tcp has it: both addresses, state, owner, inode."""

    here: str
    there: str
    state: str
    owner: int
    inode: str


def watch_groups(c10d: Any) -> None:
    """From here on torch makes no process group to which a stranger is connected: it raises instead.

    All connections of a group are there once it is made, and none comes after. So nobody else's bytes are read.
    """
    make: Callable[..., Any] = c10d._new_process_group_helper

    def made(*arguments: Any, **named: Any) -> Any:
        group = make(*arguments, **named)
        refuse_strangers()
        return group

    c10d._new_process_group_helper = made


def refuse_strangers() -> None:
    """Raise where another user holds the other end of a connection that this process has accepted."""
    ends = list(_ends())
    numbers = set(_own_sockets())
    own = [end for end in ends if end.inode in numbers]
    doors = {one.here for one in own if one.state == _LISTENING}
    taken = {(one.there, one.here) for one in own if one.state == _ESTABLISHED and one.here in doors}
    for end in ends:
        # One without an inode belongs to nobody any more: whoever had it has closed it.
        if (end.here, end.there) in taken and end.inode != "0" and end.owner != os.geteuid():
            raise PermissionError(
                f"a process of another user (number {end.owner}) has connected to this rank, where only ranks belong: "
                "what it sends would be taken for theirs. Measure again without that process."
            )


def _ends() -> Iterator[_End]:
    for name in ("tcp", "tcp6"):
        file = Path("/proc/self/net", name)
        for line in file.read_text().splitlines()[1:] if file.exists() else ():
            words = line.split()
            yield _End(words[1], words[2], words[3], int(words[7]), words[9])


def _own_sockets() -> Iterator[str]:
    """Numbers of this process's sockets."""
    folder = Path("/proc/self/fd")
    for file in folder.iterdir() if folder.exists() else ():
        try:
            kind, _, number = str(file.readlink()).partition(":")
        except OSError:  # closed meanwhile
            continue
        if kind == "socket":
            yield number.strip("[]")
