"""Plot of a sweep: an HTML page that holds everything it needs, the library that draws it too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verifier.campaign.sweep.rows import SweepRow

_SYMBOLS = {"ok": "circle", "out_of_memory": "x", "failed": "triangle-up"}
"""Status -> mark of its rows."""


def page(title: str, rows: Sequence[SweepRow]) -> str:
    """Return the page: tokens a second and peak of memory against the budget, a line per layout.

    What did not run has a mark without a speed, and the peak that was seen before its end.
    """
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06)
    for number, layout in enumerate(dict.fromkeys(row.layout for row in rows)):
        own = sorted((row for row in rows if row.layout == layout), key=lambda row: row.max_tokens)
        shared: dict[str, Any] = {
            "x": [row.max_tokens for row in own], "mode": "lines+markers", "name": layout, "legendgroup": layout,
            "text": [row.reason or row.status for row in own], "marker_symbol": [_SYMBOLS[row.status] for row in own],
            "line_color": f"hsl({number * 137 % 360}, 65%, 42%)", "marker_size": 8,
        }  # fmt: skip
        speeds = [row.tokens_per_s or 0.0 for row in own]
        peaks = [None if row.peak_bytes is None else row.peak_bytes / 2**30 for row in own]
        figure.add_trace(Scatter(y=speeds, **shared), row=1, col=1)
        figure.add_trace(Scatter(y=peaks, showlegend=False, **shared), row=2, col=1)
    figure.update_xaxes(type="log", title="tokens of a micro-batch", row=2, col=1)
    figure.update_xaxes(type="log", row=1, col=1)
    figure.update_yaxes(title="tokens/s, 0: did not run", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="peak of a rank, GiB", rangemode="tozero", row=2, col=1)
    figure.update_layout(title=title, template="plotly_white", height=900)
    text: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return text
