"""Live view of the demo: one screen that refreshes on a terminal, plain lines elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

LINES_KEPT: Final = 6
PLAIN_EVERY_S: Final = 7.0


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """State of one GPU, as the view shows it."""

    name: str
    state: str
    slices: str
    clock_mhz: int
    power_w: float | None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Status of one run, as the view shows it."""

    run: str
    number: int  # of runs
    count: int
    at_s: float  # below 0: warming up
    duration_s: float
    intensity_g_per_kwh: float | None
    offered_per_s: float
    answered_per_s: float
    answered: int
    failed: int
    latency_ms_p95: float | None
    slo_ms: float
    percentile: float
    power_w: float | None
    grams: float | None
    revision: str
    why: str
    rollout: str
    left_s: float  # until the report is written, about
    devices: Sequence[DeviceLine] = ()
    simulated: bool = True


class View(Protocol):
    """View of a demo. A context, because a screen has to be given back."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def say(self, line: str) -> None:
        """Show a line about something that happened once."""
        ...

    def show(self, status: RunStatus) -> None:
        """Show the status of the run; called about once a second."""
        ...


class PlainView:
    """View of plain lines, for logs and pipes: one now and then, and all that happens once."""

    def __init__(self, console: Console, every_s: float = PLAIN_EVERY_S) -> None:
        self._console = console
        self._every_s = every_s
        self._last: tuple[str, float] = ("", 0.0)
        self._revision = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, status: RunStatus) -> None:
        run, at_s = self._last
        if status.revision != self._revision and status.revision:
            self._revision = status.revision
            self.say(f"[{status.run} {status.at_s:5.1f} s] plan {status.revision}: {status.why}")
        if status.run == run and status.at_s - at_s < self._every_s:
            return
        self._last = (status.run, status.at_s)
        self.say(status_line(status))


class ScreenView:
    """View of one screen that refreshes."""

    def __init__(self, console: Console) -> None:
        self._lines: list[str] = []
        self._status: RunStatus | None = None
        self._live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def say(self, line: str) -> None:
        self._lines = [*self._lines, line][-LINES_KEPT:]

    def show(self, status: RunStatus) -> None:
        self._status = status

    def _render(self) -> Group:
        parts = [] if self._status is None else [status_panel(self._status)]
        return Group(*parts, Text("\n".join(self._lines), style="dim"))


def view_for(console: Console) -> View:
    """View for a console: a screen on a terminal, lines elsewhere."""
    return ScreenView(console) if console.is_terminal else PlainView(console)


def status_line(status: RunStatus) -> str:
    """Status of a run in one line."""
    watts = "-" if status.power_w is None else f"{status.power_w:.0f} W"
    grams = "not metered" if status.grams is None else f"{status.grams:.3f} g"
    gpus = "; ".join(f"{d.name} {d.state} {d.clock_mhz} MHz {d.slices}" for d in status.devices)
    return (
        f"[{status.run} {status.at_s:5.1f} s] carbon {_or_dash(status.intensity_g_per_kwh)} g/kWh, "
        f"{status.answered_per_s:.0f} of {status.offered_per_s:.0f} requests/s, "
        f"p95 {_or_dash(status.latency_ms_p95)} ms (SLO {status.slo_ms:.0f}), {watts}, {grams}, "
        f"{status.answered} answered, {status.failed} failed | {gpus} | about {status.left_s:.0f} s left"
    )


def status_panel(status: RunStatus) -> Panel:
    """Status of a run as a panel."""
    late = status.latency_ms_p95 is not None and status.latency_ms_p95 > status.slo_ms
    numbers = Table.grid(padding=(0, 3))
    for _ in range(3):
        numbers.add_column()
    numbers.add_row(
        f"carbon [bold]{_or_dash(status.intensity_g_per_kwh)}[/] g/kWh",
        f"offered [bold]{status.offered_per_s:.0f}[/], answered [bold]{status.answered_per_s:.0f}[/] requests/s",
        f"p{status.percentile:g} [bold {'red' if late else 'green'}]{_or_dash(status.latency_ms_p95)}[/] ms"
        f" (SLO {status.slo_ms:.0f})",
    )
    numbers.add_row(
        f"power [bold]{_or_dash(status.power_w)}[/] W",
        f"{status.answered} answered, {status.failed} failed",
        "grams not metered" if status.grams is None else f"[bold]{status.grams:.3f}[/] g CO2 so far",
    )
    gpus = Table(expand=True, box=None, header_style="dim")
    for name in ("GPU (simulated)" if status.simulated else "device", "state", "slices", "clock", "power"):
        gpus.add_column(name)
    for d in status.devices:
        watts = "-" if d.power_w is None else f"{d.power_w:.0f} W"
        gpus.add_row(d.name, d.state, d.slices, f"{d.clock_mhz} MHz", watts)
    progress = Table.grid(expand=True)  # a bar alone does not end its line
    progress.add_row(ProgressBar(total=status.duration_s, completed=max(0.0, status.at_s)))
    done = "warming up" if status.at_s < 0 else f"{status.at_s:.0f} of {status.duration_s:.0f} s"
    why = Text(f"plan {status.revision} ({status.rollout}): {status.why}", style="italic")
    title = f"[bold]{status.run}[/] (run {status.number} of {status.count}) {done}, about {status.left_s:.0f} s left"
    subtitle = "SIMULATED GPUs" if status.simulated else None
    return Panel(Group(progress, numbers, gpus, why), title=title, title_align="left", subtitle=subtitle)


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
