"""The page in a real browser: nothing is asked of a network, nothing complains, and a phone shows all of it."""

import re

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.browser import browser, require_quiet
from tests.snapshots.check_traces import BROKEN
from tests.unit.campaign.test_gate_data import made
from tests.unit.report.pages import hostile, metrics
from tests.unit.report.test_live_and_replayed import stored
from verifier.report.pages import page_of, page_of_gate
from verifier.report.render_html import html

pytestmark = pytest.mark.slow
PHONE = 390
OPEN = "[...document.querySelectorAll('details')].map(item => { item.open = true }).length"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
OUTSIDE = """[...document.querySelectorAll('body *')].filter(item => !item.closest('.wide'))
    .filter(item => item.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
    .map(item => item.tagName + ' ' + item.textContent.slice(0, 60))"""


@pytest.fixture(scope="module")
def tab():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    run = folder / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(metrics(60))
    stored(run / "steps" / "000060", BROKEN["LSS001"])
    stored(folder / "trace", BROKEN["LGP001"])
    pages = {
        "gate": page_of_gate(made()), "hostile": page_of_gate(hostile()), "run": page_of(run),
        "trace": page_of(folder / "trace"),
    }  # fmt: skip
    for name, page in pages.items():
        (folder / f"{name}.html").write_text(html(page))
    return {name: (folder / f"{name}.html", page) for name, page in pages.items()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, 1200])
@pytest.mark.parametrize("name", ["gate", "hostile", "run", "trace"])
def test_a_page_is_whole_by_itself(name, width, scheme, tab, files):
    file, page = files[name]
    tab.open(file, width=width, height=844, scheme=scheme)
    first = tab.value("document.body.innerText.trim().split('\\n')[0]")
    assert first == page.decision.upper()
    head = tab.value("JSON.parse(JSON.stringify(document.querySelector('h1').getBoundingClientRect()))")
    assert 0 <= head["top"] < 100
    assert 20 < head["height"] < 100  # fonts are there, so that widths mean something
    assert tab.value("document.documentElement.clientWidth") == width
    assert tab.value(OVERFLOW) == 0
    assert tab.value(OPEN) >= 3
    assert tab.value(OVERFLOW) == 0
    assert tab.value(OUTSIDE) == []
    require_quiet(tab, file)


@pytest.mark.parametrize("name", ["gate", "trace"])
def test_both_schemes_can_be_read(name, tab, files):
    """Contrast of text against its ground, by the formula of WCAG 2: 4.5 for text."""
    grounds = []
    for scheme in ("light", "dark"):
        tab.open(files[name][0], scheme=scheme)
        ground = tab.value("getComputedStyle(document.documentElement).backgroundColor")
        raised = tab.value("getComputedStyle(document.querySelector('header')).backgroundColor")
        colours = tab.value(
            "[...document.querySelectorAll('h1, h2, p, small, .badge, dt, dd, text')]"
            ".map(item => getComputedStyle(item)[item.tagName == 'text' ? 'fill' : 'color'])"
        )
        assert len(colours) > 20
        worst = min(contrast(colour, under) for colour in set(colours) for under in (ground, raised))
        assert worst >= 4.5
        grounds.append(luminance(ground))
    assert grounds[0] > 0.8
    assert grounds[1] < 0.1


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(left: str, right: str) -> float:
    low, high = sorted((luminance(left), luminance(right)))
    return (high + 0.05) / (low + 0.05)


def test_the_browser_would_tell(tab, tmp_path):
    """A page that asks for an image, complains, and is too wide for a phone is seen to do so."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<meta name=viewport content='width=device-width'><div style='width:900px'>x</div><img src='none.png'>"
        "<script>console.error('no')</script>"
    )
    tab.open(page, width=PHONE)
    assert tab.value(OVERFLOW) > 0
    assert tab.value(OUTSIDE) != []
    assert len(tab.params("Network.requestWillBeSent")) == 2
    assert tab.params("Runtime.consoleAPICalled") != []
