"""Load generator in a separate process, so that drawing a screen cannot delay a request.

`python -m trefoil.cli.load.process --spec spec.json --out folder` plays one load for each family, all at once, prints a
JSON line of progress twice a second, and writes `load-<family>.json` of each. The first `warmup_s` of a load are sent
like the rest and then left out: services have met the load, none of it counts.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from trefoil.cli.guarded import EXIT_ERROR
from trefoil.cli.load.arrivals import NormalSizes, RateProfile
from trefoil.cli.load.generator import LEAD_S, LoadSpec, run_load
from trefoil.cli.load.result import LoadResult, Progress, Record
from trefoil.cli.run.processes import ChildProcess, Command
from trefoil.cli.run.state_directory import write_private
from trefoil.core.errors import StartError, TrefoilError
from trefoil.runtime.clock import Clock, WallClock

POLL_S: Final = 0.1
START_DEADLINE_S: Final = 20.0
NO_SLO_MS: Final = 1e9  # the process only records; its reader compares with the SLO
OVERTIME_MAX_S: Final = 30.0  # how much longer than its load the process may take


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Load of one run on one family: (second, rate) points, after a warm-up at the first rate."""

    points: tuple[tuple[float, float], ...]
    warmup_s: float
    images: str
    family: str
    seed: int
    permute_labels: bool = False
    items_mean: float = 1.0
    items_sd: float = 0.0
    items_max: int = 1
    receipts: bool = False  # asked for: they name the slice that answered

    @property
    def duration_s(self) -> float:
        return self.points[-1][0]

    def spec(self) -> LoadSpec:
        """The load as the generator knows it."""
        start = self.points[0][1]
        shifted = tuple((at_s + self.warmup_s, rate) for at_s, rate in self.points)
        points = ((0.0, start), *shifted) if self.warmup_s > 0 else shifted
        return LoadSpec(
            RateProfile(points),
            Path(self.images),
            self.family,
            seed=self.seed,
            batch_sizes=NormalSizes(self.items_mean, self.items_sd, self.items_max),
            permute_labels=self.permute_labels,
            parameters={"trefoil_receipt": "true"} if self.receipts else {},
        )

    def rate_per_s(self, at_s: float) -> float:
        """The offered rate at a second of the run; the first one during the warm-up."""
        return RateProfile(self.points).rate_per_s(min(max(at_s, 0.0), self.duration_s))


class LoadProcess:
    """A running load process. Stop it in a `finally`. Its warm-up begins `lead_s` after all is ready for it.

    One plan a family; all are equally long and have the same warm-up.
    """

    def __init__(
        self,
        plans: Sequence[LoadPlan],
        target: str,
        folder: Path,
        launch_id: str,
        clock: Clock,
        lead_s: float = LEAD_S,
    ) -> None:
        self.plans = tuple(plans)
        self._lead_s = lead_s
        self._clock = clock
        self._log = folder / "load.log"
        self._results = {plan.family: result_path(folder, plan.family) for plan in plans}
        for stale in (self._log, *self._results.values()):
            stale.unlink(missing_ok=True)
        spec = folder / "load_spec.json"
        write_private(spec, json.dumps([asdict(plan) for plan in plans]))
        argv = [sys.executable, "-P", "-m", "trefoil.cli.load.process", "--spec", str(spec)]
        argv += ["--target", target, "--out", str(folder), "--lead-s", str(lead_s)]
        self._child = ChildProcess(Command("load", argv, self._log, stop_grace_s=3.0), launch_id, clock)

    async def stop(self) -> None:
        """End it at once, whatever it was doing."""
        await self._child.stop(kill_now=lambda: True)

    async def started_at_s(self) -> float:
        """UTC of second 0 of the run, as soon as it is certain: about when the lead begins.

        Raises:
            StartError: the load process died or said nothing.
        """
        give_up_s = self._clock.monotonic_s() + START_DEADLINE_S
        while self._clock.monotonic_s() < give_up_s:
            line = self._last_line()
            if line is not None:
                return float(line["now_s"]) - float(line["elapsed_s"]) + self.plans[0].warmup_s
            self._refuse_death()
            await self._clock.sleep(POLL_S)
        raise StartError("printed nothing after its start", field="load", remedy=f"read {self._log}")

    def progress(self) -> Progress | None:
        """The newest line; times count from the start of the warm-up."""
        line = self._last_line()
        if line is None:
            return None
        line.pop("now_s")
        return Progress(**line)

    def rate_per_s(self, at_s: float) -> float:
        """Offered rate of all families at a second of the run."""
        return sum(plan.rate_per_s(at_s) for plan in self.plans)

    async def results(self) -> dict[str, LoadResult]:
        """Wait for the last answer; the result by family, the warm-up left out.

        Raises:
            StartError: the load process died or did not end.
        """
        takes_s = self._lead_s + self.plans[0].warmup_s + self.plans[0].duration_s
        give_up_s = self._clock.monotonic_s() + takes_s + OVERTIME_MAX_S
        while self._child.exit_code is None:
            if self._clock.monotonic_s() > give_up_s:
                raise StartError("did not end", field="load", remedy=f"read {self._log}")
            await self._clock.sleep(POLL_S)
        if self._child.exit_code != 0:
            self._refuse_death()
        warmup_s = self.plans[0].warmup_s
        return {name: without_warmup(read_load_result(path), warmup_s) for name, path in self._results.items()}

    def _refuse_death(self) -> None:
        if self._child.exit_code is not None:
            raise StartError(f"ended with exit code {self._child.exit_code}: {self._child.last_lines()}", field="load")

    def _last_line(self) -> dict[str, Any] | None:
        try:
            lines = self._log.read_text().rsplit("\n", 2)
        except FileNotFoundError:
            return None
        # The last piece is what is being written; a line before it is complete.
        whole = lines[-2] if len(lines) > 1 else ""
        if not whole.startswith("{"):
            return None
        values: dict[str, Any] = json.loads(whole)
        return values


