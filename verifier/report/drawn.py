"""A page as HTML that holds all it needs: no request, no script; light and dark as the reader's system asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verifier.core.outputs import printable
from verifier.report.charts import svg
from verifier.report.view import Page

TEMPLATES = Path(__file__).parent / "templates"


def html(page: Page) -> str:
    """The whole document. Every value is escaped, control characters too."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        if isinstance(value, str) and not isinstance(value, Markup):
            return "\n".join(map(printable, value.split("\n")))
        return value

    def drawing(chart: Any) -> Markup:
        return Markup(svg(chart))  # noqa: S704  (ElementTree has escaped every text in it)

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, finalize=shown,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["svg"] = drawing
    style = Markup((TEMPLATES / "page.css").read_text(encoding="utf-8"))  # noqa: S704  (a file of this package)
    text: str = environment.get_template("page.html.jinja").render(page=page, style=style)
    return text
