"""`trefoil forecast`: train the model of the forecaster `lstm`; what forecasts of load would have been worth."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from trefoil.cli.guarded import Guarded
from trefoil.cli.options import BinS, Column, Sets, TimeColumn, TimeUnit, file_to_write, parse_sets
from trefoil.cli.output import AsJson, grid, respond, slow
from trefoil.core.parts import Kind, load_part

TORCH: Final = Path(".venv-export/bin/python")
DRAW_SEED: Final = 23

app = typer.Typer(cls=Guarded, no_args_is_help=True, help="Forecasts of load.")


@app.command("train")
@slow
def train(
    traces: Annotated[list[Path], typer.Argument(help="CSVs of requests to train on, besides generated load.")],
    held_out: Annotated[
        list[Path] | None, typer.Option("--held-out", help="Traces that it will be tested on: refused among TRACES.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="ONNX file; the card is written to its folder.", callback=file_to_write)
    ] = Path("out/forecast/lstm.onnx"),
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn.")] = 23,
    python: Annotated[Path, typer.Option(help="Interpreter with torch: `make .venv-export/.ready`.")] = TORCH,
    as_json: AsJson = False,
) -> None:
    """Train a model for `lstm`. Use it with `--forecaster lstm --set parts.forecaster.model=FILE`."""
    from trefoil.forecasting.training import train as run_training

    card = run_training(traces, held_out or (), out, seed=seed, python=python)
    error = card["validation"]
    respond(
        as_json,
        dict(card),
        f"{out}: trained in {card['cpu_s']:.0f} s of one core; on {error['windows']} windows kept back its error is "
        f"{error['mae_ratio']:.1%} of the mean ({error['mae_ratio_of_last_minute']:.1%}: the last minute's maximum); "
        f"{error['under_share']:.0%} of its forecasts lie below what came",
    )


@app.command("backtest")
@slow
def backtest(
    trace: Annotated[Path, typer.Argument(help="Table of counts of requests, or of single ones.")],
    column: Column = "",
    time_column: TimeColumn = "",
    time_unit: TimeUnit = "",
    bin_s: BinS = 0.0,
    forecaster: Annotated[
        list[str] | None, typer.Option(help="Only these, or module:Class; default: all that need no simulation.")
    ] = None,
    every_s: Annotated[int, typer.Option(min=1, help="Seconds between two forecasts.")] = 10,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Make every forecast that would have been made on a trace, and score it against the minute that came.

    Counts per minute or hour are drawn as Poisson arrivals. `--set NAME=VALUE` sets what the forecaster has.
    """
    import numpy as np

    from controller.forecasters.table import FORECASTERS
    from controller.observe.forecast_model import open_network
    from trefoil.forecasting.backtest import backtest as run_backtest
    from trefoil.forecasting.training import counts_per_s
    from trefoil.simulator.scenario.request_columns import TraceOptions
    from trefoil.simulator.scenario.request_trace import read_trace

    read = read_trace(trace, TraceOptions(column, time_column, time_unit, bin_s), whole=True)
    typer.echo(str(read), err=as_json)
    counts = counts_per_s(read, np.random.default_rng(DRAW_SEED))
    scores = {}
    for name in forecaster or [name for name in FORECASTERS if name != "oracle"]:
        part = load_part(Kind.FORECASTER, name, FORECASTERS)
        made = part.made(settings=part.settings_of(parse_sets(sets)), open_network=open_network)
        scores[name] = run_backtest(made, counts, every_s)
    document = {"trace": str(trace), "every_s": every_s, "scores": {name: asdict(s) for name, s in scores.items()}}
    rows = [
        (
            name, f"{s.error_ratio:.1%}", f"{s.under_share:.0%}", f"{s.under_ratio:.1%}", f"{s.over_ratio:.1%}",
            f"{s.instead} of {s.forecasts}", f"{s.took_ms_median:.2f}", f"{s.took_ms_max:.2f}",
        )
        for name, s in scores.items()
    ]  # fmt: skip
    title = f"{trace.name}: {counts.size} s, mean {counts.mean():.1f}/s, largest {counts.max():.0f}/s"
    heads = ("forecaster", "error", "below", "by", "above", "made by last_max", "ms, median", "ms, most")
    respond(as_json, document, grid(title, heads, rows))
