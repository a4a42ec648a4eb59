"""Settings files that win: with `declared`, objectives, mode and watt cap are what the files say, also after a change.

The leading controller reads them every PERIOD_S and adopts values that two readings in a row agree on, so that a
half-written file stops no family. A wrong file changes nothing, and `status` says why. Commands that would change what
the files say are refused with the file's name.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import structlog

from controller.loop.control_loop import ControlLoop
from controller.loop.core.objectives import accept_objective
from controller.role.by_command import ByCommand
from controller.role.leadership import Leadership
from controller.settings import ControllerSettings
from trefoil.core.errors import Fenced, InvalidInput, SettingError, StateUnavailable, TrefoilError
from trefoil.core.objective import Objective
from trefoil.runtime.given.catalog_files import CatalogFiles

PERIOD_S: Final = 5.0
ADOPTED: Final = ("objectives", "mode", "max_watts")
"""What a changed file changes while the controller runs."""


class DeclaredSettings:
    """Objectives, mode and watt cap of settings files. `source` names the files; `read` reads them again, and
    raises SettingError. Belongs to one event loop."""

    def __init__(
        self,
        source: str,
        read: Callable[[], ControllerSettings],
        loop: ControlLoop,
        files: CatalogFiles,
        leadership: Leadership,
    ) -> None:
        self._source, self._read, self._loop, self._files = source, read, loop, files
        self._leadership = leadership
        self._started = self._seen = loop.settings
        self.why = ""
        """Why the files, as they are now, are not in force."""

    def refuse(self, what: str) -> None:
        """Refuse a command that would change what the files say; raises InvalidInput."""
        if self._started.declared:
            remedy = f"change {self._source}: it is taken within {2 * PERIOD_S:g} s"
            raise InvalidInput("the settings declare it", field="declared", value=what, remedy=remedy)

    async def run(self) -> None:
        """Look every period until cancelled; return at once where nothing is declared."""
        while self._started.declared:
            await self.look()
            await self._loop.clock.sleep(PERIOD_S)

    async def look(self) -> None:
        """Read the files, and put in force what differs from them."""
        try:
            wanted = await asyncio.to_thread(self._read)
            if not wanted.declared:
                raise SettingError(
                    "only a start changes that", field="declared", value=False, remedy="restart the controller"
                )
            seen, self._seen = self._seen, wanted
            if self._leadership.epoch and wanted == seen:
                await self._adopt(wanted)
            why = self._waits(wanted)
        except (Fenced, StateUnavailable):
            return  # another controller leads, or Redis does not say who
        except TrefoilError as error:
            why = str(error)
        if why != self.why:
            log = structlog.get_logger()
            log.warning("declared settings are not in force", why=why) if why else log.info("declared settings")
            self.why = why

    async def _adopt(self, wanted: ControllerSettings) -> None:
        loop, core = self._loop, self._loop.core
        said = {one.family: one.stated() for one in wanted.objectives}
        await self._files.refresh_for(said)
        known = {**core.objectives, **core.stopped}
        accepted = {
            name: accept_objective(one, known, self._files.catalog, None, pue=wanted.pue) for name, one in said.items()
        }
        changed = [one for name, one in accepted.items() if not _same(one, known.get(name))]
        # Nothing is refused from here on but for want of Redis or of the disk: then the next look goes on.
        loop.settings = loop.settings.model_copy(update={name: getattr(wanted, name) for name in ADOPTED})
        if changed or core.max_watts != wanted.max_watts:
            reset = ByCommand(tuple(one.family for one in changed), max_watts=True)
            await loop.set_objectives(changed, wanted.max_watts, reset)
        for name in sorted(core.objectives.keys() - said.keys()):
            await loop.set_service(name, serves=False)
        for name in sorted(core.stopped.keys() & said.keys()):
            await loop.set_service(name, serves=True)
        if core.control.mode != wanted.act_mode:
            await loop.operate(replace(core.control, mode=wanted.act_mode), mode_by_command=False)

    def _waits(self, wanted: ControllerSettings) -> str:
        """What else the files change, which only a start takes; "" for nothing."""
        now, then = (_others(each) for each in (self._started, wanted))
        names = sorted(name for name in now if now[name] != then[name])
        return f"{', '.join(names)} (in {self._source}): changed. Remedy: restart the controller" if names else ""


def _same(one: Objective, other: Objective | None) -> bool:
    return other is not None and replace(one, number=other.number) == other


def _others(settings: ControllerSettings) -> dict[str, Any]:
    return settings.model_dump(exclude=set(ADOPTED))
