"""Tables for people, also in a narrow terminal."""

from collections.abc import Iterator
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

UNLIMITED: Final = 10_000


class Grid(Table):
    """Table of text that never cuts a word: where its longest words have no room beside each other, a list of its
    rows, a line for each cell."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        for column in self.columns:
            texts = (column.header, *column.cells)
            words = [word for text in texts for word in Text.from_markup(str(text)).plain.split()]
            column.min_width = max(map(cell_len, words), default=0)
        if self.__rich_measure__(console, options.update(max_width=UNLIMITED)).minimum <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text.from_markup(str(self.title), style="table.title")
        columns = [(str(column.header), list(column.cells)) for column in self.columns]
        for at, row in enumerate(self.rows):
            for name, cells in columns:
                if cells[at]:
                    yield Text.from_markup(f"{name}: {cells[at]}" if name else str(cells[at]), style=row.style or "")
            yield ""
        if self.caption:
            yield Text.from_markup(str(self.caption), style="table.caption")
