"""Knobs of Ray that contradict each other, or cannot be meant."""

from __future__ import annotations

from typing import Any

import pytest

from verifier.config.cluster import RayOptions
from verifier.errors import UsageError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"address": "h:6379"}, r"ray\.address and ray\.nodes need ray\.use=true"),
        ({"use": True, "nodes": 2}, r"ray\.nodes is 2, and a local Ray has one node"),
        ({"use": True, "address": "h"}, r"ray\.address is `h`, it must be `local` or HOST:PORT"),
        ({"use": True, "address": "h:65536"}, r"must be `local` or HOST:PORT"),
        ({"use": True, "address": "h:1", "nodes": 0}, r"nodes is 0, it must be at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        RayOptions(**given)


def test_a_cluster_of_several_nodes_may_be_asked_for() -> None:
    assert RayOptions(use=True, address="[::1]:6379", nodes=3).nodes == 3
