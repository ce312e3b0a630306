"""Trainer rank 0's conversation with the engine, and the evidence of both sides of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verifier.core.evidence import Evidence, Probe
from verifier.core.stage import Stage
from verifier.core.store import Recorder
from verifier.engine import sender as update
from verifier.engine.client import EngineClient
from verifier.engine.engine import HeldSlice, Sample, Sampling, Shape
from verifier.errors import ContractError
from verifier.plan.chunk_plan import ChunkPlan
from verifier.plan.digest import digest_tensor
from verifier.probes.engine import held_by
from verifier.runs.spec import RunSpec
from verifier.transport.buffer import dtype_name, unpack

if TYPE_CHECKING:
    from verifier.transport.cuda_ipc import Share
    from verifier.transport.groups import Group

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
        group: Group,
        num_ranks: int,
        trace: Path,
        trainer: Probe,
        share: Share | None = None,
        sleep_level: int = 0,
    ) -> None:
        self.client, self._group, self._trainer, self._share = client, group, trainer, share
        self._sleep_level, self._asleep = sleep_level, False
        self.refused = False
        """The last transfer was refused: layers whose weights never came are left open, and cannot score."""
        self._ranks = [Recorder(trace, "engine", rank) for rank in range(num_ranks)]

    def poison(self, version: int) -> None:
        """NaN into everything that the engine holds, and what escaped it."""
        for rank, items in enumerate(self.client.poison()):
            self._ranks[rank].emit(
                Evidence(
                    stage=Stage.ENGINE, kind="poison", name=f"engine rank {rank}", version=version,
                    facts={
                        "total": len(items),
                        "intact": [item.name for item in items if item.how == "left"],
                        "unreachable": {i.name: i.how for i in items if i.how.startswith("left:")},
                    },
                )
            )  # fmt: skip

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
            self._record_plans(agreement.said[1:], version)
            for delivery in update.deliver(self.client, self._group, plan, stream):
                sent |= {name: tensor.clone() for name, tensor in unpack(delivery.chunk, delivery.buffer.cpu())}
                for receipt in delivery.receipts:
                    self._record_receipt(receipt, version)
            if self._share is not None:
                self._share.end()
            self.client.finish_update()
            self.client.reset_prefix_cache()
        except ContractError as problem:
            if isinstance(problem, update.PlanRefused):
                self._record_plans(problem.agreement.said[1:], version)
            refusal = str(problem)
            if self._share is not None:
                self._share.stop()
        for _ in stream:
            pass
        self._trainer.emit(
            Evidence(
                stage=Stage.TRANSPORT, kind="handover", name=f"transfer of version {version}", version=version,
                facts={"refused": refusal},
            )
        )  # fmt: skip
        self.refused = bool(refusal)
        return {} if self.refused else sent

    def _record_plans(self, said: Sequence[str], version: int) -> None:
        for rank, digest in enumerate(said):
            self._ranks[rank].emit(
                Evidence(stage=Stage.PLAN, kind="plan", name="chunk plan", version=version, digest=digest)
            )

    def _record_receipt(self, receipt: update.Receipt, version: int) -> None:
        recorder = self._ranks[receipt.rank]
        for item in receipt.received:
            recorder.emit(
                Evidence(
                    stage=Stage.TRANSPORT, kind="receipt", name=item.name, version=version, digest=item.digest,
                    dtype=item.dtype, shape=item.shape, facts={"chunk": receipt.chunk},
                )
            )  # fmt: skip
        recorder.emit(
            Evidence(
                stage=Stage.ENGINE, kind="loaded", name=f"chunk {receipt.chunk}", version=version,
                facts={"names": list(receipt.loaded), "refused": receipt.refused or ""},
            )
        )  # fmt: skip

    def record_held(self, sent: Mapping[str, torch.Tensor], version: int) -> None:
        """What every engine rank holds: tensors, settings, and its checkpoint slices beside what they must be."""
        held_by(self.client).record(self._ranks, version)
        for rank, slices in enumerate(self.client.checkpoint_view()):
            self._record_view(self._ranks[rank], slices, sent, version)

    def _record_view(
        self, recorder: Recorder, slices: Sequence[HeldSlice], sent: Mapping[str, torch.Tensor], version: int
    ) -> None:
        seen = {item.name for item in slices if item.quantized}
        if seen:
            recorder.emit(
                Evidence(
                    stage=Stage.ENGINE, kind="view-quantized", name="quantized by the engine", version=version,
                    facts={"names": sorted(seen)},
                )
            )  # fmt: skip
        for item in slices:
            if item.quantized:
                continue
            name = f"{item.name} in {item.holder}" if item.name in seen else item.name
            seen.add(item.name)
            facts = {"holder": item.holder, "of": item.name, "box": [list(pair) for pair in item.box]}
            recorder.emit(
                Evidence(
                    stage=Stage.ENGINE, kind="view", name=name, version=version, digest=item.digest,
                    dtype=item.dtype, shape=item.shape, facts=facts,
                )
            )  # fmt: skip
            if item.name in sent:
                self._record_view_expected(recorder, name, sent[item.name], item.box, version)
        for name in sent.keys() - seen:
            self._record_view_expected(recorder, name, sent[name], (), version)

    def _record_view_expected(
        self, recorder: Recorder, name: str, whole: torch.Tensor, box: Sequence[tuple[int, int]], version: int
    ) -> None:
        facts = {"whole": list(whole.shape)}
        for dim, (begin, end) in enumerate(box):
            whole = whole.narrow(dim, begin, end - begin)
        recorder.emit(
            Evidence(
                stage=Stage.ENGINE, kind="view-expected", name=name, version=version, digest=digest_tensor(whole),
                dtype=dtype_name(whole.dtype), shape=tuple(whole.shape), facts=facts,
            )
        )  # fmt: skip

    def record_logprobs(self, sequences: Sequence[Sequence[int]], version: int) -> None:
        """Teacher-forced log-probabilities of the sequences, by the engine."""
        self._record_scored("scored", sequences, version)

    def _record_scored(self, name: str, sequences: Sequence[Sequence[int]], version: int) -> None:
        rows = self.client.logprobs(sequences)
        self._ranks[0].emit(
            Evidence(
                stage=Stage.ROLLOUT, kind="engine", name=name, version=version,
                facts={"lengths": [len(row) for row in rows]},
            ),
            torch.tensor([value for row in rows for value in row], dtype=torch.float32),
        )  # fmt: skip

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
            self._record_sampled("sampled as shaped", prompts, version, replace(sampling, each=each), kind="shaped")

    def _record_sampled(
        self, name: str, prompts: Sequence[Sequence[int]], version: int, sampling: Sampling, kind: str = "sampled"
    ) -> list[Sample]:
        rows = [
            (prompt, sampling.of(index), sample)
            for index, (prompt, found) in enumerate(zip(prompts, self.client.generate(prompts, sampling), strict=True))
            for sample in found.samples
        ]
        samples = [sample for _, _, sample in rows]
        self._ranks[0].emit(
            Evidence(
                stage=Stage.ROLLOUT, kind=kind, name=name, version=version,
                facts={
                    "lengths": [len(sample.tokens) for sample in samples],
                    "prompts": [list(prompt) for prompt, _, _ in rows],
                    "tokens": [list(sample.tokens) for sample in samples],
                    "cached": [sample.cached_tokens for sample in samples],
                    "stops": [list(asked.stop) for _, asked, _ in rows],
                    "limits": [asked.max_tokens for _, asked, _ in rows],
                    "temperatures": [asked.temperature for _, asked, _ in rows],
                    **({"asked": [asdict(asked) for _, asked, _ in rows]} if kind == "shaped" else {}),
                },
            ),
            torch.tensor([value for sample in samples for value in sample.logprobs], dtype=torch.float32),
        )  # fmt: skip
        return samples

    def record_draws(self, prompt: Sequence[int], version: int, seed: int) -> None:
        """Which tokens come after one prompt, in many samples, half of them of a second request for the same.

        At version 0 also at a temperature other than 1, and without seeds.
        """
        sampling = Sampling(seed=seed, max_tokens=1, n=DRAWS // 2)
        self._record_drawn("drawn", prompt, version, sampling)
        if version == 0:
            warm = replace(sampling, temperature=SAMPLING_TEMPERATURE, seeded=False)
            self._record_drawn("drawn at a temperature", prompt, version, warm)

    def _record_drawn(self, name: str, prompt: Sequence[int], version: int, sampling: Sampling) -> None:
        found = [sample for request in self.client.generate([prompt, prompt], sampling) for sample in request.samples]
        facts = {"tokens": [sample.tokens[0] for sample in found], "temperature": sampling.temperature}
        self._ranks[0].emit(
            Evidence(stage=Stage.ROLLOUT, kind="drawn", name=name, version=version, facts=facts),
            torch.tensor([sample.logprobs[0] for sample in found], dtype=torch.float32),
        )

    def close(self) -> None:
        """Close the recorders; the engine and the group stay."""
        for recorder in self._ranks:
            recorder.close()


def open_engine(spec: RunSpec, probe: Recorder, share: Share | None) -> tuple[EngineSide, Group]:
    """Rank 0's connection to the engine, and the transfer group with its ranks."""
    from verifier.transport.gloo import Listener

    client = EngineClient(str(spec.engine_socket), deadline_s=spec.deadline_s)
    listener = Listener(spec.engine_ranks, deadline_s=spec.deadline_s, kind=spec.transport)
    group = update.connect(client, listener, share)
    return EngineSide(
        client, group, spec.engine_ranks, Path(spec.trace), probe, share, spec.roundtrip.engine.sleep_level
    ), group


def open_share(spec: RunSpec) -> Share | None:
    """Every trainer rank's end of the rounds in which buffers are shown to the engine, where CUDA IPC moves them."""
    if spec.engine_socket is None or spec.transport != "ipc":
        return None
    from verifier.transport.cuda_ipc import Share

    return Share()
