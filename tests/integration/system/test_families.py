"""Families come into service and leave it while the system runs."""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from tests.support.system import TREFOIL, RunningSystem, running_system, slices, until
from tests.support.triton_process import MODELS
from trefoil.cli.run.launcher import infer_zeros
from trefoil.core.errors import Unavailable

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

FREED_WITHIN_S = SEEN_WITHIN_S = 60.0


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    found = tmp_path / "models"
    for name in ("digits", "_shared"):
        shutil.copytree(MODELS / name, found / name)
    return found


@pytest.fixture
def system(repository: Path) -> Iterator[RunningSystem]:
    with running_system({"policy": "exact", "family.repository": str(repository)}) as one:
        yield one


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
        "objective", "set", "--family", "digits", "--slo-latency-ms", "70"
    )
    await asyncio.to_thread(system.ask, "down")
    assert (await asyncio.to_thread(system.up))["first_answer_s"] is None
    assert system.ask("status")["overrides"] == [line]
    assert "NOT_FOUND" in await why_unanswered(system.inference)
    system.ask("family", "start", "digits")
    await asyncio.to_thread(system.wait_for_rollout)
    assert await infer_zeros(system.inference, "digits")
    assert system.ask("status")["overrides"] == []


def imports(repository: Path, source: Path) -> None:
    """Two variants of digits, as the ONNX models of somebody's Triton repository."""
    for name, version in (("small", "2"), ("large", "4")):
        shutil.copytree(MODELS / "digits" / version, source / name / "1")
    argv = [
        str(TREFOIL),
        "family",
        "import",
        str(source),
        "--as",
        "later=small,large",
        "--slo-latency-ms",
        "75",
        "--assume",
    ]
    argv += ["--accuracy", "small=0.9", "--accuracy", "large=0.95", "--repository", str(repository)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


async def test_a_family_that_is_imported_while_the_system_runs_is_served(
    system: RunningSystem, repository: Path, tmp_path: Path
):
    processes = {path.name: path.read_text() for path in (system.state_dir / "run").glob("*.json")}
    await asyncio.to_thread(imports, repository, tmp_path / "triton")
    assert "later" in system.refused("objective", "set", "--family", "later", "--slo-latency-ms", "70"), (
        "no floor was given"
    )
    answer = system.ask("objective", "set", "--family", "later", "--accuracy-floor", "0.92")
    assert (answer["objective"]["slo_ms"], answer["degraded"]) == (75.0, "")

    async def answered() -> Any:
        try:
            return await infer_zeros(system.inference, "later")
        except Unavailable:
            return None

    assert await until(answered, SEEN_WITHIN_S, "no answer within")
    assert await infer_zeros(system.inference, "digits")
    await asyncio.to_thread(system.wait_for_rollout)
    assert {path.name: path.read_text() for path in (system.state_dir / "run").glob("*.json")} == processes

    bad = repository / "bad" / "family.toml"
    bad.parent.mkdir()
    bad.write_text("name = 'bad'\n")

    async def named() -> bool:
        status = system.ask("status")
        return "bad" in status["catalog_refused"] and any("bad" in why for why in status["nodes"][0]["missing"])

    await until(named, SEEN_WITHIN_S, "the bad family.toml is not named within")
    assert "the model repository as it was read before stays" in system.run("status").stdout
    assert await infer_zeros(system.inference, "later")
    for name in ("controller", "power_agent"):
        log = (system.state_dir / "logs" / f"{name}.log").read_text()
        assert log.count("the model repository as it was read before stays") == 1, name
