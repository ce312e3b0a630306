"""Bugs that test_slime.py plants in slime, and a script that runs the loop with each.

`python slime_bugs.py CHECKPOINT FOLDER SETTINGS NAME...` leaves FOLDER/NAME for each, SETTINGS in JSON by name.
"""

from __future__ import annotations

import sys

from slime_loop import train

from tests.dist.recorded_loops import Plant, run_planted

BUGS: dict[str, Plant] = {}

if __name__ == "__main__":
    run_planted(train, BUGS, *sys.argv[1:])
