"""Answers of carbon providers with rows that have no value. Input: provider, places of the rows, what stands there, and
which of reading, forecast and past is asked for. Expected: points that are used, or the cause of the refusal."""

from tests.public_reports.report import Report


def row(
    source: str, provider: str, use: str, rows: range | list[int], expected: object, value: object = None
) -> Report:
    return Report("provider", source, (provider, use, list(rows), value), expected)


ROWS = (
    row("NESO: one null of its forecast", "neso", "forecast", [40], 96),
    row("NESO: the last rows are null", "neso", "forecast", [95, 96], 95),
    row("NESO: a tenth is null", "neso", "forecast", range(20, 29), 88),
    row("NESO: a third is null", "neso", "forecast", range(20, 52), "null"),
    row("NESO: one null of its past", "neso", "past", [3], 96),
    row("NESO: most of its past is null", "neso", "past", range(1, 97), 1),
    row("NESO: a later row is null", "neso", "reading", [5], 266.0),
    row("NESO: what holds now is null", "neso", "reading", [0], "null"),
    row("NESO: all rows are null", "neso", "reading", range(97), "null"),
    row("Electricity Maps: one null of its forecast", "electricity_maps", "forecast", [10], 72),
    row("Electricity Maps: one null of its past", "electricity_maps", "past", [10], 72),
    row("WattTime: one null of its forecast", "watttime", "forecast", [100], 288),
    row("WattTime: one null of its past", "watttime", "past", [100], 288),
    row("WattTime: what holds now is null", "watttime", "reading", [0], "null"),
    row("WattTime: a text for a number", "watttime", "forecast", [100], 288, "n/a"),
    row("WattTime: negative marginal intensities", "watttime", "reading", range(289), -226.796185, -500),
    row("NESO: negative averages", "neso", "reading", range(97), "negative", -5),
)
