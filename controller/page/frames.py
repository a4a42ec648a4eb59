"""Frames of the live page: pictures of the system, drawn while at least one viewer is there."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Final

import structlog

from controller.page.picture import picture
from trefoil import page
from trefoil.core.errors import TrefoilError, Unavailable
from trefoil.overview.known import ControllerAnswers, overview_of, read_answers
from trefoil.overview.reads import ControllerReads
from trefoil.runtime.clock import Clock

VIEWERS_MAX: Final = 32
PERIOD_S: Final = 1.0
REST_RATIO: Final = 9.0
"""Pause after a frame, in multiples of the time that it took: drawing takes a tenth of the time at most."""
DECISIONS_SHOWN: Final = 6
BUG: Final = "the page cannot be drawn. Remedy: read the log of the controller"


class OwnReads(ControllerReads):
    """Questions to the controller of this process."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    async def call(self, method: str, request: Any) -> Any:
        """Call a method of the servicer; none of those that only ask looks at its context."""
        return await getattr(self._servicer, method)(request, None)


class Frames:
    """Newest frame of the page, for all viewers. Drawn in a thread; a viewer that is slow skips frames."""

    def __init__(self, controller: ControllerReads, clock: Clock) -> None:
        self._controller, self._clock = controller, clock
        self._viewers, self._number, self._frame, self._body = 0, 0, "", ""
        self._watched, self._drawn = asyncio.Event(), asyncio.Condition()

    @contextmanager
    def viewer(self) -> Iterator[None]:
        """Count one viewer.

        Raises:
            Unavailable: as many watch as may.
        """
        if self._viewers >= VIEWERS_MAX:
            raise Unavailable(
                f"{VIEWERS_MAX} viewers watch this page already", remedy="close one, or use `trefoil top`"
            )
        if not self._viewers:
            self._frame = ""  # drawn for earlier viewers
        self._viewers += 1
        self._watched.set()
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._watched.clear()

    async def run(self) -> None:
        """Draw frames while there are viewers."""
        while True:
            await self._watched.wait()
            began_s = self._clock.monotonic_s()
            frame = await self._draw()
            async with self._drawn:
                self._frame, self._number = frame, self._number + 1
                self._drawn.notify_all()
            await self._clock.sleep(max(PERIOD_S, REST_RATIO * (self._clock.monotonic_s() - began_s)))

    async def watch(self) -> AsyncIterator[str]:
        """Frames for one viewer, each the newest that there is: the first at once, if others watch already."""
        seen = 0
        while True:
            async with self._drawn:
                while self._number == seen or not self._frame:
                    await self._drawn.wait()
                seen, frame = self._number, self._frame
            yield frame

    async def _draw(self) -> str:
        """The next frame; while nothing can be known, the reason above the last picture. A bug of the page is logged,
        and does not end the controller."""
        (drawn,) = await asyncio.gather(self._picture(), return_exceptions=True)
        notice = ""
        if isinstance(drawn, str):
            self._body = drawn
        elif isinstance(drawn, TrefoilError):
            notice = str(drawn)
        else:
            structlog.get_logger().error("bug in the live page", exc_info=drawn)
            notice = BUG
        return page.render("live_frame.html.j2", notice=notice, body=self._body)

    async def _picture(self) -> str:
        answers = await read_answers(self._controller, self._clock.now_s(), decisions=DECISIONS_SHOWN)
        return await asyncio.to_thread(_body, answers)


def _body(answers: ControllerAnswers) -> str:
    return page.render("live_body.html.j2", **picture(overview_of(answers), answers.now_s))
