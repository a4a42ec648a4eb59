"""docs/settings.md is what the settings classes and their comments say."""

import re
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
        ("nodes.N", "Nodes that are alike"),  # a class that stands in a field
        ("parts.router.quantile", "Of recent times"),  # a part's
    ],
)
def test_a_key_has_its_meaning_wherever_that_is_written(key, meaning):
    rows = [line for line in settings_page.markdown().splitlines() if re.match(rf"(- |\*\*)`{re.escape(key)}`", line)]
    assert any(meaning in row for row in rows)


def test_every_key_says_what_it_means():
    keys = [line for line in settings_page.markdown().splitlines() if line.startswith(("- `", "**`"))]
    assert len(keys) > 300
    assert [key for key in keys if key.endswith(": ")] == []


def test_a_key_shows_its_default_its_bounds_and_its_choice_the_default_first():
    lines = settings_page.markdown().splitlines()
    assert "- `web.gap_s` (`0.5`, ≤60): Between two" in "\n".join(lines)
    assert any(line.startswith('- `factors` (`"lifecycle"`, `"direct"`): ') for line in lines)
    assert any(line.startswith('- `tenant.N.roles` (`["infer"]` of `infer`, `admin`, `jobs`): ') for line in lines)
    assert any(line.startswith("- `token`, `token_file` (secret): ") for line in lines)
    assert any(line.startswith("- `costs.interference` (`0.077` or none): ") for line in lines)
    assert any(line.startswith("- `objectives.N.slo.latency_ms` (required number, >0): ") for line in lines)
