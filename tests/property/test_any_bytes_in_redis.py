"""Whatever anybody puts at any key, at any moment: no service ends, the last good table serves, all is right again.

A whole system in virtual time (tests/support/virtual), its values real bytes. Hypothesis draws what is put where and
when, and what Redis refuses meanwhile; `System` checks its promises all along, and 20 s after the last of it.
"""

import copy
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.virtual.faults import ALL_REFUSED, WRITES_REFUSED
from tests.support.virtual.promises import told
from tests.support.virtual.redis import Stream
from tests.support.virtual.system import FAULTS_S, System, history
from trefoil.runtime import state_errors

FORMER, OTHERS, APPENDED, STREAM = "its former value", "another key's value", "an entry", "a stream"

VALUES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([FORMER, OTHERS, STREAM, None, [b"a list"], {b"a": b"hash"}]),
    st.binary(max_size=30).map(lambda data: (APPENDED, data)),
    st.just(bytes(state_errors.VALUE_MAX_BYTES + 2)),
)
MOMENTS = st.floats(*FAULTS_S)
SPOILS = st.lists(st.tuples(MOMENTS, st.integers(0, 40), VALUES), min_size=1, max_size=12)
REFUSALS = st.lists(
    st.tuples(MOMENTS, st.sampled_from([*WRITES_REFUSED, *ALL_REFUSED]), st.floats(0.1, 6.0)), max_size=2
)
HINTS = st.lists(st.tuples(MOMENTS, st.binary(max_size=20)), max_size=3)


def spoil(system: System, number: int, value: Any) -> None:
    """Put a value at a key that is there."""
    server, names = system.server, system.server.names(system.keys.prefix)
    if not names or not system.redis_takes:
        return
    key = names[number % len(names)]
    if value == FORMER:
        value = server.former(key)
    elif value == OTHERS:
        value = copy.deepcopy(server.value(names[(number + 1) % len(names)]))
    elif value == STREAM:
        value = Stream()
    elif isinstance(value, tuple):
        stream = server.value(key) if server.type(key) == "stream" else Stream()
        server.spoil(key, stream)
        server.append(key, {b"d": value[1]}, 10_000)
        return
    system.note(f"SPOILT {key}: {value!r:.60}")
    server.spoil(key, value)
    server.publish(system.keys.changed(), key)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(SPOILS, REFUSALS, HINTS, st.integers(0, 1000))
def test_no_bytes_end_a_service_and_all_keys_are_right_again(
    spoils: Sequence[tuple[float, int, Any]],
    refusals: Sequence[tuple[float, str, float]],
    hints: Sequence[tuple[float, bytes]],
    seed: int,
) -> None:
    def strike(system: System) -> None:
        server = system.server
        for at_s, number, value in spoils:
            system.loop.call_later(at_s, spoil, system, number, value)
        for at_s, text, lasts_s in refusals:
            name = "refuses" if text in ALL_REFUSED else "refuses_writes"
            system.loop.call_later(at_s, setattr, server, name, text)
            system.loop.call_later(at_s + lasts_s, setattr, server, name, "")
        for at_s, data in hints:
            system.loop.call_later(at_s, server.publish_bytes, system.keys.changed(), data)

    found, system = history(seed, strike, real_bytes=True)
    assert not found, told(found, system.log)
    assert {end for request in system.requests for end in request.ends} == {"OK"}
