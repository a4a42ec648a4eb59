"""Settings files that win: with `declared`, objectives, budgets, mode and watt cap are what the files say, also later.

The leading controller reads them every PERIOD_S. It adopts values that two readings in a row agree on, so that a
half-written file stops no family. A wrong file changes nothing, and `status` says why. The controller refuses commands
that would change what the files say, and names the file.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from controller.accounting.core.budgets import accept_budget
from controller.loop.control_loop import ControlLoop
from controller.loop.core.control import Change, ControlCore
from controller.loop.core.objectives import accept_objective
from controller.loop.core.saved_state import budget_differences, differences, setting_text, settled_budgets
from controller.role.by_command import NO_RESET, ByCommand, KeptBudgets
from controller.role.leadership import Leadership
from controller.settings import ControllerSettings
from trefoil.core.catalog import Catalog
from trefoil.core.errors import Fenced, InvalidInput, SettingError, StateUnavailable, TrefoilError
from trefoil.core.objective import ActMode, Budget, BudgetKey, Objective
from trefoil.core.parts import PartSettings
from trefoil.runtime.given.catalog_files import CatalogFiles

PERIOD_S: Final = 5.0
SERVICE: Final = {True: "in service", False: "out of service"}
ADOPTED: Final = ("objectives", "budgets", "mode", "max_watts")
"""What a changed file changes while the controller runs."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a file declares: accepted objectives by family, the watt cap, the mode and all budgets (None: unchanged).
    Families that it leaves out are stopped with `prune`."""

    objectives: Mapping[str, Objective]
    max_watts: float | None
    mode: ActMode | None
    prune: bool
    budgets: KeptBudgets | None = None

    def changes(self, core: ControlCore) -> list[tuple[str, str, str]]:
        """Fields that differ from what is in force, each with both values in words."""
        known, out = {**core.objectives, **core.stopped}, self._stopped(core)
        pairs: list[tuple[str, Any, Any]] = [
            (name, SERVICE[name in core.objectives], SERVICE[name not in out])
            for name in sorted({**known, **self.objectives})
        ]
        pairs += differences(known, self.objectives)
        pairs += [("max_watts", core.max_watts or None, self.max_watts or None)] if self.max_watts is not None else []
        pairs += [("mode", core.control.mode, self.mode)] if self.mode is not None else []
        pairs += [] if self.budgets is None else budget_differences(core.budgets, self.budgets)
        return [(name, setting_text(now), setting_text(wanted)) for name, now, wanted in pairs if now != wanted]

    def change(self, core: ControlCore, *, by_command: bool) -> Change:
        """Change that puts it in force."""
        known = {**core.objectives, **core.stopped}
        changed = [one for name, one in self.objectives.items() if not _same(one, known.get(name))]
        families = tuple(one.family for one in changed)
        reset = NO_RESET if by_command else ByCommand(families, mode=True, max_watts=True)
        return Change(changed, self.max_watts, reset, self._stopped(core), self.mode, self.budgets)

    def _stopped(self, core: ControlCore) -> set[str]:
        out = {*core.stopped, *core.objectives} if self.prune else {*core.stopped}
        return out - self.objectives.keys()


class DeclaredSettings:
    """Objectives, budgets, mode and watt cap of settings files. `source` names the files; `read` reads them again, and
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
        await self._files.refresh_for([*said, *(one.family for one in wanted.budgets if one.family)])

        def make() -> Change | None:
            known, catalog = {**core.objectives, **core.stopped}, self._files.catalog
            accepted = {name: accept_objective(one, known, catalog, None, pue=wanted.pue) for name, one in said.items()}
            settled = settled_budgets(wanted, core.budgets, catalog)
            # Nothing is refused from here on but for want of Redis or of the disk: then the next look continues.
            loop.settings = loop.settings.model_copy(update={name: getattr(wanted, name) for name in ADOPTED})
            declaration = Declaration(accepted, wanted.max_watts, wanted.act_mode, prune=True, budgets=settled)
            return declaration.change(core, by_command=False) if declaration.changes(core) else None

        await loop.set_objectives(make)

    def _waits(self, wanted: ControllerSettings) -> str:
        """What else the files change, which only a start takes; "" for nothing."""
        now, then = (_others(each) for each in (self._started, wanted))
        names = sorted(name for name in now if now[name] != then[name])
        return f"{', '.join(names)} (in {self._source}): changed. Remedy: restart the controller" if names else ""


def accept_all(
    core: ControlCore, wanted: Sequence[Objective], catalog: Catalog, planner: PartSettings | None, pue: float
) -> dict[str, Objective]:
    """Objectives of a file as they would be in force, by family; each keeps its pue and its devices.

    Raises:
        InvalidInput: naming position, family, field, value and remedy.
    """
    known, accepted = {**core.objectives, **core.stopped}, dict[str, Objective]()
    for position, one in enumerate(wanted):
        before = known.get(one.family, Objective())
        try:
            if one.family in accepted:
                raise InvalidInput("given twice", field="family", value=one.family, remedy="give each once")
            kept = replace(one, pue=before.pue, devices=before.devices)
            accepted[one.family] = accept_objective(kept, known, catalog, planner, pue=pue)
        except TrefoilError as error:
            raise type(error)(f"objectives[{position}] ({one.family}): {error}") from error
    return accepted


def accept_budgets(
    kept: KeptBudgets, wanted: Sequence[Budget], stated: Collection[BudgetKey], catalog: Catalog, *, prune: bool
) -> KeptBudgets:
    """Budgets as they would be in force by command; with `prune` those alone. `stated`: those of the settings.

    Raises:
        InvalidInput: naming position, field, value and remedy.
    """
    found, keys = kept, set[BudgetKey]()
    for position, one in enumerate(wanted):
        try:
            if one.key in keys:
                raise InvalidInput("given twice", field="tenant", value=one.tenant, remedy="give each once")
            accepted = accept_budget(one, found.by_key, catalog)
        except InvalidInput as error:
            raise InvalidInput(f"budgets[{position}]: {error}") from error
        keys.add(one.key)
        before = found.by_key.get(one.key)
        if before is None or replace(accepted, number=before.number) != before:
            found = found.after(one.key, accepted, by_command=True)
    for key in found.by_key.keys() - keys if prune else ():
        found = found.after(key, None, by_command=key in stated)
    return found


def _same(one: Objective, other: Objective | None) -> bool:
    return other is not None and replace(one, number=other.number) == other


def _others(settings: ControllerSettings) -> dict[str, Any]:
    return settings.model_dump(exclude=set(ADOPTED))
