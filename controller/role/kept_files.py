"""Copies in Redis of the files that a controller keeps on its disk, for a next one whose disk is older, or empty.

The leader writes changed files with each of its fenced writes, and all files first under a new epoch.
A starting controller takes over what another left under a later epoch than this disk's last: objectives,
mode, freeze, pin, the last plans, what was published and commanded, budgets, counts, what the planner remembers. Where
files are not signed, those of an epoch under which no controller has led yet are not a controller's.
"""

import re
from collections.abc import Sequence
from typing import Final

import structlog

from controller.role.disk_store import DiskStore
from trefoil.core import errors
from trefoil.core.common import KeptFile, Revision
from trefoil.runtime.fenced import Put
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.state import State

ROLE: Final = "controller"
LED: Final = "led"  # file of this disk: the last epoch that it was led under, and which copies it was taken over from
NAME: Final = re.compile("[a-z_]+")


class KeptFiles:
    """Copies of one disk's files in Redis, and what other controllers have left there."""

    def __init__(self, disk: DiskStore, state: State, keys: PlanKeys) -> None:
        self._disk, self._state, self._keys = disk, state, keys
        self._begun_with = self._taken_over()  # what this process has read from its disk is of these copies
        self._written = Revision()
        self._log = structlog.get_logger()

    async def take_over(self) -> None:
        """Take over on disk what another controller has left since this disk was led under.

        Raises:
            errors.StateUnavailable: Redis does not answer.
            errors.DiskUnavailable: the disk does not take it.
        """
        left, unfit = await self._left(await self._state.epoch_of(ROLE))
        newest = _newest(left)
        texts = {file.name: file.json for file in left}
        if newest.epoch == self._led() and (restored := self._disk.restore(texts)):
            self._log.warning("restored from the copies in Redis", files=restored, written=str(newest))
        if newest.epoch > self._led() and newest != self._taken_over():
            self._disk.replace_all(texts, keep=unfit)
            self._disk.restore(texts)
            self._disk.save(LED, {"epoch": self._led(), "taken_over": [newest.epoch, newest.number]})
            self._log.info("taken over from another controller", files=[f.name for f in left], written=str(newest))

    async def overtaken(self, epoch: int) -> bool:
        """Whether there is more in Redis than this process began with.

        It may be of another controller, or of this disk, which has lost it. The copies are read when the role is taken,
        under this epoch: after that no other controller writes.

        Raises:
            errors.StateUnavailable: Redis does not answer.
        """
        left, _ = await self._left(epoch - 1)
        newest = _newest(left)
        if newest.epoch == self._led():
            return any(file.name in self._disk.lost() for file in left)
        return newest.epoch > self._led() and newest != self._begun_with

    def lead(self, epoch: int) -> None:
        """Lead from here on: what is on this disk is what counts.

        Raises:
            errors.DiskUnavailable: that cannot be kept.
        """
        self._disk.save(LED, {**self._disk.load_plain(LED), "epoch": epoch})
        self._disk.forget_lost()
        self._disk.copy_all()
        self._written = Revision(epoch)

    def copies(self) -> list[Put]:
        """Copies of what has changed since it was copied."""
        if not self._disk.uncopied:
            return []
        written = self._written = Revision(self._written.epoch, self._written.number + 1)
        files = (KeptFile(name, written, text) for name, text in dict(self._disk.uncopied).items())
        return [Put(self._state.keys.kept(file.name), self._keys.sign_file(file)) for file in files]

    def copied(self, copies: Sequence[Put]) -> None:
        """Note that these are in Redis."""
        for copy in copies:
            self._disk.copied(copy.obj.name, copy.obj.json)

    def _led(self) -> int:
        return int(self._disk.load_plain(LED).get("epoch", 0))

    def _taken_over(self) -> Revision:
        return Revision(*self._disk.load_plain(LED).get("taken_over", ()))

    async def _left(self, epoch: int) -> tuple[list[KeptFile], set[str]]:
        """Files of the last leader, and names of invalid ones. Valid: signed, where signatures are required; else of an
        epoch up to the last one of a leader.
        """
        known = max(epoch, self._led())
        found, unfit = [], set[str]()
        for key, file in (await self._state.scan(self._state.keys.kept_prefix(), KeptFile)).items():
            if key != self._state.keys.kept(file.name) or not NAME.fullmatch(file.name):
                continue  # a name that is not a file's must not become a path
            try:
                found.append(self._verified(file, known))
            except errors.PlanError as error:
                self._log.warning("a file of another controller is not taken over", error=str(error))
                continue
            if not self._disk.fits(file.name, file.json):
                self._log.warning("a file of another controller is not taken over: not its shape", key=key)
                unfit.add(found.pop().name)
        last = _newest(found).epoch
        return [file for file in found if file.written.epoch == last], unfit

    def _verified(self, file: KeptFile, known: int) -> KeptFile:
        if not self._keys and file.written.epoch > known:
            raise errors.PlanError(
                "no controller has led under its epoch yet", field=f"kept:{file.name} in Redis",
                value=str(file.written), remedy="none: this controller continues from its own disk",
            )  # fmt: skip
        return self._keys.verify_file(file)


def _newest(files: Sequence[KeptFile]) -> Revision:
    return max((file.written for file in files), default=Revision())
