"""Verification cards: what a gate found out about one model, small enough to lie beside its checkpoint."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from verifier import __version__
from verifier.campaign.gate.decision import EXIT_CODES, decided
from verifier.config import GateConfig
from verifier.config.commands import DTYPES, folder_name
from verifier.core.finding import ExitCode
from verifier.core.outputs import json_text, read_as, write_whole
from verifier.errors import UsageError
from verifier.mesh import Mesh
from verifier.mesh.mesh import axes_of
from verifier.model.named import sizes_alone
from verifier.oracle.noise_floor import config_digest
from verifier.platform import select
from verifier.platform.provenance import gpu_names, installed_versions
from verifier.report.gate_result import CellResult, GateEnd, GateResult

CARDS = "cards"
"""Folder of the cards in a gate's folder."""


class KnownWrong(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An upstream bug that was found, or the violations of one check, or what ended a run."""

    bug: str
    """Bugs with their issues, and the option of their fixes; empty where none is known to explain it."""
    checks: tuple[str, ...]
    """Codes of what it violates; none where the run died."""
    sentence: str
    """The first thing that was found of it."""
    waived: bool
    runs: tuple[str, ...]


class Card(GateEnd, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of a gate for one model; the decision is on its runs and on the injected faults."""

    model: str
    family: str
    config: str
    """Digest of config.json's content."""
    command: str
    meshes: tuple[str, ...]
    dtypes: tuple[str, ...]
    engines: tuple[str, ...]
    """Axes of runs that were made: meshes and dtypes of the trainer, engines with their options."""
    runs: dict[str, str]
    """Run -> verdict."""
    holds: dict[str, int]
    """Check that holds wherever it was judged -> number of things that it compared."""
    wrong: tuple[KnownWrong, ...]
    not_judged: tuple[str, ...]
    """Clauses on what the matrix left out, and on what no check could judge."""


def write_cards(result: GateResult, folder: Path) -> None:
    """Write a card of each model of a gate, under `cards` in its folder.

    Raises:
        UsageError: one cannot be written.
    """
    for model in result.models:
        file = folder / CARDS / f"{folder_name(model)}.json"
        file.parent.mkdir(exist_ok=True)
        write_whole(file, json_text(card_of(result, model)))


def card_of(result: GateResult, model: str) -> Card:
    """The card of one model of a gate. Runs of injected faults are of the machine, so every card has them."""
    own = [item for item in result.cells if item.cell.kind != "faults" and item.cell.model == model]
    cells = [*own, *(item for item in result.cells if item.cell.kind == "faults")]
    made = [item.cell for item in own if item.status != "not run"]
    family = next((item.cell.family for item in own), "")
    waivers = [item for item in result.waivers if model == item.model or (item.family and item.family == family)]
    decision, reasons, _ = decided(cells, waivers, [model])
    doubts = [found.sentence for item in own for found in item.findings if not found.violated]
    left_out = [item for item in result.left_out if f" {model} " in f" {item.what.replace(',', ' ')} "]
    gate = {name: getattr(result, name) for name in GateEnd.__struct_fields__}
    return Card(
        **gate | {"decision": decision, "reasons": tuple(reasons), "waivers": tuple(waivers)},
        model=model, family=family, config=_config(model), command=shlex.join(["verifier", *sys.argv[1:]]),
        meshes=_once(cell.mesh for cell in made), dtypes=_once(cell.dtype for cell in made),
        engines=_once(cell.engine for cell in made if cell.engine),
        runs={item.cell.id: item.verdict for item in cells}, holds=_holds(own), wrong=tuple(_wrong(cells)),
        not_judged=_once([*(f"{item.what}: {item.reason}" for item in left_out),
                          *(clause for item in own for clause in item.not_judged), *doubts]),
    )  # fmt: skip


def _config(model: str) -> str:
    return config_digest(sizes_alone(model, "bfloat16"))


def _once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _holds(cells: Sequence[CellResult]) -> dict[str, int]:
    checks = [check for item in cells for check in item.checks]
    codes = {check.code for check in checks} - {check.code for check in checks if check.verdict != "holds"}
    return {code: sum(check.num_compared for check in checks if check.code == code) for code in sorted(codes)}


def _wrong(cells: Sequence[CellResult]) -> Iterator[KnownWrong]:
    found: dict[tuple[str, bool], list[tuple[str, str, str, str]]] = {}
    for item in cells:
        for bad in item.findings:
            if bad.violated:
                said = (bad.known_bug, bad.check, bad.sentence, item.cell.id)
                found.setdefault((bad.known_bug or bad.check, bad.waived_by is not None), []).append(said)
        if item.status == "failed" or (item.status == "violated" and not item.findings):
            said = ("", "", item.reason.partition("\n")[0], item.cell.id)
            found.setdefault((item.reason, False), []).append(said)
    for (_, covered), rows in found.items():
        bugs, checks, sentences, runs = map(_once, zip(*rows, strict=True))
        yield KnownWrong(
            bug=bugs[0], checks=tuple(filter(None, checks)), sentence=sentences[0], waived=covered, runs=runs
        )


def check_card(file: Path, config: GateConfig) -> tuple[ExitCode, str]:
    """Say whether a card speaks for a model in this environment, and for the axes and fixes that the config names.

    Raises:
        UsageError: the file is no card, or one of another model.
    """
    card = read_as(file, Card, "a card that `verifier gate` writes")
    if len(config.models) != 1:
        raise UsageError("--check-card takes one model: give one --model")
    (model,) = config.models
    if _config(model) != card.config:
        raise UsageError(f"`{file}` is the card of another model: config.json of {card.model} is not that of {model}")
    day = card.ended[:10]
    if not day:
        return ExitCode.VIOLATED, f"FAIL: the gate that began at {card.began} was broken off"
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    late = [f"the waiver of {item.check} ended on {item.until}" for item in card.waivers
            if item.num_waived and item.until < today]  # fmt: skip
    if late or card.decision == "FAIL":
        return ExitCode.VIOLATED, f"FAIL on {day}: {(*late, *card.reasons)[0]}"
    if doubts := [*_differing(card, config), *card.reasons]:
        return ExitCode.INCONCLUSIVE, f"INCONCLUSIVE: {'; '.join(doubts)}"
    return EXIT_CODES[card.decision], f"{card.decision} on {day}: {card.model}, with the versions that are here"


def _differing(card: Card, config: GateConfig) -> Iterator[str]:
    """Clauses on what the card does not speak for."""
    tier, here = select(), {"verifier": __version__, **installed_versions()}
    then = {"verifier": card.verifier, **card.versions}
    for name in sorted(then.keys() | here.keys()):
        if then.get(name) != here.get(name):
            yield f"the card has {name} {then.get(name, 'absent')}, here it is {here.get(name, 'absent')}"
    machines = [", ".join([tier, *sorted({*gpus})]) for tier, gpus in ((card.tier, card.gpus), (tier, gpu_names(tier)))]
    if machines[0] != machines[1]:
        yield f"the card is of {machines[0]}, this is {machines[1]}"
    if sorted(card.fixes) != sorted(config.fixes):
        yield f"the card has fixes {', '.join(card.fixes) or 'none'}, asked for are {', '.join(config.fixes) or 'none'}"
    asked = {
        "mesh": ([Mesh.fitting(**axes_of(text)).label() for text in config.meshes], card.meshes),
        "dtype": ([DTYPES[name] for name in config.dtypes], card.dtypes),
        "engine": (config.engines, card.engines),
    }
    for axis, (wanted, has) in asked.items():
        if missing := [value for value in wanted if value not in has]:
            yield f"the card has no run of {axis} {', '.join(missing)}"
