"""Records, probes, checks and faults of each stage, in a folder of its name (`verifier.core.stage.Stage`)."""
