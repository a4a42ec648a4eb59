"""Families come into service and leave it while the system runs."""

import asyncio
from collections.abc import Iterator

import pytest
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from tests.support.system import RunningSystem, slices, until
from trefoil.cli.run.launcher import infer_zeros

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

FREED_WITHIN_S = 60.0


@pytest.fixture
def system() -> Iterator[RunningSystem]:
    one = RunningSystem({"policy": "base"})
    try:
        one.up()
        one.wait_for_rollout()
        yield one
    finally:
        one.close()


async def why_unanswered(target: str) -> str:
    async with triton.InferenceServerClient(target) as client:
        with pytest.raises(InferenceServerException) as error:
            await client.get_model_metadata("digits", client_timeout=5.0)
    return f"{error.value.status()}: {error.value.message()}"


async def test_a_stopped_family_frees_its_slices_and_stays_out_of_service_until_it_is_started(system: RunningSystem):
    async with system.client() as client:

        async def freed() -> bool:
            return not await slices(client)

        assert await slices(client)
        system.ask("family", "stop", "digits")
        await until(freed, FREED_WITHIN_S, "slices stood for")
    assert "NOT_FOUND: Request for unknown model: 'digits'" in await why_unanswered(system.inference)
    line = "digits: out of service by command; back by trefoil family start digits"
    assert line in system.run("status").stdout
    assert line.split("; ")[0].split(": ")[1] in system.refused(
        "objective", "set", "--family", "digits", "--slo-ms", "70"
    )
    await asyncio.to_thread(system.ask, "down")
    assert (await asyncio.to_thread(system.up))["first_answer_s"] is None
    assert system.ask("status")["overrides"] == [line]
    assert "NOT_FOUND" in await why_unanswered(system.inference)
    system.ask("family", "start", "digits")
    await asyncio.to_thread(system.wait_for_rollout)
    assert await infer_zeros(system.inference, "digits")
    assert system.ask("status")["overrides"] == []
