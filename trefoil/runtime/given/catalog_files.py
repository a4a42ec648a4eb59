"""The catalogue of a model repository in force, read again while a service runs when its family files have changed.

A new catalogue is judged before it is in force. One that cannot be read, or that lacks a variant of a family in use,
leaves the old one in force. `why` says so until the files or the families in use change. Reading is done in a thread.
"""

import asyncio
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

import structlog

from trefoil.core.catalog import Catalog, check_in_use
from trefoil.core.errors import CatalogError
from trefoil.runtime.clock import Clock
from trefoil.runtime.repository import CONTRACT_FILE, PROFILE_FILE, family_files, load_catalog, stated_digests

PERIOD_S: Final = 2.0
Stamp = tuple[str, int, int, int]


class CatalogFiles:
    """Family files of a repository, and the catalogue in force. Belongs to one event loop.

    `in_use`: families of which no variant may go; `adopt` is called when another catalogue is in force.
    """

    def __init__(
        self,
        root: Path,
        profile_overrides: Mapping[str, Path] | None = None,
        load: Callable[[Path, Mapping[str, Path]], Catalog] = load_catalog,
    ) -> None:
        """Read the catalogue for the first time.

        Raises:
            CatalogError: as `load_catalog`.
        """
        self._root, self._overrides, self._load = root, dict(profile_overrides or {}), load
        self._stamps, self._judged_for = self._stamped(), frozenset[str]()
        self.catalog, self.stated = load(root, self._overrides), stated_digests(root)
        self.why = ""
        self.in_use: Callable[[], Collection[str]] = tuple
        self.adopt: Callable[[], None] = lambda: None
        self._lock = asyncio.Lock()

    async def run(self, clock: Clock) -> None:
        """Look every period until cancelled."""
        while True:
            await clock.sleep(PERIOD_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Look once."""
        async with self._lock:
            in_use, why = frozenset(self.in_use()), self.why
            if not await asyncio.to_thread(self._renew, in_use):
                if self.why and self.why != why:
                    structlog.get_logger().warning("the model repository as it was read before stays", why=self.why)
                return
            structlog.get_logger().info("model repository", families=[one.name for one in self.catalog.families])
            self.adopt()

    async def refresh_for(self, wanted: Iterable[str | tuple[str, str]]) -> None:
        """Look now, not at the next period, if one of these families, or (family, variant), is not known."""
        families = self.catalog.families
        known = {one.name for one in families} | {(one.name, v.name) for one in families for v in one.variants}
        if not known.issuperset(wanted):
            await self.refresh()

    def _renew(self, in_use: frozenset[str]) -> bool:
        """Whether another catalogue is in force from now on."""
        stamps = self._stamped()
        if stamps == self._stamps and (not self.why or in_use == self._judged_for):
            return False
        self._stamps, self._judged_for = stamps, in_use
        try:
            catalog, stated = self._load(self._root, self._overrides), stated_digests(self._root)
            check_in_use(self.catalog, catalog, in_use)
        except (CatalogError, OSError) as error:
            self.why = str(error)
            return False
        self.why = ""
        if (catalog, stated) == (self.catalog, self.stated):
            return False
        self.catalog, self.stated = catalog, stated
        return True

    def _stamped(self) -> tuple[Stamp, ...]:
        """Stamps of all family files: another change time, size or place is another file."""
        try:
            paths = family_files(self._root)
        except OSError:
            paths = []
        beside = [path.with_name(name) for path in paths for name in (PROFILE_FILE, CONTRACT_FILE)]
        found = []
        for path in sorted({*paths, *beside, *self._overrides.values()}):
            try:
                stat = os.stat(path)
            except OSError:
                continue
            found.append((str(path), stat.st_ctime_ns, stat.st_size, stat.st_ino))
        return tuple(found)
