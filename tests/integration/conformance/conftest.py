"""Two Tritons for all files of this folder, whose tests leave them as they were."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.special_models import CONFIGS, SpecialTriton
from tests.support.special_world import World, serving


@pytest.fixture(scope="package")
def tritons(tmp_path_factory) -> Iterator[list[SpecialTriton]]:
    folder = tmp_path_factory.mktemp("special")
    with contextlib.ExitStack() as stack:
        started = [SpecialTriton(folder, number, version, tuple(CONFIGS)) for number, version in ((0, 3), (1, 5))]
        for one in started:
            stack.callback(one.close)

        async def ready():
            await asyncio.gather(*(one.ready() for one in started))

        asyncio.run(ready())
        yield started


@pytest.fixture
async def world(state, tmp_path, tritons) -> AsyncIterator[World]:
    async with serving(state, tmp_path, tritons) as made:
        yield made
