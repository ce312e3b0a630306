"""Second readings of tokens are by the checkpoint's files, wherever the trainer's tokenizer is from.

What this does not exercise: live rollouts (`tokenizer-of-another-revision`, tests/faults).
"""

import json
import shutil

import pytest
from msgspec import structs

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.data.encode import encode_example
from verifier.data.examples import Example, Message
from verifier.data.tokenizer import chat_template_of, open_tokenizer
from verifier.model.tiny import write_tiny
from verifier.stages.data.probe_rollouts import record_tokens

TALK = Example(
    id="talk", messages=(Message(role="user", content="37+85="), Message(role="assistant", content="#### 122"))
)


class Kept:
    """A probe that keeps what it was given."""

    def emit(self, record, arrays):
        self.record, self.arrays = structs.replace(record, array="tokens"), arrays


@pytest.mark.parametrize(("before", "verdict"), [("", Verdict.HOLDS), ("+", Verdict.VIOLATED)])
def test_a_tokenizer_of_another_folder_is_compared_with_the_checkpoints(before, verdict, tmp_path):
    checkpoint, other = write_tiny("add", tmp_path / "models"), tmp_path / "other"
    shutil.copytree(checkpoint, other)
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings["chat_template"] = before + settings["chat_template"]
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer, probe = open_tokenizer(other), Kept()
    rollouts = [encode_example(TALK, tokenizer)]
    record_tokens(probe, 1, tokenizer, checkpoint, rollouts, lambda place: TALK, whole=True)
    trace = Trace(Manifest(), [probe.record], lambda item: probe.arrays)
    assert run_check(REGISTRY["DAT013"], trace).verdict is verdict


@pytest.mark.parametrize("forgotten", ["nothing", "the arguments", "the file"])
def test_a_template_that_the_trainer_does_not_use_as_asked_is_violated(forgotten, tmp_path):
    checkpoint = write_tiny("add", tmp_path / "models")
    (tmp_path / "own.jinja").write_text(
        "{{ '+' if plus }}{% for m in messages %}{{ '<' + m.role + '>' + m.content }}"
        "{{ eos_token if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    asked = chat_template_of(tmp_path / "own.jinja", ["plus=true"])
    used = {
        "nothing": asked, "the arguments": chat_template_of(tmp_path / "own.jinja", ()),
        "the file": chat_template_of(None, ["plus=true"]),
    }[forgotten]  # fmt: skip
    tokenizer, probe = open_tokenizer(checkpoint, used), Kept()
    rollouts = [encode_example(TALK, tokenizer)]
    record_tokens(probe, 1, tokenizer, checkpoint, rollouts, lambda place: TALK, whole=True, chat=asked)
    trace = Trace(Manifest(), [probe.record], lambda item: probe.arrays)
    assert run_check(REGISTRY["DAT013"], trace).verdict is (
        Verdict.HOLDS if forgotten == "nothing" else Verdict.VIOLATED
    )
