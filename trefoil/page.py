"""Pages of results: one HTML file that loads nothing, of cards with lines, a table or a figure."""

import io
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jinja2

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATES: Final = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Card:
    """Card of a page. `missed`: rows of its table that missed what was asked for; `figure` is an SVG; `alert`: the card
    says what was missed.
    """

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    lines: Sequence[str] = ()
    figure: str = ""
    missed: Container[int] = ()
    alert: bool = False


def page(title: str, subtitle: str, simulated: str, cards: Sequence[Card], about: Mapping[str, Any]) -> str:
    """HTML of a page. `simulated`: what of it is simulated, "" for nothing; `about`: where the numbers come from."""
    values = {"title": title, "subtitle": subtitle, "simulated": simulated, "cards": cards, "about": about}
    return render("page.html.j2", **values)


def render(template: str, **values: Any) -> str:
    """Text of a template."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(TEMPLATES)
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)


def svg_of(figure: "Figure", **options: Any) -> str:
    """A matplotlib figure as SVG to stand in a page; the same figure gives the same bytes."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None}, **options)
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]
