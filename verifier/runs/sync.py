"""Trainer rank 0's conversation with the engine, and the evidence of both sides of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verifier.core.record import Probe
from verifier.core.records_engine import Handover
from verifier.core.records_weights import PlanDigest
from verifier.core.store import Recorder
from verifier.engine import sender as update
from verifier.engine.api import Sample, Sampling, Shape
from verifier.engine.client import EngineClient
from verifier.errors import ContractError
from verifier.plan.chunk_plan import ChunkPlan
from verifier.probes.engine import (
    held_by,
    record_drawn,
    record_poison,
    record_receipt,
    record_sampled,
    record_scored,
    record_views,
)
from verifier.runs.spec import RunSpec
from verifier.transport.buffer import unpack

if TYPE_CHECKING:
    from verifier.transport.cuda_ipc import TrainerRounds
    from verifier.transport.group import TransferGroup

SAMPLING_TEMPERATURE = 2.0
"""Temperature of one more set of samples at version 0: at 1, a temperature that nobody applies does not show, nor
log-probabilities of the logits before it."""
GREEDY = 0.0
"""A temperature at which the likeliest token is taken."""
SAMPLED_TOKENS = 4
"""Tokens sampled from each prompt."""
NEXT = "next turn"
NEXT_TURN = 3
"""Tokens that a conversation's next turn adds to its first and the answer to that."""
ANSWERS = 2
"""Samples of one request for that turn."""
SIDE_BY_SIDE = ((SAMPLING_TEMPERATURE, 2), (GREEDY, SAMPLED_TOKENS), (1.5, SAMPLED_TOKENS))
"""Temperature and number of tokens of one sample from each prompt."""
LIKELY = 8.0
"""Nats that make a token of a few hundred or thousand likely."""
DRAWS = 512
"""Samples of the token after the first prompt, to compare with its distribution and with each other."""


