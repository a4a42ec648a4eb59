"""A listening socket with a second number, above all others: the kernel lets go of it first."""

import os
import socket
from contextlib import suppress

from dispatcher.fronts.listening_sockets import ListeningSockets


def numbers() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def numbers_of(one: socket.socket) -> list[int]:
    found = []
    for number in sorted(numbers()):
        with suppress(OSError):  # the listing's own
            if os.path.samestat(os.fstat(number), os.fstat(one.fileno())):
                found.append(number)
    return found


def test_only_what_listens_on_the_port_gets_a_second_number_and_close_takes_it_back():
    with socket.socket() as listens, socket.socket() as bound, socket.socket() as other:
        for each in (listens, bound, other):
            each.bind(("127.0.0.1", 0))
        listens.listen()
        other.listen()
        before = numbers()
        second = ListeningSockets(listens.getsockname()[1])
        first, added = numbers_of(listens)
        assert numbers() - before == {added}, "others may close theirs meanwhile"
        assert first == listens.fileno()
        assert added > max(bound.fileno(), other.fileno())
        assert len(numbers_of(bound)) == len(numbers_of(other)) == 1
        second.close()
        second.close()
        assert numbers_of(listens) == [first]
        socket.create_connection(listens.getsockname(), timeout=5).close()
