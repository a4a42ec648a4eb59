"""`trefoil load`: the load generator on a running system, or on any KServe v2 endpoint."""

import asyncio
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trefoil.cli.output import DEFAULT_STATE_DIR, AsJson, StateDir, console, print_json
from trefoil.cli.run.state_directory import resolve_path
from trefoil.cli.system_client import connect_system
from trefoil.core.errors import SettingError

if TYPE_CHECKING:
    from trefoil.cli.load.arrivals import ArrivalTrace, RateProfile
    from trefoil.cli.load.generator import LoadSpec
    from trefoil.cli.load.result import LoadResult, LoadSummary, Progress

PRINT_EVERY_S = 2.0


def load(
    rate: Annotated[float, typer.Option(help="Requests per second, Poisson.", min=0.001)] = 20.0,
    duration: Annotated[float, typer.Option(help="Seconds.", min=0.1)] = 30.0,
    profile: Annotated[
        str, typer.Option(help="Instead of --rate: points second:rate, linear between, e.g. 0:26,30:26,36:52,60:52.")
    ] = "",
    trace: Annotated[
        Path | None, typer.Option(help="Instead of --rate: a CSV of counts per second, minute or hour, or of times.")
    ] = None,
    trace_scale: Annotated[float, typer.Option(help="Multiply the load of --trace.", min=1e-6)] = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed, same arrivals with the same images.", min=0)] = 1,
    batch: Annotated[str, typer.Option(help="Items per request, drawn from these, e.g. 1,2,8.")] = "1",
    deadline: Annotated[float, typer.Option(help="Seconds until a request is given up.", min=0.01)] = 5.0,
    slo_ms: Annotated[float | None, typer.Option(help="Judge by this SLO; default: the objective's.", min=0.1)] = None,
    address: Annotated[str, typer.Option(help="host:port of another endpoint than the running system's.")] = "",
    family: Annotated[str, typer.Option(help="Model to ask; default: the one that is served.")] = "",
    images: Annotated[Path | None, typer.Option(help="npz with images and labels; default: the family's.")] = None,
    permute_labels: Annotated[
        bool, typer.Option("--permute-labels", help="Control: accuracy must fall to chance.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write records, series and summary to this JSON file.")] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json: AsJson = False,
) -> None:
    """Send labelled images open loop, check every answer, and print latency, attainment and accuracy."""
    from trefoil.cli.load.generator import LoadSpec

    target, served, objective_ms, quantile = asyncio.run(_find_target(address, family, slo_ms, Path(state_dir)))
    spec = LoadSpec(
        arrivals=_arrivals(rate, duration, profile, trace, trace_scale),
        images=resolve_path(images or Path("model_repository") / served / "heldout.npz"),
        family=served,
        seed=seed,
        batch_sizes=_sizes(batch),
        deadline_s=deadline,
        permute_labels=permute_labels,
    )
    result = asyncio.run(_run_until_signal(spec, target, quiet=as_json))
    if out is not None:
        result.write(out, objective_ms, quantile)
    summary = result.summary(objective_ms, quantile)
    if as_json:
        print_json(asdict(summary))
    else:
        for line in _summary_lines(summary):
            console().print(line)


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
                remedy="give --slo-ms and --family with it",
            )
        return address, family, slo_ms, 0.95
    async with connect_system(state_dir) as system:
        served = family or system.launch.family
        objective = await system.objective(served)
        return system.launch.addresses["inference"], served, slo_ms or objective.slo_ms, objective.slo_quantile


def _arrivals(
    rate: float, duration: float, profile: str, trace: Path | None, trace_scale: float
) -> "RateProfile | ArrivalTrace":
    from trefoil.cli.load.arrivals import ArrivalTrace, RateProfile

    if trace is not None:
        return ArrivalTrace(trace, trace_scale, limit_s=duration)
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
        console().print(
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


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"
