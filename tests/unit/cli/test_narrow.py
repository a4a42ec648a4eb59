"""Tables in a narrow terminal: no word is cut."""

from io import StringIO

import pytest
from rich.console import Console

from trefoil.cli.output import grid

WORDS = "family p95 (SLO) digits 12.0 ms (75 ms) node0/gpu0-3g.20gb-0 a-second-variant of them".split()  # noqa: SIM905


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_words_stay_whole(width):
    table = grid(
        "of them", ("family", "p95 (SLO)", ""), [("digits", "[red]12.0 ms[/] (75 ms)", "node0/gpu0-3g.20gb-0")] * 2
    )
    table.add_row("a-second-variant", "", "")
    table.caption = "of them"
    out = StringIO()
    Console(file=out, width=width, highlight=False).print(table)
    said = out.getvalue()
    assert set(WORDS) <= set(said.replace(":", " ").replace("│", " ").replace("┃", " ").split())
    assert max(map(len, said.splitlines())) <= max(width, len(max(WORDS, key=len)))
    assert ("family: digits" in said) == (width < 60)