def shapes_of(prompt: Sequence[int]) -> list[dict[str, Any]]:
    """Three requests side by side that use all of `Shape` between them, each field at a size that shows.

    Args:
        prompt: a token of it is made likely, so that it comes several times; another, so that it would end too soon.
    """
    often, last = prompt[0], next(token for token in prompt if token != prompt[0])
    every = max(2, max(prompt) // 128)
    few = tuple(range(last % every, max(prompt) + 1, every))
    return [
        {"shape": Shape(top_k=40, top_p=0.9)},
        {"shape": Shape(repetition=1.2, presence=0.4, frequency=0.6, bias=((often, LIKELY),)), "temperature": 1.0},
        {"shape": Shape(min_p=0.1, allowed=few, bias=((last, LIKELY),), least=2), "stop": (last,)},
    ]


class EngineSide:
    """The engine as trainer rank 0 sees it; records what each engine rank confirms and holds.

    Args:
        client: a connection of its own.
        group: the transfer group that the engine has joined.
        trace: trace directory; each engine rank gets a recorder.
        trainer: the recorder of trainer rank 0.
        share: where the other trainer ranks show buffers too: the rounds in which they do.
        sleep_level: at which the engine sleeps; 0: never.
    """

    def __init__(
        self,
        client: EngineClient,
        group: TransferGroup,
        num_ranks: int,
        trace: Path,
        trainer: Probe,
        share: TrainerRounds | None = None,
        sleep_level: int = 0,
    ) -> None:
        self.client, self._group, self._trainer, self._share = client, group, trainer, share
        self._sleep_level, self._asleep = sleep_level, False
        self.refused = False
        """The last transfer was refused: layers whose weights never came are left open, and cannot score."""
        self._ranks = [Recorder(trace, "engine", rank) for rank in range(num_ranks)]

    def poison(self, version: int) -> None:
        """NaN into everything that the engine holds, and what escaped it."""
        for rank, outcomes in enumerate(self.client.poison()):
            record_poison(self._ranks[rank], rank, outcomes, version)

    def sleep(self) -> None:
        """Have the engine give up its GPU memory until it is `awake` again."""
        self.client.sleep(self._sleep_level)
        self._asleep = True

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """The engine with memory for its weights within; that of its caches comes back at the end."""
        asleep, self._asleep = self._asleep, False
        if asleep:
            self.client.wake_up("weights")
        try:
            yield
        finally:
            if asleep:
                self.client.wake_up("kv_cache")

    def transfer(
        self, plan: ChunkPlan, stream: Iterator[tuple[str, torch.Tensor]], version: int
    ) -> dict[str, torch.Tensor]:
        """Poison, agree, send chunk by chunk, take the receipts, finish, forget cached prefixes.

        A departure of the stream from the plan, or plans that differ, end the transfer; the evidence says why, and the
        rest of the stream is still drawn, since the other ranks are in its collectives.

        Returns:
            What was sent, by name, on the host; nothing if the transfer was refused.
        """
        sent: dict[str, torch.Tensor] = {}
        refusal = ""
        if self._share is not None:
            self._share.begin()
        try:
            self.poison(version)
            agreement = update.agree(self.client, self._group, plan)
            self._record_plans(agreement.messages[1:], version)
            for delivery in update.deliver(self.client, self._group, plan, stream):
                sent |= {name: tensor.clone() for name, tensor in unpack(delivery.chunk, delivery.buffer.cpu())}
                for receipt in delivery.receipts:
                    record_receipt(self._ranks[receipt.rank], receipt, version)
            if self._share is not None:
                self._share.end()
            self.client.finish_update()
            self.client.reset_prefix_cache()
        except ContractError as problem:
            if isinstance(problem, update.PlanRefused):
                self._record_plans(problem.agreement.messages[1:], version)
            refusal = str(problem)
            if self._share is not None:
                self._share.stop()
        for _ in stream:
            pass
        self._trainer.emit(Handover(name=f"transfer of version {version}", version=version, refused=refusal))
        self.refused = bool(refusal)
        return {} if self.refused else sent

    def _record_plans(self, said: Sequence[str], version: int) -> None:
        for rank, digest in enumerate(said):
            self._ranks[rank].emit(PlanDigest(name="chunk plan", version=version, digest=digest))

    def record_held(self, sent: Mapping[str, torch.Tensor], version: int) -> None:
        """Record each engine rank's tensors, settings and checkpoint slices, and what the slices must be."""
        held_by(self.client).record(self._ranks, version)
        for rank, slices in enumerate(self.client.checkpoint_view()):
            record_views(self._ranks[rank], slices, sent, version)

    def record_logprobs(self, sequences: Sequence[Sequence[int]], version: int) -> None:
        """Teacher-forced log-probabilities of the sequences, by the engine."""
        self._record_scored("scored", sequences, version)

    def _record_scored(self, name: str, sequences: Sequence[Sequence[int]], version: int) -> None:
        record_scored(self._ranks[0], name, self.client.logprobs(sequences), version)

    def record_samples(self, prompts: Sequence[Sequence[int]], version: int, seed: int) -> None:
        """Tokens sampled from prompts that the prefix cache may know, with the log-probabilities reported for them.

        And the same again, now that it does know them, with tokens at which to stop, so that samples end one after
        another. Then the next turn of each of these conversations, which are scored, too, from end to end. At version 0
        also requests that differ, side by side: in their temperatures, one of which is greedy, and in their lengths, so
        that one moves to the place of another that has ended; and then in penalties, biases and truncation.
        """
        sampling = Sampling(seed=seed, max_tokens=SAMPLED_TOKENS)
        samples = self._record_sampled("sampled", prompts, version, sampling)
        stop = sorted({sample.tokens[min(at + 1, len(sample.tokens) - 1)] for at, sample in enumerate(samples)})
        self._record_sampled("sampled again", prompts, version, replace(sampling, stop=stop))
        turns = [
            [*prompt, *sample.tokens, *prompts[0][:NEXT_TURN]]
            for prompt, sample in zip(prompts, samples, strict=True)
        ]  # fmt: skip
        answers = self._record_sampled(NEXT, turns, version, replace(sampling, n=ANSWERS))
        self._record_scored(
            NEXT, [[*turns[at // ANSWERS], *answer.tokens] for at, answer in enumerate(answers)], version
        )
        if version == 0:
            each = [
                replace(sampling.of(index), temperature=temperature, max_tokens=limit)
                for index, (temperature, limit) in enumerate(SIDE_BY_SIDE)
            ]
            self._record_sampled("sampled side by side", prompts, version, replace(sampling, each=each))
            each = [replace(each[index], **rest) for index, rest in enumerate(shapes_of(prompts[0]))]
            self._record_sampled("sampled as shaped", prompts, version, replace(sampling, each=each), shaped=True)

    def _record_sampled(
        self, name: str, prompts: Sequence[Sequence[int]], version: int, sampling: Sampling, *, shaped: bool = False
    ) -> list[Sample]:
        rows = [
            (prompt, sampling.of(index), sample)
            for index, (prompt, found) in enumerate(zip(prompts, self.client.generate(prompts, sampling), strict=True))
            for sample in found.samples
        ]
        record_sampled(self._ranks[0], name, rows, version, shaped=shaped)
        return [sample for _, _, sample in rows]

    def record_draws(self, prompt: Sequence[int], version: int, seed: int) -> None:
        """Record the tokens that follow one prompt in many samples, half of them of a second request for the same.

        At version 0 also at a temperature other than 1, and without seeds.
        """
        sampling = Sampling(seed=seed, max_tokens=1, n=DRAWS // 2)
        self._record_drawn("drawn", prompt, version, sampling)
        if version == 0:
            warm = replace(sampling, temperature=SAMPLING_TEMPERATURE, seeded=False)
            self._record_drawn("drawn at a temperature", prompt, version, warm)

    def _record_drawn(self, name: str, prompt: Sequence[int], version: int, sampling: Sampling) -> None:
        found = [sample for request in self.client.generate([prompt, prompt], sampling) for sample in request.samples]
        record_drawn(self._ranks[0], name, prompt, found, sampling.temperature, version)

    def close(self) -> None:
        """Close the recorders; the engine and the group stay."""
        for recorder in self._ranks:
            recorder.close()


def open_engine(spec: RunSpec, probe: Recorder, share: TrainerRounds | None) -> tuple[EngineSide, TransferGroup]:
    """Rank 0's connection to the engine, and the transfer group with its ranks."""
    from verifier.transport.gloo import Listener

    client = EngineClient(str(spec.engine_socket), deadline_s=spec.deadline_s)
    listener = Listener(spec.engine_ranks, deadline_s=spec.deadline_s, kind=spec.transport)
    group = update.connect(client, listener, share)
    return EngineSide(client, group, spec.engine_ranks, Path(spec.trace), probe, share, spec.sleep_level), group


def open_share(spec: RunSpec) -> TrainerRounds | None:
    """Every trainer rank's end of the rounds in which buffers are shown to the engine, where CUDA IPC moves them."""
    if spec.engine_socket is None or spec.transport != "ipc":
        return None
    from verifier.transport.cuda_ipc import TrainerRounds

    return TrainerRounds()
