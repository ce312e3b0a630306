"""When processes that runs share end."""

from __future__ import annotations

import pytest

from verifier.engine.api import EngineConfig
from verifier.runs import resources as module
from verifier.runs.resources import Deadline, Resources

CONFIG = EngineConfig(kind="vllm", checkpoint="some", dtype="float32")


class _Server:
    """A fork server that only ends."""

    def __init__(self):
        self.ended = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.ended = True


@pytest.fixture
def server(monkeypatch):
    started = _Server()
    monkeypatch.setattr(module, "engine_fork_server", lambda *_: started)
    monkeypatch.setattr(module, "EngineProcess", lambda *_, **__: None)
    return started


@pytest.mark.parametrize(("warm", "ends"), [(False, True), (True, False)])
def test_what_cold_engines_are_forked_from_ends_with_the_last(server, warm, ends):
    with Resources(warm=warm) as resources:
        resources._process(CONFIG, Deadline(60), "the engine")
        resources.end_engine_starts()
        assert server.ended is ends
    assert server.ended


def test_what_was_given_to_fork_engines_from_goes_on(server):
    given = _Server()
    with Resources(engines=given) as resources:
        resources._process(CONFIG, Deadline(60), "the engine")
        resources.end_engine_starts()
    assert not given.ended
