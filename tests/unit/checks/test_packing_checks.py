"""What the checks of the token path take for wrong, beside what the snapshots show."""

import numpy as np
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import ARRAYS, AT, LEDGER, MANIFEST, change, clean, having, make_trace
from tests.snapshots.token_arrays import TOKENS
from verifier.core.check import REGISTRY, Outcome, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import MeshSizes
from verifier.core.trace import Trace
from verifier.stages.logprob.records import ReturnedLogprobs
from verifier.stages.pack.records import PackedBatchDigest, PackLayout, TokenLedger


def test_a_step_whose_tokens_nobody_followed_is_none_that_holds() -> None:
    moved = change(TokenLedger, having(name="scored"))
    outcome = run_check(REGISTRY["PCK001"], make_trace(moved))
    assert outcome.finding is not None
    assert outcome.finding.first.sentence == "no ledger followed the tokens that were trained at version 1"


def test_a_longest_sequence_that_is_none_of_the_pack() -> None:
    outcome = run_check(REGISTRY["PCK002"], make_trace(change(PackLayout, having(max_seqlen=6))))
    assert outcome.verdict is Verdict.VIOLATED


def test_scores_that_one_rank_got_otherwise() -> None:
    other = change(ReturnedLogprobs, having(digest="vd1:" + "6" * 32), rank=1, version=1)
    outcome = run_check(REGISTRY["LGP001"], make_trace(other))
    assert outcome.finding is not None
    assert outcome.finding.first.sentence == "trainer rank 1 got other log-probabilities than the first rank"


def test_a_rank_without_a_batch() -> None:
    outcome = run_check(REGISTRY["PCK003"], make_trace(change(PackedBatchDigest, lambda item: None, rank=1)))
    assert outcome.finding is not None
    assert outcome.finding.first.sentence == "trainer rank 1 works on no batch that is trained at version 1"


def test_a_rank_without_a_ledger() -> None:
    """Two data-parallel ranks own the rows; one of them recorded its own."""
    manifest = replace(MANIFEST, mesh=MeshSizes(dp=2))
    outcome = run_check(REGISTRY["PCK001"], Trace(manifest, clean(), ARRAYS.__getitem__))
    assert outcome.finding is not None
    assert outcome.finding.first.sentence == "1 of 2 ranks have a ledger of the tokens trained at version 1"


def test_every_misplaced_field_names_its_rank() -> None:
    outcome = run_check(REGISTRY["PCK001"], make_trace(change(TokenLedger, having(array="shifted ledger"))))
    assert outcome.finding is not None
    assert outcome.finding.first.owner == f"trainer rank 0 ({AT[0]})"


def judged(**columns: np.ndarray) -> Outcome:
    """PCK001 of a ledger with other columns."""
    arrays = {**ARRAYS, "ledger": {**LEDGER, **columns}}
    return run_check(REGISTRY["PCK001"], Trace(MANIFEST, clean(), arrays.__getitem__))


def test_a_column_that_is_cut_or_too_long_is_not_compared() -> None:
    """Rows are compared block by block, and a block of one row would broadcast."""
    for label in (LEDGER["label"][:-1], LEDGER["label"][:1], np.append(LEDGER["label"], -100)):
        outcome = judged(label=label)
        assert outcome.verdict is Verdict.INCONCLUSIVE
        assert f"{len(label)} of label" in outcome.error


def test_tokens_that_all_lost_their_name() -> None:
    """A trace keeps whole numbers that fit in 32 bits, and sentinels that are zero, or cut, do."""
    for sentinel in (np.zeros(6, np.int32), LEDGER["sentinel"].astype(np.int32)):
        outcome = judged(sentinel=sentinel)
        assert outcome.verdict is Verdict.VIOLATED


def test_a_token_out_of_the_loss_may_have_no_label() -> None:
    """As batches of fine-tuning have it; in the loss a token has its label, and no token has another's."""
    prompt = {"mask": np.array([False, False, True, False, True])}
    rows = {**LEDGER, "mask": np.array([False, True, False, False, True, False])}
    for label, verdict in ((-100, Verdict.HOLDS), (2, Verdict.HOLDS), (7, Verdict.VIOLATED)):
        ledger = {**rows, "label": np.array([label, 3, -100, -100, 5, -100])}
        arrays = {**ARRAYS, "tokens": {**TOKENS, **prompt}, "ledger": ledger}
        assert run_check(REGISTRY["PCK001"], Trace(MANIFEST, clean(), arrays.__getitem__)).verdict is verdict
    assert judged(label=np.array([-100, 3, -100, -100, 5, -100])).verdict is Verdict.VIOLATED


def test_a_row_that_predicts_nothing_has_any_label_where_a_mask_keeps_it_out() -> None:
    """As verl rolls the tokens of a pack: the last of a sequence has the next one's first for a label."""
    label = np.where(LEDGER["sentinel"] == 0, 7, LEDGER["label"])
    assert (label != LEDGER["label"]).any()
    assert judged(label=label).verdict is Verdict.HOLDS
    assert judged(label=label, mask=np.ones(len(label), bool)).verdict is Verdict.VIOLATED
    rows = {name: column for name, column in LEDGER.items() if name != "mask"}
    arrays = {**ARRAYS, "ledger": {**rows, "label": label}}
    assert run_check(REGISTRY["PCK001"], Trace(MANIFEST, clean(), arrays.__getitem__)).verdict is Verdict.VIOLATED
