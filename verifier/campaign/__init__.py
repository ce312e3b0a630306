"""Commands that make many runs: the gate, the sweep, rounds of `--watch`, an upgrade."""
