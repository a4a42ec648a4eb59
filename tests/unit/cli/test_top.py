"""`trefoil top` on a screen without a terminal: it shows what it is told, again and again, whatever fails."""

from typing import Any

from textual.widgets import Static

from trefoil.cli.operate.top import frame
from trefoil.cli.operate.top_screen import TopScreen
from trefoil.core.errors import StateUnavailable

FOUND: dict[str, Any] = {
    "cluster": "default", "at_s": 1_795_000_000.0, "inference": "127.0.0.1:8001", "failing": {}, "metrics": {},
    "services": {"controller": True, "dispatcher": False}, "mode": "act", "frozen": True, "pinned": False,
    "exploring": False, "revision": {"epoch": 1, "number": 3}, "policy": "exact", "why": "[carbon] fell",
    "rollout": "done", "nodes": [], "stale_nodes": [], "workers": [],
    "carbon": [], "carbon_ratio": [], "carbon_refused": "", "catalog_refused": "", "disk_trouble": "",
    "models_refused": [], "places_refused": [], "agents_unreached": [], "plans_refused": [],
    "set_aside": [], "files_set_aside": [], "set_aside_here": [],
    "loans": [], "objectives": [], "budgets": [], "decisions": [],
    "served": {"window_s": 60.0, "by_class": []},
    "saving": {
        "since_s": 1_794_999_600.0, "since_start": True, "requests": 0, "joules": None, "grams": None,
        "base_joules": None,
        "base_grams": None, "saving_pct": None, "unmeasured_s": 0.0, "basis": "", "unknown": "no profile of x",
        "withheld": "",
    },
}  # fmt: skip


class System:
    """A running system: what the next look finds, or raises."""

    def __init__(self) -> None:
        self.fails = False
        self.looks = 0

    async def gather(self) -> dict[str, Any]:
        self.looks += 1
        if self.fails:
            raise StateUnavailable("Redis is down")
        return FOUND | {"cluster": f"look {self.looks}"}


def shown(screen: TopScreen) -> str:
    return str(screen.export_screenshot()).replace("&#160;", " ")


async def test_the_frame_is_renewed_and_q_quits() -> None:
    system = System()
    screen = TopScreen(system.gather, frame, refresh_s=0.01)
    async with screen.run_test(size=(160, 40)) as pilot:
        while screen.is_running and system.looks < 3:
            await pilot.pause()
        found = shown(screen)
        for part in (
            "look ",
            "not healthy: dispatcher",
            "frozen",
            "[carbon] fell",
            "no profile of x",
        ):
            assert part in found
        await pilot.press("q")
    assert screen.return_code == 0


async def test_what_cannot_be_asked_is_said_over_the_last_frame() -> None:
    system = System()
    screen = TopScreen(system.gather, frame, refresh_s=0.01)
    async with screen.run_test(size=(160, 40)) as pilot:
        while screen.is_running and not system.looks:
            await pilot.pause()
        system.fails = True
        before = system.looks
        while screen.is_running and system.looks < before + 2:
            await pilot.pause()
        assert "Redis is down" in shown(screen)
        assert "frozen" in shown(screen)
        system.fails = False
        before = system.looks
        while screen.is_running and system.looks < before + 2:
            await pilot.pause()
        assert "Redis is down" not in shown(screen)
        assert screen.query_one("#frame", Static)
