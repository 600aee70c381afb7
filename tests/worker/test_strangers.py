"""Whose process is connected to a rank."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from fp8bench.worker.ranks.bench import refuse_strangers, watch_groups

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells whose a connection is")


@pytest.fixture
def accepted() -> Iterator[socket.socket]:
    """The other end of a connection that this process has accepted."""
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as other:
        taken, _ = door.accept()
        with taken:
            yield other


def test_own_processes_alone_may_be_connected(accepted: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_strangers()
    ours = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: ours + 1)
    with pytest.raises(PermissionError, match=rf"another user \(number {ours}\) has connected to this rank"):
        refuse_strangers()
    accepted.close()  # whoever has gone sends nothing
    refuse_strangers()


def test_connections_that_this_process_has_opened_may_be_to_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        child = os.fork()
        if not child:
            signalled, _ = door.accept()
            signalled.recv(1)
            os._exit(0)
        address = door.getsockname()
    with socket.create_connection(address) as own:
        ours = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: ours + 1)
        refuse_strangers()
        own.send(b".")
    os.waitpid(child, 0)


def test_no_group_is_made_with_a_stranger(accepted: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_groups = SimpleNamespace(_new_process_group_helper=lambda name: f"the group {name}")
    watch_groups(torch_groups)
    assert torch_groups._new_process_group_helper("a") == "the group a"
    ours = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: ours + 1)
    with pytest.raises(PermissionError):
        torch_groups._new_process_group_helper("a")
