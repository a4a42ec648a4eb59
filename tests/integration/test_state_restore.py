"""`trefoil state dump --output` and `restore`: a controller on an empty disk and Redis continues as the one before."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner

from protos.controller.v1 import controller_pb2 as pb
from tests.support.control_plane import ControlPlane
from trefoil.cli.main import app
from trefoil.core.objective import ActMode, Budget
from trefoil.runtime import codec

pytestmark = [pytest.mark.integration, pytest.mark.gate]
KEPT = ("objectives.json", "control.json", "by_command.json", "fleet_objective.json", "tenant_budgets.json")


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    plane = ControlPlane(policy="base")
    await plane.start()
    await plane.until(plane.settled)
    yield plane
    await plane.close()
    assert plane.agent.violations == []


async def runs(*argv: str) -> tuple[int, str]:
    done = await asyncio.to_thread(CliRunner().invoke, app, ["state", *argv])
    return done.exit_code, done.output.replace("\n", " ")


async def test_a_restored_system_goes_on_with_plan_objectives_budgets_and_history(plane: ControlPlane, tmp_path: Path):
    config, dump, disk = plane.folder / "controller.toml", tmp_path / "trefoil.dump", plane.folder / "controller"
    await plane.stub.SetObjectives(pb.SetObjectivesRequest(max_watts=9000.0))
    await plane.stub.SetBudget(pb.SetBudgetRequest(budget=codec.to_proto(Budget("acme", grams_per_day=5.0))))
    await plane.stub.SetMode(pb.SetModeRequest(mode=int(ActMode.ACT)))
    await plane.until(lambda: served(plane))
    await plane.until(lambda: counted(disk))
    before = (await plane.stub.GetPlan(pb.GetPlanRequest())).plan
    assert plane.stop_controller() == 0
    kept, history, budget = {name: (disk / name).read_text() for name in KEPT}, await record(plane), counted(disk)
    asked = ("--config", str(config))
    assert (await runs("dump", "--output", str(dump), *asked))[0] == 0
    assert dump.stat().st_mode & 0o777 == 0o600
    code, why = await runs("restore", str(dump), *asked)
    assert (code, "stands there already; nothing is restored" in why) == (2, True), why

    raw = redis.Redis(unix_socket_path=str(plane.redis.socket))
    raw.flushall()
    shutil.rmtree(disk)
    for wrong, words in wrong_dumps(dump, config, tmp_path):
        code, why = await runs("restore", *wrong)
        assert (code, words in why) == (2, True), why
        assert not raw.keys("trefoil:*:kept:*"), words
    assert (await runs("restore", str(dump), *asked))[0] == 0
    assert await record(plane) == history

    plane.start_controller()
    await plane.until(lambda: plane._answers(), 60)
    await plane.until(plane.settled)
    assert {name: (disk / name).read_text() for name in KEPT} == kept
    after = (await plane.stub.GetPlan(pb.GetPlanRequest())).plan
    assert (after.why, after.nodes, after.routes) == (before.why, before.nodes, before.routes)
    assert [bucket for bucket in budget[:1] if bucket not in counted(disk)] == []


def counted(disk: Path) -> list[Any]:
    """Whole buckets of the family's budget."""
    budgets = json.loads((disk / "budgets.json").read_text()) if (disk / "budgets.json").exists() else {}
    buckets: list[Any] = budgets.get("digits", {}).get("buckets", [])
    return buckets[:-1]


def wrong_dumps(dump: Path, config: Path, folder: Path) -> Iterator[tuple[tuple[str, ...], str]]:
    """Arguments of a restore, and words of why it is refused."""
    whole = dump.read_bytes()
    lines = whole.splitlines(keepends=True)
    head = json.loads(lines[0])

    def other(name: str, data: bytes) -> str:
        (folder / name).write_bytes(data)
        return str(folder / name)

    def settings(name: str, old: str, new: str) -> str:
        return other(name, config.read_bytes().replace(old.encode(), new.encode()))

    own = ("--config", str(config))
    yield (other("cut", whole[: len(whole) // 2]), *own), "is cut or damaged"
    yield (other("line", b"".join([*lines[:3], *lines[4:]])), *own), "is cut or damaged"
    yield (other("byte", whole.replace(b"kept:plans", b"kept:plane")), *own), "is cut or damaged"
    newer = json.dumps(head | {"trefoil_state": 2, "version": "9.0"}).encode() + b"\n"
    yield (other("newer", b"".join([newer, *lines[1:]])), *own), "is of a newer Trefoil, 9.0 (format 2"
    yield (other("foreign", b'{"plan": {}}\n'), *own), "is not a dump of Trefoil's state"
    yield (other("empty", b""), *own), "is not a dump of Trefoil's state"
    elsewhere = settings("elsewhere.toml", "mode = ", 'cluster = "other"\nmode = ')
    yield (str(dump), "--config", elsewhere), "is of cluster 'default', not of 'other'"
    key = folder / "other.key"
    key.touch(0o600)
    key.write_text("x" * 32)
    unsigned = settings("unsigned.toml", str(config.parent / "plan.key"), str(key))
    yield (str(dump), "--config", unsigned), "is none of a dump: kept:"


async def served(plane: ControlPlane) -> bool:
    """Whether books hold answers."""
    names = await plane.state.names(plane.state.keys.totals_prefix())
    return bool(names) and (await plane.state.totals(names[0])).get("requests", 0.0) > 0


async def record(plane: ControlPlane) -> dict[str, Any]:
    """Decisions and books."""
    names = await plane.state.names(plane.state.keys.totals_prefix())
    return {
        "decisions": [one.id for one in await plane.decisions()],
        "totals": {name: await plane.state.totals(name) for name in names},
    }
