"""The REST front reads a stream of bytes as h11 does, or refuses it: never as other requests."""

from random import Random

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dispatcher.fronts.rest.http1 import Http1Connection
from tests.support.http_streams import cut, draw_stream, front_reads, h11_reads

GATE, ALL = 1_000, 20_000


async def readings(seeds: range, protocol: type[HttpToolsProtocol] = Http1Connection) -> tuple[list[str], int, int]:
    """What was read as h11 does not read it; how many requests both read; how many streams were refused."""
    wrong, served, refused = [], 0, 0
    for seed in seeds:
        random = Random(seed)
        stream = draw_stream(random)
        ours, other = await front_reads(cut(random, stream), protocol), h11_reads(stream)
        if problem := ours.problem(other):
            wrong.append(f"seed {seed}: {problem}: {stream!r}")
        served += len(ours.requests)
        refused += ours.closed
    return wrong, served, refused


@pytest.mark.parametrize(
    "seeds", [range(GATE), pytest.param(range(GATE, ALL), marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
async def test_the_front_reads_what_h11_reads_or_refuses(seeds):
    wrong, served, refused = await readings(seeds)
    assert not wrong, "\n".join(wrong[:5])
    assert served > len(seeds) / 2
    assert len(seeds) / 4 < refused < len(seeds)


async def test_a_parser_that_takes_a_body_for_a_request_is_found():
    wrong, _, _ = await readings(range(200), HttpToolsProtocol)
    assert any("/smuggled" in problem for problem in wrong)
    assert len(wrong) > 10
