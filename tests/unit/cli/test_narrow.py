"""Tables in a narrow terminal: no word is cut."""

from io import StringIO

import pytest
from rich.console import Console

from trefoil.cli.output import grid, respond

WORDS = "family p95 (SLO) digits 12.0 ms (75 ms) node0/gpu0-3g.20gb-0 a-second-variant of them".split()  # noqa: SIM905


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_words_stay_whole(width):
    table = grid(
        "of them",
        ("family", "p95 (SLO)", ""),
        [("digits", "[red]12.0 ms[/] (75 ms)", "node0/gpu0-3g.20gb-0")] * 2,
        markup=True,
    )
    table.add_row("a-second-variant", "", "")
    table.caption = "of them"
    out = StringIO()
    Console(file=out, width=width, highlight=False).print(table)
    said = out.getvalue()
    assert set(WORDS) <= set(said.replace(":", " ").replace("│", " ").replace("┃", " ").split())
    assert max(map(len, said.splitlines())) <= max(width, len(max(WORDS, key=len)))
    assert ("family: digits" in said) == (width < 60)


@pytest.mark.parametrize(
    "text", ["[/x] is the operator's own", "in [power_agent] of the file", "[red]", "[[families]]"]
)
def test_texts_of_others_are_shown_as_they_are(capsys, text):
    """Reasons, names and paths may hold what rich would take for its markup, which it hides, or fails at."""
    respond(False, {}, text, grid(text, ("why",), [(text,)]))
    assert capsys.readouterr().out.count(text) == 3


def test_a_text_is_one_line_however_long(capsys):
    respond(False, {}, "word " * 100 + "end")
    assert capsys.readouterr().out.splitlines() == ["word " * 100 + "end"]
