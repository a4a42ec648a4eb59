"""`trefoil load`: the load generator on a running system, or on any KServe v2 endpoint."""

import asyncio
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trefoil.cli.family.commands import Shapes, parse_shapes
from trefoil.cli.options import BinS, Column, TimeColumn, TimeUnit, file_to_write
from trefoil.cli.output import DEFAULT_STATE_DIR, AsJson, StateDir, respond, show
from trefoil.cli.system_client import connect_system
from trefoil.core.errors import SettingError
from trefoil.installation import MODELS
from trefoil.runtime.repository import family_folder

if TYPE_CHECKING:
    from trefoil.cli.load.arrivals import ArrivalTrace, RateProfile
    from trefoil.cli.load.generator import LoadSpec
    from trefoil.cli.load.metered import Metered
    from trefoil.cli.load.result import LoadResult, LoadSummary, Progress
    from trefoil.simulator.scenario.request_columns import TraceOptions

PRINT_EVERY_S = 2.0


def load(
    rate: Annotated[float, typer.Option(help="Requests per second, Poisson.", min=0.001)] = 20.0,
    duration: Annotated[float, typer.Option(help="Seconds.", min=0.1)] = 30.0,
    profile: Annotated[
        str, typer.Option(help="Instead of --rate: points second:rate, linear between, e.g. 0:26,30:26,36:52,60:52.")
    ] = "",
    trace: Annotated[
        Path | None, typer.Option(help="Instead of --rate: a table of counts, or of single requests (docs/traces.md).")
    ] = None,
    column: Column = "",
    time_column: TimeColumn = "",
    time_unit: TimeUnit = "",
    bin_s: BinS = 0.0,
    trace_scale: Annotated[float, typer.Option(help="Multiply the load of --trace.", min=1e-6, max=1e6)] = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed, same arrivals with the same images.", min=0)] = 1,
    batch: Annotated[str, typer.Option(help="Items per request, drawn from these, e.g. 1,2,8.")] = "1",
    deadline: Annotated[float, typer.Option(help="Seconds until a request is given up.", min=0.01)] = 5.0,
    slo_latency_ms: Annotated[float | None, typer.Option(help="SLO; default: the objective's.", min=0.1)] = None,
    address: Annotated[str, typer.Option(help="host:port of another endpoint than the running system's.")] = "",
    family: Annotated[str, typer.Option(help="Model to ask; default: the one that is served.")] = "",
    images: Annotated[
        Path | None, typer.Option(help="npz with images and labels; default: the family's, else items are made up.")
    ] = None,
    shape: Shapes = None,
    permute_labels: Annotated[
        bool, typer.Option("--permute-labels", help="Control: accuracy must fall to chance.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="JSON of records, series, summary.", callback=file_to_write)] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json: AsJson = False,
) -> None:
    """Send items open loop, check every answer, and print latency, attainment, accuracy, joules and grams."""
    from trefoil.cli.load.generator import LoadSpec
    from trefoil.cli.load.inputs import inputs_of_model
    from trefoil.simulator.scenario.request_columns import TraceOptions

    options = TraceOptions(column, time_column, time_unit, bin_s)
    arrivals = _trace(trace, options, trace_scale, duration, as_json) if trace else _profile(rate, duration, profile)
    sizes, shapes = _sizes(batch), parse_shapes(shape)

    async def play() -> "tuple[LoadResult, Metered | None, float, float]":
        target, served, objective_ms, quantile = await _find_target(address, family, slo_latency_ms, Path(state_dir))
        own = family_folder(MODELS, served) / "heldout.npz"
        inputs = await inputs_of_model(target, served, images or (own if own.exists() else None), shapes)
        spec = LoadSpec(arrivals, inputs, served, seed=seed, batch_sizes=sizes, deadline_s=deadline)
        spec = replace(spec, permute_labels=permute_labels)
        result = await _run_until_signal(spec, target, quiet=as_json)
        # The meters of another's endpoint are not ours to read.
        metered = None if address else await _metered(Path(state_dir), served, result)
        return result, metered, objective_ms, quantile

    result, metered, objective_ms, quantile = asyncio.run(play())
    if out is not None:
        result.write(out, objective_ms, quantile)
    summary = result.summary(objective_ms, quantile)
    document = asdict(summary) | {"metered": None if metered is None else asdict(metered)}
    respond(as_json, document, *_summary_lines(summary), *([] if address else [_metered_line(metered)]))


async def _metered(state_dir: Path, family: str, result: "LoadResult") -> "Metered | None":
    from trefoil.cli.load.metered import metered_load

    async with connect_system(state_dir) as system:
        return await metered_load(system, family, result)


async def _find_target(
    address: str, family: str, slo_ms: float | None, state_dir: Path
) -> tuple[str, str, float, float]:
    """Target, family and SLO: as given, else as the running system has them."""
    if address:
        if slo_ms is None or not family:
            raise SettingError(
                "another endpoint's objective is not known",
                field="--address",
                value=address,
                remedy="give --slo-latency-ms and --family with it",
            )
        return address, family, slo_ms, 0.95
    async with connect_system(state_dir) as system:
        served = family or system.launch.family
        objective = await system.objective(served)
        return system.launch.addresses["inference"], served, slo_ms or objective.slo_ms, objective.slo_quantile


def _trace(
    path: Path, options: "TraceOptions", scale: float, duration: float, as_json: bool
) -> "RateProfile | ArrivalTrace":
    from trefoil.cli.load.arrivals import ArrivalTrace

    found = ArrivalTrace(path, scale, limit_s=duration, options=options)
    typer.echo(str(found.read()), err=as_json)
    found.times_s(0)  # a trace that cannot be played is refused before any request is sent
    return found


def _profile(rate: float, duration: float, profile: str) -> "RateProfile | ArrivalTrace":
    from trefoil.cli.load.arrivals import RateProfile

    if not profile:
        return RateProfile.constant(rate, duration)
    try:
        points = tuple((float(at), float(per_s)) for at, per_s in (point.split(":") for point in profile.split(",")))
    except ValueError as error:
        raise SettingError(
            "not second:rate,second:rate,...", field="--profile", value=profile, remedy="e.g. 0:26,30:26,36:52,60:52"
        ) from error
    return RateProfile(points)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError as error:
        raise SettingError("not a list of numbers", field="--batch", value=text, remedy="e.g. 1 or 1,2,8") from error


async def _run_until_signal(spec: "LoadSpec", target: str, *, quiet: bool) -> "LoadResult":
    """Ctrl-C ends the load early; what was sent is waited for and counted."""
    from trefoil.cli.load.generator import run_load

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    printed_s = 0.0

    def report(now: "Progress") -> None:
        nonlocal printed_s
        if quiet or now.elapsed_s - printed_s < PRINT_EVERY_S:
            return
        printed_s = now.elapsed_s
        p95 = "-" if now.latency_ms_p95 is None else f"{now.latency_ms_p95:.0f}"
        show(
            f"{now.elapsed_s:5.0f} of {now.duration_s:.0f} s: {now.answered_per_s:.0f} answers/s, p95 {p95} ms, "
            f"{now.answered} answered, {now.failed} failed, {now.in_flight} in flight"
        )

    return await run_load(spec, target, report, stop=stop)


def _summary_lines(summary: "LoadSummary") -> list[str]:
    """A load in a few lines."""
    codes = ", ".join(f"{code} {count}" for code, count in summary.failed_by_code.items())
    shares = ", ".join(f"{variant} {100 * share:.1f} %" for variant, share in summary.variant_shares.items())
    accuracy = "-" if summary.accuracy is None else f"{100 * summary.accuracy:.2f} %"
    failed = f"{summary.failed} failed" + (f" ({codes})" if codes else "")
    attainment = f"{100 * summary.slo_attainment:.2f} %"
    return [
        f"{summary.requests} requests, {summary.answered} answered, {failed}",
        f"latency p50 {_ms(summary.latency_ms_p50)}, p95 {_ms(summary.latency_ms_p95)}, "
        f"p99 {_ms(summary.latency_ms_p99)}, from the intended send time",
        f"SLO {summary.slo_ms:g} ms at p{100 * summary.slo_quantile:g}: attainment {attainment}",
        f"accuracy {accuracy}; answered by {shares or '-'}",
    ]


def _metered_line(metered: "Metered | None") -> str:
    if metered is None:
        return "energy: not known: no meter, or its samples did not come in time"
    return (
        f"energy {metered.joules_per_request:.3g} J, carbon {1e3 * metered.grams_per_request:.3g} mg a request, "
        "metered from the first to the last (idle and sleep included)"
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"
