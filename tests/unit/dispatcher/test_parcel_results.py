"""Results of a parcel: a peer that drips or repeats them is not waited for."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest

from dispatcher.jobs import zones
from dispatcher.jobs.core.parcels import Parcel
from protos.dispatcher.v1 import jobs_pb2
from tests.support.virtual.loop import virtual_loop
from trefoil.core.errors import InvalidInput, Unavailable


class Stream:
    """Messages with these items' results, one after each pause."""

    def __init__(self, pause_s: float, *messages: tuple[int, ...]) -> None:
        self.left, self._pause_s, self.cancelled = list(messages), pause_s, False

    async def read(self):
        await asyncio.sleep(self._pause_s)
        if not self.left:
            return grpc.aio.EOF
        results = [jobs_pb2.ItemResult(item=item, code="INVALID_ARGUMENT", error="no") for item in self.left.pop(0)]
        return jobs_pb2.GetResultsResponse(results=results)

    def cancel(self):
        self.cancelled = True


def fetch(monkeypatch, stream, after=0):
    """Whether all has come, results that were delivered, seconds, the parcel."""
    parcel, delivered = Parcel("p", "b", 100, 4000, 1e9, after=after), []
    run = SimpleNamespace(full=False, closing=False, deliver=lambda _, result: delivered.append(result.item))
    monkeypatch.setattr(zones.jobs_pb2_grpc, "JobsStub", lambda _: SimpleNamespace(GetResults=lambda _: stream))
    peer = zones.ZoneParcels.__new__(zones.ZoneParcels)
    peer.zone, peer._channel = "b", SimpleNamespace(get=lambda: asyncio.sleep(0))
    with virtual_loop() as loop:
        since_s = loop.time()
        try:
            return loop.run_until_complete(asyncio.wait_for(peer._fetch(run, parcel), 86_400)), delivered, parcel
        except (InvalidInput, Unavailable) as error:
            return error, delivered, parcel
        finally:
            assert stream.cancelled
            assert loop.time() - since_s <= zones.FETCH_S + 1.0


def test_results_in_order_with_gaps_are_taken(monkeypatch):
    assert fetch(monkeypatch, Stream(1.0, (3, 4), (6,), (9, 20)), after=3)[:2] == (True, [103, 104, 106, 109, 120])


def test_a_peer_that_drips_results_counts_as_silent_and_what_came_is_kept(monkeypatch):
    error, delivered, parcel = fetch(monkeypatch, Stream(9.0, *[(item,) for item in range(4000)]))
    assert isinstance(error, Unavailable)
    assert "not all within 60 s" in str(error)
    assert (len(delivered), parcel.after) == (6, 6)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([(0,), (0,)], "results.item = 0: is not after item 0"),
        ([(0, 5, 4)], "results.item = 4: is not after item 5"),
        ([()], "results: a message has none"),
    ],
)
def test_a_peer_whose_results_do_not_advance_is_refused(monkeypatch, messages, says):
    error, _, _ = fetch(monkeypatch, Stream(0.0, *messages))
    assert isinstance(error, InvalidInput)
    assert says in str(error)
