"""Simulate a scenario from Python, or compare policies on it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trefoil.comparison import runs
from trefoil.comparison.comparison import Comparison
from trefoil.runtime.config import changed
from trefoil.simulator.report.result import Result
from trefoil.simulator.run import simulate as run_scenario
from trefoil.simulator.scenario.inputs import Provided
from trefoil.simulator.scenario.schema import Scenario


def simulate(
    scenario: Path | str | Scenario,
    *,
    policy: str = "",
    seed: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    provided: Provided | None = None,
) -> Result:
    """Simulate a scenario: `.summary`, `.frame()` (pandas), `.plot()` (matplotlib), `.table()`, `.to_json()`.

    Args:
        scenario: a scenario, its file, or the name of one that ships ("digits").
        policy: instead of the scenario's: a name of the table, or module:ROW.
        seed: instead of the scenario's.
        overrides: settings by dotted key, e.g. {"families.0.arrivals.rate_per_s": 40}.
        provided: catalogue, arrivals, intensities or a planner from memory instead of files.

    Raises:
        errors.TrefoilError: names field, value and remedy.
    """
    wanted = {**(overrides or {}), **({"policy": policy} if policy else {})}
    wanted |= {} if seed is None else {"seed": seed}
    loaded = changed(scenario, wanted) if isinstance(scenario, Scenario) else Scenario.load(scenario, wanted)
    return run_scenario(loaded, provided)


def compare(
    scenario: Path | str | Scenario,
    policies: Sequence[str] = runs.POLICIES,
    *,
    overrides: Mapping[str, Any] | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    seeds: int = 1,
    jobs: int = 0,
) -> Comparison:
    """Compare policies at equal load: `.frame()` (one row a run), `.plot()`, `.cases`, `.to_json()`.

    Args:
        scenario: a scenario, its file, or the name of one that ships.
        policies: two or more, or ("all",): those of the table that apply; the others are compared with the first.
        overrides: settings of every run, by dotted key.
        vary: several values of settings; each combination of them is a case.
        seeds: how many, from the scenario's own on.
        jobs: runs side by side; 0: one per core.

    Raises:
        errors.TrefoilError: names field, value and remedy; before the first run starts.
    """
    values = {key: (value,) for key, value in (overrides or {}).items()}
    return runs.compare(
        scenario, policies, {**values, **{key: tuple(of) for key, of in (vary or {}).items()}}, seeds, jobs
    )
