"""Who cannot be reached: told apart from who is there and listens to nothing."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from apart import apart
from cables import two_hosts
from moeclipse.comm.watch.reach import own_address, unreachable


def test_the_address_of_an_interface() -> None:
    assert own_address("lo") == "127.0.0.1"
    assert own_address("nothing-like-that") == ""


def test_a_host_that_is_there_answers_whether_it_listens_or_not() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        assert unreachable({0: "127.0.0.1", 1: "127.0.0.2", 2: "", 3: "127.0.0.1"}) == []


def test_what_is_no_address_does_not_answer() -> None:
    assert unreachable({4: "256.1.1.1"}, patience_s=0.1) == [4]


@pytest.mark.root
@apart
def test_a_cable_that_is_pulled() -> None:
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        child = os.fork()
        if child == 0:
            hosts[0].enter()
            everyone = {0: hosts[0].address, 1: hosts[1].address, 2: hosts[1].address}
            before = (own_address(hosts[0].interface), unreachable(everyone, 30.0))
            hosts[1].pull()
            os._exit(0 if (before, unreachable(everyone)) == ((hosts[0].address, []), [1, 2]) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
