"""Issued forecasts on disk: one file a UTC day of issue, one line a forecast, appended; old days are deleted.

A disk that fails costs what was issued meanwhile at the next start, and nothing now: the archive in memory continues.
"""

import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from carbon_feed.core.validation import forecast_fault
from carbon_feed.forecast.archive import ForecastArchive, forecast_of_line, line_of
from carbon_feed.forecast.incremental import Incremental
from trefoil.core.carbon import CarbonForecast, Series
from trefoil.runtime.keys import series_name
from trefoil.runtime.state_files import read_bytes

DAYS_KEPT: Final = 62  # FORECASTS_MAX hourly issues, and the day that is being written
LINES_BETWEEN_BREAKS: Final = 16
SUFFIX: Final = ".jsonl"


class ForecastFiles:
    """Files of one series' issued forecasts; only the zone's own process writes them."""

    def __init__(self, state_dir: Path, series: Series, days_kept: int = DAYS_KEPT) -> None:
        self.folder = state_dir / f"forecasts-{series_name(series).replace(':', '-')}"
        self._series, self._days_kept = series, days_kept

    def append(self, forecasts: Iterable[CarbonForecast]) -> None:
        """Append forecasts, each to the file of its day; when a day begins, delete the oldest.

        Raises:
            OSError: the disk refuses.
        """
        by_day: dict[str, list[str]] = {}
        for forecast in forecasts:
            by_day.setdefault(_day(forecast.issued_at_s), []).append(line_of(forecast))
        self.folder.mkdir(parents=True, exist_ok=True)
        for day, lines in by_day.items():
            path = self.folder / (day + SUFFIX)
            begun = path.exists()
            with path.open("ab+") as file:
                file.write(b"" if _ends_with_newline(path) else b"\n")  # a line torn by a crash spoils no other
                file.write("".join(line + "\n" for line in lines).encode())
            if not begun:
                for old in self._paths()[: -self._days_kept]:
                    old.unlink(missing_ok=True)

    def lines(self) -> list[str]:
        """Lines of all files that are kept, oldest day first.

        Raises:
            OSError: the disk refuses.
        """
        return [
            line
            for path in self._paths()
            for line in (read_bytes(path) or b"").decode(errors="replace").split("\n")
            if line
        ]

    def load_into(self, archive: ForecastArchive, lines: list[str], now_s: float) -> Incremental[int]:
        """Load lines into an archive; returns how many could not be read, or are of no forecast of this time."""
        unreadable = 0
        for i, line in enumerate(lines, 1):
            forecast = forecast_of_line(line, self._series)
            if forecast is None or forecast_fault(forecast, now_s):
                unreadable += 1
            else:
                archive.add(forecast)
            if i % LINES_BETWEEN_BREAKS == 0:
                yield
        return unreadable

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("*" + SUFFIX)) if self.folder.is_dir() else []


def _day(at_s: float) -> str:
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).strftime("%Y-%m-%d")


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, 2)
        if file.tell() == 0:
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"
