"""Settings that a run asks for against those that Megatron runs with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from verifier.checks.content import owner_of
from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.records_trainer import KnobsAsked, KnobsGiven, KnobsReached
from verifier.core.stage import Stage
from verifier.core.trace import Trace
from verifier.knob import flat


@check("CFG001", needs=(KnobsAsked, KnobsReached), scope="config")
def knob_not_applied(trace: Trace) -> Iterator[Comparison]:
    """Every knob of the config holds the value that was asked for in the live objects of every rank.

    What it checks: per rank and knob, the value that the config asks of a field of TransformerConfig, of the data
    parallel config, of OptimizerConfig, of Adam's groups of parameters or of the scheduler, against the value that
    these objects hold after the step: those of every layer and every group.
    Why it matters: a knob that is read and never applied trains another run than its config says. A balancing loss
    that is on by default changes the gradient's norm threefold.
    Evidence: load/asked, load/reached.
    Tolerance and its source: bitwise; settings are copied.
    What it does not catch: a field that holds the right value and that no code reads (the gradients' checks do).
    References: NeMo-RL#3523, Megatron-LM#5694, SkyRL#1335.
    """
    for asked in trace.of(KnobsAsked):
        for reached in trace.of(KnobsReached, version=asked.version):
            for knob, expected in asked.values.items():
                actual = reached.values.get(knob, "absent")
                yield Comparison(
                    what=f"{knob} on rank {reached.rank}", same=actual == expected, stage=Stage.LOAD,
                    version=reached.version, badness=1.0, owner=owner_of(reached),
                    sentence=f"the config asks for {knob} = {expected}, Megatron runs with {actual}",
                    expected=f"{expected} (the config)", actual=f"{actual} (the rank's live objects)",
                    allowed="bitwise (settings are copied)",
                    hint="look at where the knob is handed on, and at what sets the field after it",
                )  # fmt: skip


@check("CFG002", needs=(KnobsGiven,), scope="given")
def given_knob_lost(trace: Trace) -> Iterator[Comparison]:
    """The config that a run trains by has every value that its command line and its YAML file gave.

    What it checks: on the first judged step of a process that was started as `verifier train`, per key that a word
    `key=value`, an option or the file gave, the value by a second reader against the config in the step's manifest. A
    word or an option goes before the file. Of a run with `first` the same of both runs, and that the second one trains
    the model that the first one left. The same of config.yaml, which the run keeps in its folder.
    Why it matters: all other checks compare with the config. An override that is lost while it is read trains another
    run, and everything agrees with it. A second stage that begins with the base model in the place of the first one's
    loses what was trained, and no step of it is wrong. Whoever repeats a run by a config.yaml that lost an override
    trains another one.
    Evidence: load/given, the manifest's config.
    Tolerance and its source: exact; numbers by value, lists by their parts, paths without dots and slashes that mean
    nothing.
    What it does not catch: values that name other keys, `${...}`; switches such as `--verify`, and lists that options
    give; null where the config computes a value; words of `--replay` or `--preflight`, of trials of a sweep, and of
    runs that another program starts; a config.yaml that is not there; a default that is wrong; weights in the folder
    that the first run left (WGT019, WGT001).
    References: sleap-nn#301, OLMo#865, databricks/cli#6611.
    """
    config = flat(trace.manifest.config)
    for given in trace.of(KnobsGiven):
        asked = given.name == "command"
        for key, text in {**given.values, **(_with_first(given.values, config) if asked else {})}.items():
            expected, actual = _plain(text), _plain(config.get(key, "absent"))
            said = "was asked for" if asked else f"is in {given.name}"
            yield Comparison(
                what=key if asked else f"{key} in {given.name}", same=actual == expected, stage=Stage.LOAD,
                version=given.version, badness=1.0,
                sentence=f"{key} = {expected} {said}, and the run has {actual}",
                expected=f"{expected} ({'the command line and its file' if asked else 'what the run keeps'})",
                actual=f"{actual} (the run's config)", allowed="exact",
                hint="look at what merges defaults, file and overrides",
            )  # fmt: skip


def _with_first(given: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, str]:
    """Keys of a run that begins with another one's weights, which has been trained when this one begins."""
    if given.get("first", "null") == "null":
        return {}
    return {"first": "null", "model": f"{config.get('run')}/first/hf_model"}


def _plain(value: Any) -> str:
    """A value as text that is equal for equal values."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return json.dumps([str(item) for item in value])
    try:
        return repr(float(value)).removesuffix(".0")
    except (ValueError, OverflowError):
        parts = [part for part in str(value).split("/") if part not in ("", ".")]
        return "/" * str(value).startswith("/") + "/".join(parts)
