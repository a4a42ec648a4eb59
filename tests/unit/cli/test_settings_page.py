"""docs/settings.md is what the settings classes and their comments say."""

from pathlib import Path

import pytest

from trefoil.cli import settings_page

ROOT = Path(__file__).parents[3]


def test_settings_page_is_current():
    page = ROOT / "docs" / "settings.md"
    assert page.read_text() == settings_page.markdown(), "run: python -m trefoil.cli.settings_page > docs/settings.md"


@pytest.mark.parametrize(
    ("key", "meaning"),
    [
        ("web.timeout_s", "Of one whole exchange"),  # a docstring below the field
        ("window_s", "of type budget"),  # a comment behind it
        (
            "family.profile_override",
            "A profile.csv that stands for the family's own, e.g. one of equal joules",
        ),  # above
        ("nodes", "Nodes that are alike"),  # a class that stands in a field
        ("parts.router.quantile", "Of recent times"),  # a part's
    ],
)
def test_a_key_has_its_meaning_wherever_that_is_written(key, meaning):
    rows = [line for line in settings_page.markdown().splitlines() if line.startswith(f"| `{key}` |")]
    assert any(meaning in row for row in rows)


def test_every_key_says_what_it_means():
    keys = [line for line in settings_page.markdown().splitlines() if line.startswith("| `") and line.count(" | ") > 2]
    assert len(keys) > 300
    assert [key for key in keys if key.endswith("|  |")] == []
