"""Notes on a model before its ranks start: what its config.json and its tensors become in megatron-bridge."""

from __future__ import annotations

from verifier.core.outputs import work_folder
from verifier.core.stage import Stage, in_stage
from verifier.errors import UsageError, VerifierError
from verifier.launch.fork_launcher import Launcher
from verifier.model.families import copies_of, missed_row, predicts_further
from verifier.runs.model_under_test import ModelUnderTest
from verifier.runs.resources import Deadline


def notes_of(model: ModelUnderTest, launcher: Launcher, until: Deadline) -> tuple[str, ...]:
    """Sentences that no check judges, of a process that has imported Megatron; it builds no model.

    A bridge that fails on the config is one of them: the run's ranks fail by the same code, and that is on record.

    Raises:
        InternalError: no time is left.
        UsageError: the output layer of the trainer has no mapping, at which megatron-bridge's load would end.
    """
    config, row = model.checkpoint.config, missed_row(model.checkpoint.config)
    copies = copies_of(config)
    own: tuple[str, ...] = (row,) if row else ()
    if further := sum(predicts_further(name, config) for name in model.checkpoint.names() if name not in copies):
        own += (f"{further:,} tensors of layers that predict further tokens (MTP) are exported and not served",)
    deadline_s = until.left("config.json was read")
    try:
        with work_folder("notes") as work, in_stage(Stage.LOAD):
            (found,) = launcher.run(
                "verifier.model.bridge_reading_megatron:run", world_size=1, run_dir=work,
                args={
                    "checkpoint": str(model.checkpoint.path),
                    "tensors": [name for name in model.checkpoint.names() if name not in copies],
                },
                deadline_s=deadline_s,
            )  # fmt: skip
    except VerifierError as problem:
        reason = str(problem).partition("\n")[0]
        return (*own, f"what megatron-bridge makes of config.json was not looked at: {reason}")
    if found["headless"]:
        raise UsageError(
            f"{found['notes'][0]}; the trainer's output layer has none either, and the load would end in an "
            "AttributeError"
        )
    return (*own, *found["notes"])
