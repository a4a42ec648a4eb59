"""docs/cli.md and docs/rpc.md are what commands and .proto files say."""

from pathlib import Path

import pytest

from trefoil.cli import reference

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(("name", "made"), [("cli", reference.cli_markdown), ("rpc", reference.rpc_markdown)])
def test_a_page_is_current_and_leaves_no_row_unexplained(name, made):
    text = made()
    assert (DOCS / f"{name}.md").read_text() == text, f"run: python -m trefoil.cli.reference {name} > docs/{name}.md"
    assert [row for row in text.splitlines() if row.startswith("| ") and not row.split("|")[2].strip()] == []
