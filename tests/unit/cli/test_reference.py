"""docs/cli.md and docs/rpc.md are what commands and .proto files say."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.commands import commands
from trefoil.cli import reference
from trefoil.cli.main import app

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(("name", "made"), [("cli", reference.cli_markdown), ("rpc", reference.rpc_markdown)])
def test_a_page_is_current_and_leaves_no_row_unexplained(name, made):
    text = made()
    assert (DOCS / f"{name}.md").read_text() == text, f"run: python -m trefoil.cli.reference {name} > docs/{name}.md"
    assert [row for row in text.splitlines() if row.startswith("| ") and not row.split("|")[2].strip()] == []


def test_help_fits_80_columns_and_cuts_no_word():
    """Of every command and group; also no word after a hyphen, as in a path that is copied."""
    named = [path for path, _ in commands()]
    assert len(named) > 80
    for path in named:
        narrow, wide = (
            CliRunner().invoke(app, [*path.split(), "--help"], prog_name="trefoil", terminal_width=columns).stdout
            for columns in (80, 1000)
        )
        assert [line for line in narrow.splitlines() if len(line) > 80] == [], path
        assert set(narrow.split()) - set(wide.split()) == set(), path
