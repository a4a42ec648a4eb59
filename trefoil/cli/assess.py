"""`trefoil assess`: what a fleet costs, and what each lever would save, from the metrics that it has. Reads only."""

import json
import os
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from trefoil.cli.carbon.client import parse_moment
from trefoil.cli.demo.results import made_by
from trefoil.cli.options import folder_to_write, parse_number
from trefoil.cli.output import AsJson, grid, respond, ticking
from trefoil.core.errors import SettingError
from trefoil.installation import MODELS
from trefoil.runtime.clock import WallClock
from trefoil.runtime.config import parse_pairs
from trefoil.runtime.security.secret_files import read_secret_file

if TYPE_CHECKING:
    import httpx

    from trefoil.assess.answering import Assessment
    from trefoil.assess.series import MetricSeries

TOKEN_VARIABLE: Final = "TREFOIL_ASSESS_TOKEN"
Many = list[str] | None
File = Path | None


def assess(
    prometheus: Annotated[str, typer.Option(help="URL of a Prometheus, Thanos, Mimir or VictoriaMetrics.")] = "",
    scrape: Annotated[Many, typer.Option(help="Instead: URL of a metric page; again for each.")] = None,
    from_csv: Annotated[list[Path] | None, typer.Option(help="Instead: an export; again for each.")] = None,
    since: Annotated[str, typer.Option(help="ISO 8601 time, or how long ago: 90min, 24h, 7d.")] = "7d",
    until: Annotated[str, typer.Option(help="The same; default: now.")] = "",
    step: Annotated[float, typer.Option(min=0, max=86_400, help="Seconds between samples; 0: as --since asks.")] = 0.0,
    selector: Annotated[str, typer.Option(help="Matchers of a part of the fleet: 'cluster=\"a\"'.")] = "",
    minutes: Annotated[float, typer.Option(min=0.05, max=1440, help="How long --scrape reads.")] = 10.0,
    every: Annotated[float, typer.Option(min=0.5, max=300, help="Seconds between two scrapes.")] = 5.0,
    token_file: Annotated[File, typer.Option(help=f"File with a token that may read; else {TOKEN_VARIABLE}.")] = None,
    user: Annotated[str, typer.Option(help="Basic auth by this name, with the token as password.")] = "",
    header: Annotated[Many, typer.Option(metavar="NAME=VALUE", help="HTTP header, e.g. X-Scope-OrgID=team.")] = None,
    tls_ca: Annotated[File, typer.Option("--tls-ca", help="PEM of the authority of its certificate.")] = None,
    carbon: Annotated[str, typer.Option(help="Trace of intensities, or g/kWh; default 400.")] = "",
    zone: Annotated[str, typer.Option(help="Name of the grid zone.")] = "grid",
    pue: Annotated[float, typer.Option(min=1, max=10, help="Power usage effectiveness of the site.")] = 1.2,
    accuracy: Annotated[Many, typer.Option(metavar="MODEL=0.76", help="Accuracy of a model; default 1.")] = None,
    variants: Annotated[Many, typer.Option(metavar="NAME=A,B", help="Models that answer the same question.")] = None,
    slo_latency_ms: Annotated[Many, typer.Option(metavar="[MODEL=]MS", help="p95 promised; default 2 x found.")] = None,
    below_best_pct: Annotated[float, typer.Option(min=0, max=99, help="Accuracy that may be lost, percent.")] = 2.0,
    device_type: Annotated[str, typer.Option(help="Board of all devices, where no series says it.")] = "",
    repository: Annotated[Path, typer.Option(help="Families with profiles and accuracies.")] = MODELS,
    seeds: Annotated[int, typer.Option(min=0, max=100, help="Of the simulations; 0: costs alone.")] = 3,
    jobs: Annotated[int, typer.Option(min=0, help="Runs side by side; 0: one per core.")] = 0,
    out: Annotated[
        File,
        typer.Option(help="Folder for report.html, assess.json, scenario, profile, up.toml.", callback=folder_to_write),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell what a fleet costs in joules and grams, and what each lever would save. Writes to nothing that it reads."""
    from trefoil.assess.answering import assess as assess_series
    from trefoil.assess.families import Terms
    from trefoil.assess.prometheus import open_client

    terms = Terms(
        accuracy=_numbers("--accuracy", accuracy, 1.0),
        variants={k: tuple(v.split(",")) for k, v in parse_pairs("--variants", variants or ()).items()},
        slo_ms=_numbers("--slo-latency-ms", slo_latency_ms, 1e7), below_best_pct=below_best_pct,
        device_type=device_type, repository=repository, pue=pue, carbon=carbon, zone=zone,
    )  # fmt: skip
    with ticking(quiet=as_json) as say:
        token = read_secret_file(token_file, "--token-file") if token_file else os.environ.get(TOKEN_VARIABLE, "")
        if user and not token:
            raise SettingError("no password", field="--user", value=user, remedy=f"--token-file or {TOKEN_VARIABLE}")
        urls = [*filter(None, [prometheus]), *(scrape or [])]
        now_s, client = WallClock().now_s(), open_client(
            token, user, parse_pairs("--header", header or ()), tls_ca, urls
        )  # fmt: skip
        paced = {"--since": since, "--until": until, "step_s": step, "span_s": 60 * minutes, "every_s": every}
        series, asked = _read(prometheus, scrape or [], from_csv or [], client, selector, paced, now_s, say)
        found = assess_series(
            series, terms, seeds=seeds, jobs=jobs, out=out, asked=asked,
            date=datetime.fromtimestamp(now_s, UTC).date().isoformat(), say=say,
        )  # fmt: skip
    _show(found, out, as_json, {**made_by(), "command": "trefoil assess"})


def _read(
    prometheus: str, pages: list[str], exports: list[Path], client: "httpx.Client", selector: str,
    paced: dict[str, Any], now_s: float, say: Callable[[str], None],
) -> "tuple[list[MetricSeries], str]":  # fmt: skip
    """Series of the one source that is given, and how much it was asked."""
    from trefoil.assess.given import read_csv, scrape
    from trefoil.assess.prometheus import Prometheus

    if sum(map(bool, (prometheus, pages, exports))) != 1:
        remedy = "give one of --prometheus URL, --scrape URL, --from-csv FILE"
        raise SettingError("give exactly one source", field="source", remedy=remedy)
    asked = Counter[str]()
    if pages:
        series = scrape(pages, paced["span_s"], paced["every_s"], client, asked, say)
        return series, f"{len(pages)} pages: {asked['requests']:,} requests, {asked['samples']:,} samples"
    if exports:
        series = read_csv(exports)
        return series, f"{', '.join(map(str, exports))}: {sum(one.times_s.size for one in series):,} samples"
    begin_s, end_s = (parse_moment(paced[option], option, now_s) for option in ("--since", "--until"))
    if not begin_s < (end_s or now_s):
        raise SettingError("not before --until", field="--since", value=paced["--since"], remedy="give an earlier time")
    source = Prometheus(prometheus, client, selector, asked)
    series = source.read(begin_s, end_s or now_s, paced["step_s"])
    amounts = f"{prometheus}: {asked['requests']:,} requests, {asked['samples']:,} samples"
    return series, "; ".join([amounts, *sorted(source.warnings)])


def _show(found: "Assessment", out: Path | None, as_json: bool, about: dict[str, str]) -> None:
    from trefoil.assess import report
    from trefoil.simulator.report.result import json_safe

    document = json_safe({**about, **report.to_json(found)})
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "assess.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        (out / "report.html").write_text(report.html(found, about), encoding="utf-8")
    tables = [grid(title, columns.split("|"), rows) for title, columns, rows in report.tables(found)]
    written = [f"written to {out}: {', '.join(sorted(one.name for one in out.iterdir()))}"] if out is not None else []
    respond(as_json, document, *tables, report.headline(found), *report.notes(found), *written)


def _numbers(option: str, given: Many, most: float) -> dict[str, float]:
    """Number by model of each MODEL=NUMBER, or NUMBER of all of them (""); above 0, at most `most`."""
    found = {k: parse_number(option, k, v) for k, _, v in (one.rpartition("=") for one in given or ())}
    for name, value in found.items():
        if not 0 < value <= most:
            field, remedy = f"{option} {name}".strip(), f"write {option} MODEL=NUMBER within these bounds"
            raise SettingError(f"must be > 0 and <= {most:g}", field=field, value=value, remedy=remedy)
    return found
