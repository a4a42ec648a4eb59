"""Run a scenario: from Python in a line, from the command line with a progress bar."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from trefoil.core.units import HOUR_S
from trefoil.simulator.report.result import Result, result
from trefoil.simulator.scenario.inputs import Provided, prepare
from trefoil.simulator.scenario.schema import Scenario
from trefoil.simulator.simulation import Simulation

GC_THRESHOLDS = (20_000, 20, 50)  # a run makes frozen values by the million, and no cycles among them


def simulate(
    scenario: Scenario,
    provided: Provided | None = None,
    *,
    keep_records: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Result:
    """Simulate from beginning to end. `progress` gets the share that is done.

    Raises:
        errors.TrefoilError: the scenario cannot be run; names field, value and remedy.
    """
    simulation = Simulation(prepare(scenario, provided), keep_records)
    before = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        while simulation.now_s < simulation.end_s - 1e-9:
            hour = max(0.0, simulation.now_s) // HOUR_S + 1
            simulation.run(min(hour * HOUR_S, max(0.0, simulation.now_s) + max(1.0, simulation.end_s / 200)))
            if progress is not None:
                progress(max(0.0, simulation.now_s) / simulation.end_s)
        return result(simulation)
    finally:
        gc.set_threshold(*before)


def simulate_to(scenario: Scenario, out: Path | None, *, bar: bool = False) -> Result:
    """Simulate, and with `out` leave result and series there; raises as `simulate`."""
    with progress_bar(scenario.name, bar) as progress:
        found = simulate(scenario, progress=progress)
    if out is not None:
        found.write(out)
    return found


@contextmanager
def progress_bar(name: str, bar: bool) -> Iterator[Callable[[float], None]]:
    """Progress bar on standard error; call it with the share that is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not bar) as painted:
        task = painted.add_task(name, total=1.0)
        yield lambda share: painted.update(task, completed=share)
