"""One gloo device for all process groups of a rank.

Gloo gives every group a device of its own, and every device a thread that looks for work a hundred times a second.
Megatron makes about twenty groups, so 64 ranks on two cores spent more than half of their time waking up for nothing.
A device serves any number of groups.

Source:
    gloo/transport/tcp/loop.cc: `epoll_wait` with a timeout of 10 ms. torch 2.11, `ProcessGroupGloo::Options`.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo


def share_device() -> None:
    """Give every gloo group that this process makes from now on the same device. It starts a thread: fork before."""
    original = ProcessGroupGloo.__init__
    device = ProcessGroupGloo.create_default_device()

    @functools.wraps(original)
    def init(group: ProcessGroupGloo, *args: Any, timeout: timedelta | None = None, **kwargs: Any) -> None:
        if timeout is None:  # made with options of its own
            original(group, *args, **kwargs)
            return
        options = ProcessGroupGloo._Options()
        options._devices = [device]
        options._timeout = timeout
        original(group, *args, options, **kwargs)

    ProcessGroupGloo.__init__ = init
