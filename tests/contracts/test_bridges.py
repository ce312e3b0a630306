"""megatron-bridge registers the bridges that its source names, and losses of routers that it asks for are off."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_bridges_are_those_that_its_source_registers(trainer_launcher, tmp_path):
    function = "bridge_functions:bridges_are_those_that_its_source_registers"
    trainer_launcher.run(function, world_size=1, run_dir=tmp_path)


@pytest.mark.slow
def test_no_loss_but_the_policys_is_left_on(trainer_launcher, tmp_path):
    function = "bridge_functions:no_loss_but_the_policys_is_left_on"
    trainer_launcher.run(function, world_size=1, run_dir=tmp_path)
