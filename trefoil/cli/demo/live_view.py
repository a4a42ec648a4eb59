"""Live view of the demo: one screen that refreshes on a terminal, plain lines elsewhere."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from controller.settings import Slo
from trefoil.cli.demo.run_monitor import Snapshot
from trefoil.cli.demo.schedule import left_s
from trefoil.cli.load.result import Progress
from trefoil.cli.output import slices_text
from trefoil.cli.run.scenario import DemoScenario
from trefoil.core.fleet import DeviceState, DeviceStatus

LINES_KEPT: Final = 6
PLAIN_EVERY_S: Final = 7.0
NO_PROGRESS: Final = Progress(0.0, 0.0, 0, 0, 0, 0, 0.0, None, None)


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Status of one run of a demo: what the monitor saw, how far the load is, and what was metered."""

    scenario: DemoScenario
    policy: str
    number: int  # of the scenario's policies
    slo: Slo
    at_s: float  # below 0: warming up
    snapshot: Snapshot
    offered_per_s: float
    progress: Progress
    watts: Sequence[float | None]  # by device
    grams: float | None

    @property
    def devices(self) -> list[DeviceStatus]:
        """Devices of all nodes."""
        return [device for node in self.snapshot.nodes for device in node.devices]

    @property
    def revision(self) -> str:
        """Revision of the plan in force."""
        plan = self.snapshot.plan
        return f"{plan.revision.epoch}.{plan.revision.number}" if plan else ""

    @property
    def why(self) -> str:
        """Reason of the plan in force."""
        return self.snapshot.plan.why if self.snapshot.plan else ""

    @property
    def left_s(self) -> float:
        """Time until the report is written, about."""
        return left_s(self.scenario, self.number, self.at_s)

    @property
    def carbon(self) -> str:
        """Intensity now [g/kWh]."""
        return _or_dash(self.snapshot.carbon.intensity_g_per_kwh if self.snapshot.carbon else None)


class PlainView:
    """View of plain lines, for logs and pipes: one now and then, and all that happens once."""

    def __init__(self, console: Console, every_s: float = PLAIN_EVERY_S) -> None:
        self._console = console
        self._every_s = every_s
        self._last: tuple[str, float] = ("", 0.0)
        self._revision = ""

    def say(self, line: str) -> None:
        """Show a line about something that happened once."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, status: RunStatus) -> None:
        """Show the status of the run; called about once a second."""
        run, at_s = self._last
        if status.revision != self._revision and status.revision:
            self._revision = status.revision
            self.say(f"[{status.policy} {status.at_s:5.1f} s] plan {status.revision}: {status.why}")
        if status.policy == run and status.at_s - at_s < self._every_s:
            return
        self._last = (status.policy, status.at_s)
        self.say(status_line(status))


class ScreenView(PlainView):
    """View of one screen that refreshes."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._lines: list[str] = []
        self._status: RunStatus | None = None

    def say(self, line: str) -> None:
        self._lines = [*self._lines, line][-LINES_KEPT:]

    def show(self, status: RunStatus) -> None:
        self._status = status

    def render(self) -> Group:
        """What the screen shows now."""
        parts = [] if self._status is None else [status_panel(self._status)]
        return Group(*parts, Text("\n".join(self._lines), style="dim"))


@contextmanager
def view_for(console: Console) -> Iterator[PlainView]:
    """View for a console: a screen on a terminal, which is given back at the end, lines elsewhere."""
    if not console.is_terminal:
        yield PlainView(console)
        return
    view = ScreenView(console)
    with Live(console=console, refresh_per_second=4, transient=True, get_renderable=view.render):
        yield view


def status_line(status: RunStatus) -> str:
    """Status of a run in one line."""
    done, known = status.progress, [one for one in status.watts if one is not None]
    watts = f"{sum(known):.0f} W" if len(known) == len(status.watts) else "-"
    grams = "not metered" if status.grams is None else f"{status.grams:.3f} g"
    gpus = "; ".join(f"{_name(d)} {d.state.name.lower()} {d.clock_mhz} MHz {_serves(d)}" for d in status.devices)
    return (
        f"[{status.policy} {status.at_s:5.1f} s] carbon {status.carbon} g/kWh, "
        f"{done.answered_per_s:.0f} of {status.offered_per_s:.0f} requests/s, "
        f"p95 {_or_dash(done.latency_ms_p95)} ms (SLO {status.slo.latency_ms:.0f}), {watts}, {grams}, "
        f"{done.answered} answered, {done.failed} failed | {gpus} | about {status.left_s:.0f} s left"
    )


def status_panel(status: RunStatus) -> Panel:
    """Status of a run as a panel."""
    done, slo, simulated = status.progress, status.slo, not status.scenario.fleet.real
    late = done.latency_ms_p95 is not None and done.latency_ms_p95 > slo.latency_ms
    known = [one for one in status.watts if one is not None]
    numbers = Table.grid(padding=(0, 3))
    for _ in range(3):
        numbers.add_column()
    numbers.add_row(
        f"carbon [bold]{status.carbon}[/] g/kWh",
        f"offered [bold]{status.offered_per_s:.0f}[/], answered [bold]{done.answered_per_s:.0f}[/] requests/s",
        f"p{slo.percentile:g} [bold {'red' if late else 'green'}]{_or_dash(done.latency_ms_p95)}[/] ms"
        f" (SLO {slo.latency_ms:.0f})",
    )
    numbers.add_row(
        f"power [bold]{_or_dash(sum(known) if len(known) == len(status.watts) else None)}[/] W",
        f"{done.answered} answered, {done.failed} failed",
        "grams not metered" if status.grams is None else f"[bold]{status.grams:.3f}[/] g CO2 so far",
    )
    gpus = Table(expand=True, box=None, header_style="dim")
    for name in ("GPU (simulated)" if simulated else "device", "state", "slices", "clock", "power"):
        gpus.add_column(name)
    for d, power_w in zip(status.devices, status.watts, strict=True):
        watts = "-" if power_w is None else f"{power_w:.0f} W"
        gpus.add_row(_name(d), d.state.name.lower(), _serves(d), f"{d.clock_mhz} MHz", watts)
    progress, duration_s = Table.grid(expand=True), status.scenario.duration_s  # a bar alone does not end its line
    progress.add_row(ProgressBar(total=duration_s, completed=max(0.0, status.at_s)))
    at = "warming up" if status.at_s < 0 else f"{status.at_s:.0f} of {duration_s:.0f} s"
    rollout = status.snapshot.rollout.state.name.lower() if status.snapshot.rollout else ""
    why = Text(f"plan {status.revision} ({rollout}): {status.why}", style="italic")
    runs = f"run {status.number} of {len(status.scenario.policies)}"
    title = f"[bold]{status.policy}[/] ({runs}) {at}, about {status.left_s:.0f} s left"
    subtitle = "SIMULATED GPUs" if simulated else None
    return Panel(Group(progress, numbers, gpus, why), title=title, title_align="left", subtitle=subtitle)


def _name(device: DeviceStatus) -> str:
    return device.device.split("/")[-1]


def _serves(device: DeviceStatus) -> str:
    return "asleep" if device.state is DeviceState.ASLEEP else slices_text(device)


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
