"""docs/config.md is what the configs say."""

from tests.meta.config_reference import page
from tests.meta.sources import ROOT
from verifier.cli.app import app
from verifier.config import CONFIGS


def test_the_page_is_current():
    text = (ROOT / "docs" / "config.md").read_text()
    assert text == page(), "run `python -m tests.meta.config_reference > docs/config.md`"


def test_every_command_that_takes_a_config_is_on_it():
    taking = [item.callback.__name__ for item in app.registered_commands if hasattr(item.callback, "knobs")]
    assert taking == list(CONFIGS)
