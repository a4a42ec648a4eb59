"""Tables in narrow terminals: whole words, whole borders, or a list of the rows."""

import io

import pytest
from rich.console import Console

from trefoil.tables import Grid

COLUMNS = ("device", "type", "state", "clock", "power", "slices", "")
ROWS = (
    ("node0/gpu0", "A100-SXM4-40GB", "awake", "1410 MHz", "232 of 300 W", "7g.40gb digits-l and 3 more", ""),
    ("node0/gpu1", "A100-SXM4-40GB", "asleep", "0 MHz", "0 W", "-", ""),
)


def printed(width: int) -> list[str]:
    grid, out = Grid(title="node0 [bold](SIMULATED)[/]", title_justify="left"), io.StringIO()
    for name in COLUMNS:
        grid.add_column(name)
    for row in ROWS:
        grid.add_row(*row)
    Console(file=out, width=width, force_terminal=True, color_system=None).print(grid)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", range(70, 121))
def test_a_table_that_has_room_is_whole(width):
    """Its borders too: a column is narrowed as far as its words allow, and not the widest one below them."""
    lines = printed(width)
    assert all(len(line) <= width for line in lines)
    table = [line.rstrip() for line in lines[1:]]
    assert {line[-1] for line in table} == set("┓┃┩│┘")
    assert {len(line) for line in table} == {len(table[0])}
    words = {word for line in table for word in line.replace("┃", " ").replace("│", " ").split()}
    assert words >= {word for row in (*ROWS, COLUMNS) for cell in row for word in cell.split()}


@pytest.mark.parametrize("width", [40, 60])
def test_without_room_it_is_a_list_of_its_rows(width):
    lines = printed(width)
    assert lines[0].startswith("node0 (SIMULATED)")
    assert [line for line in lines if line.startswith("device: ")] == ["device: node0/gpu0", "device: node0/gpu1"]
    assert all(len(line) <= width for line in lines)
