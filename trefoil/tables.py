"""Tables for people, also in a narrow terminal."""

from collections.abc import Iterator
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text


class Grid(Table):
    """Table of text that never cuts a word: where its longest words have no room beside each other, a list of its
    rows, a line for each cell."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        self.columns = [column for column in self.columns if column.header or any(column.cells)]
        texts = [[Text.from_markup(str(one)).plain for one in (c.header, *c.cells)] for c in self.columns]
        leasts = [max((cell_len(word) for text in column for word in text.split()), default=0) for column in texts]
        widths = [max((cell_len(line) for text in column for line in text.splitlines()), default=0) for column in texts]
        room = options.max_width - sum(self.padding[1::2]) * len(widths) - len(widths) - 1  # without padding and lines
        if sum(leasts) <= room:
            while sum(widths) > room:  # the column that has the most to give: rich narrows the widest one, and cuts it
                slack = [width - least for width, least in zip(widths, leasts, strict=True)]
                widths[slack.index(max(slack))] -= 1
            for column, width in zip(self.columns, widths, strict=True):
                column.width = width
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
