"""What commands about a running system share: how they attach to it, and how they put devices and plans into words."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from trefoil.cli.attached import Attached, attach
from trefoil.core.fleet import DeviceStatus, SliceState
from trefoil.core.plan import Plan

DEFAULT_STATE_DIR = ".trefoil/default"
T = TypeVar("T")


def ask(state_dir: str, work: Callable[[Attached], Awaitable[T]]) -> T:
    """Attach, do one thing, let go."""

    async def attached() -> T:
        async with attach(Path(state_dir)) as system:
            return await work(system)

    return asyncio.run(attached())


def describe_slices(device: DeviceStatus) -> str:
    """What a device serves, in words: `2x 1g.5gb digits-m, 3g.20gb digits-l`."""
    ready = (SliceState.READY, SliceState.SWAPPING)
    parts = [
        f"{slice_.key.slice_type} {'+'.join(h.variant for h in slice_.hosted)}"
        + ("" if slice_.state in ready else f" ({slice_.state.name.lower()})")
        for slice_ in device.slices
        if slice_.key is not None and slice_.state is not SliceState.GONE
    ]
    return counted(parts)


def counted(parts: Sequence[str]) -> str:
    """Equal parts once, with their number; `-` for none."""
    return ", ".join(f"{n}x {part}" if n > 1 else part for part, n in Counter(parts).items()) or "-"


def planned(plan_: Plan) -> list[tuple[str, str, str]]:
    """Device, target state and slices of a plan, as rows of a table."""
    return [
        (
            device.device,
            device.target.name.lower(),
            counted([f"{s.key.slice_type} {'+'.join(h.variant for h in s.hosted)}" for s in device.slices]),
        )
        for node in plan_.nodes
        for device in node.devices
    ]