def result_path(folder: Path, family: str) -> Path:
    """File with the result of the load on a family."""
    return folder / f"load-{family}.json"


def read_load_result(path: Path) -> LoadResult:
    """Read the result that a load process wrote."""
    values = json.loads(path.read_text())
    columns = values["records"]
    rows = zip(*(columns[name] for name in Record.__dataclass_fields__), strict=True)
    return LoadResult(
        records=tuple(Record(*row) for row in rows),
        started_at_s=values["started_at_s"],
        duration_s=values["summary"]["duration_s"],
        seed=values["seed"],
        digest=values["digest"],
        stopped_early=values["stopped_early"],
    )


def without_warmup(result: LoadResult, warmup_s: float) -> LoadResult:
    """The same load, counted from the end of its warm-up."""
    kept = tuple(replace(r, intended_s=r.intended_s - warmup_s) for r in result.records if r.intended_s >= warmup_s)
    return replace(
        result,
        records=kept,
        started_at_s=result.started_at_s + warmup_s,
        duration_s=max(0.0, result.duration_s - warmup_s),
    )


def merged(results: Mapping[str, LoadResult]) -> LoadResult:
    """All families' loads as one, of the first one's time; their second 0 is the same but for milliseconds."""
    first = next(iter(results.values()))
    records = sorted((r for result in results.values() for r in result.records), key=lambda r: r.intended_s)
    digest = "+".join(result.digest for result in results.values())
    return replace(first, records=tuple(records), digest=digest)


def last_answer_at_s(result: LoadResult) -> float:
    """UTC of the last answer or failure, at least the end of the load."""
    last_s = max((r.intended_s + r.latency_ms / 1e3 for r in result.records), default=0.0)
    return result.started_at_s + max(last_s, result.duration_s)


def progress_of_all(newest: Sequence[Progress]) -> Progress:
    """Progress of several loads as one; p95 of the slowest, accuracy of the least accurate."""

    def known(name: str) -> list[float]:
        return [value for one in newest if (value := getattr(one, name)) is not None]

    counts = ("requests", "answered", "failed", "in_flight", "answered_per_s")
    return replace(
        newest[0],
        **{name: sum(getattr(one, name) for one in newest) for name in counts},
        latency_ms_p95=max(known("latency_ms_p95"), default=None),
        accuracy=min(known("accuracy"), default=None),
    )


def main(argv: list[str] | None = None) -> int:
    """The load process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lead-s", type=float, default=LEAD_S)
    arguments = parser.parse_args(argv)
    plans = [
        LoadPlan(**{**values, "points": tuple((at_s, rate) for at_s, rate in values["points"])})
        for values in json.loads(arguments.spec.read_text())
    ]
    try:
        results = asyncio.run(_run_all(plans, arguments.target, arguments.lead_s))
    except TrefoilError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    for plan, result in zip(plans, results, strict=True):
        result.write(result_path(arguments.out, plan.family), slo_ms=NO_SLO_MS)
    return 0


async def _run_all(plans: Sequence[LoadPlan], target: str, lead_s: float) -> list[LoadResult]:
    """All loads at once; a line of progress whenever all have something new to say."""
    clock, newest = WallClock(), dict[str, Progress]()

    def report(family: str, progress: Progress) -> None:
        newest[family] = progress
        if len(newest) == len(plans):
            print(json.dumps({"now_s": clock.now_s(), **asdict(progress_of_all(list(newest.values())))}), flush=True)
            newest.clear()

    loads = [run_load(p.spec(), target, partial(report, p.family), clock=clock, lead_s=lead_s) for p in plans]
    return list(await asyncio.gather(*loads))


if __name__ == "__main__":
    sys.exit(main())
