"""Run a scenario: from Python in a line, from the command line with a progress bar, and on again after an interruption.

A checkpoint is the whole state of a run after some simulated time, pickled: it holds every generator and every request
in flight, so that what follows is the same bytes as without the interruption. It belongs to one scenario and one
version of this program, and is refused for another.
"""

import gc
import hashlib
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from trefoil.core import errors
from trefoil.core.units import HOUR_S
from trefoil.runtime.clock import WallClock
from trefoil.runtime.files import replace_file
from trefoil.simulator.report.result import Result, result
from trefoil.simulator.scenario.inputs import Provided, planner_for, prepare
from trefoil.simulator.scenario.schema import Scenario
from trefoil.simulator.simulation import Simulation

CHECKPOINT = "checkpoint"
GC_THRESHOLDS = (20_000, 20, 50)  # a run makes frozen values by the million, and no cycles among them
CHECKPOINT_EVERY_S = 10.0  # of wall time, at the end of a simulated hour


def simulate(
    scenario: Scenario,
    provided: Provided | None = None,
    *,
    keep_records: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Result:
    """Simulate from beginning to end. `progress` is told the share that is done.

    Raises:
        errors.TrefoilError: the scenario cannot be run; names field, value and remedy.
    """
    return _run_to_end(Simulation(prepare(scenario, provided), keep_records), progress)


def simulate_to(scenario: Scenario, out: Path | None, *, resume: bool = False, bar: bool = False) -> Result:
    """Simulate, and with `out` leave result and series there; goes on from a checkpoint if there is one and `resume`.

    Raises:
        errors.TrefoilError: the scenario cannot be run, or the checkpoint is of another one.
    """
    saved = out / CHECKPOINT if out is not None else None
    simulation = (
        load_checkpoint(saved, scenario)
        if resume and saved is not None and saved.exists()
        else Simulation(prepare(scenario))
    )
    clock = WallClock()
    last_s = clock.monotonic_s()

    def checkpoint() -> None:
        nonlocal last_s
        if saved is not None and clock.monotonic_s() - last_s >= CHECKPOINT_EVERY_S:
            save_checkpoint(saved, simulation)
            last_s = clock.monotonic_s()

    with progress_bar(scenario.name, bar) as progress:
        found = _run_to_end(simulation, progress, checkpoint)
    if out is not None:
        found.write(out)
        if saved is not None:
            saved.unlink(missing_ok=True)
    return found


@contextmanager
def progress_bar(name: str, bar: bool) -> Iterator[Callable[[float], None]]:
    """Progress bar on standard error, to be told the share that is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not bar) as painted:
        task = painted.add_task(name, total=1.0)
        yield lambda share: painted.update(task, completed=share)


def _run_to_end(
    simulation: Simulation, progress: Callable[[float], None] | None, checkpoint: Callable[[], None] | None = None
) -> Result:
    before = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        while simulation.now_s < simulation.end_s - 1e-9:
            hour = max(0.0, simulation.now_s) // HOUR_S + 1
            simulation.run(min(hour * HOUR_S, max(0.0, simulation.now_s) + max(1.0, simulation.end_s / 200)))
            if progress is not None:
                progress(max(0.0, simulation.now_s) / simulation.end_s)
            if checkpoint is not None and simulation.now_s < simulation.end_s - 1e-9:
                checkpoint()
        return result(simulation)
    finally:
        gc.set_threshold(*before)


def _stamp(scenario: Scenario) -> bytes:
    return hashlib.sha256(f"{version('trefoil')} {scenario.model_dump_json()}".encode()).digest()


def save_checkpoint(path: Path, simulation: Simulation) -> None:
    """Write a checkpoint, after any rollout that is under way; the file is replaced whole."""
    simulation.run_until_settled()
    body = pickle.dumps(simulation, protocol=pickle.HIGHEST_PROTOCOL)
    replace_file(path, _stamp(simulation.scenario) + hashlib.sha256(body).digest() + body, sync=False)


def load_checkpoint(path: Path, scenario: Scenario) -> Simulation:
    """Simulation of a checkpoint, ready to go on.

    Raises:
        errors.SettingError: the checkpoint is damaged or not of this scenario.
    """
    raw = path.read_bytes()
    stamp, digest, body = raw[:32], raw[32:64], raw[64:]
    if stamp != _stamp(scenario):
        why = "belongs to another scenario, seed or version"
    elif digest != hashlib.sha256(body).digest():
        why = "is damaged"
    else:
        simulation: Simulation = pickle.loads(body)
        simulation.resume(planner_for(scenario))
        return simulation
    raise errors.SettingError(
        f"the checkpoint {why}", field="--resume", value=str(path), remedy="run the same scenario, or without --resume"
    )
