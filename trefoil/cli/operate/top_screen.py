"""Screen of `trefoil top`, apart from the command: what draws it takes half a second to import."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Final

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from trefoil.core.errors import TrefoilError

REFRESH_S: Final = 1.0

Gather = Callable[[], Awaitable[dict[str, Any]]]
Show = Callable[[dict[str, Any]], RenderableType]


class TopScreen(App[None]):
    """Screen of `trefoil top`. `gather` makes a frame's document, `show` the frame of it; while `gather` fails the last
    frame stays, with why."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "quit")]
    CSS = "#frame { height: auto; padding: 0 1; }"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, gather: Gather, show: Show, refresh_s: float = REFRESH_S) -> None:
        super().__init__()
        self._gather, self._show, self._refresh_s = gather, show, refresh_s
        self._last: dict[str, Any] | None = None

    def compose(self) -> ComposeResult:
        """Compose the screen: one frame that scrolls."""
        yield VerticalScroll(Static("asking the system ...", id="frame"))
        yield Footer()

    def on_mount(self) -> None:
        """Begin to renew the frame."""
        self.run_worker(self._renew(), name="renew")

    async def _renew(self) -> None:
        shown = self.query_one("#frame", Static)
        while True:
            try:
                self._last = await self._gather()
                shown.update(self._show(self._last))
            except TrefoilError as error:
                old = [self._show(self._last)] if self._last is not None else []
                shown.update(Group(Text(f"no answer: {error}", style="bold red"), *old))
            await asyncio.sleep(self._refresh_s)
