"""Contexts that are sent as what they add: digests of growing tokens, and what an agent keeps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.protocol.agent_protocol import Generate, RequestId, SamplingParams
from rljob.protocol.contexts import GrowingDigest, KeptContexts, context_digest

SAMPLING = SamplingParams(1.0, 5, [], 1)
BEFORE, ADDED = b"abcdefgh", b"ijkl"


@given(st.lists(st.tuples(st.binary(max_size=70), st.booleans())))
def test_a_growing_digest_is_that_of_all_tokens_so_far(parts):
    digest, whole = GrowingDigest(), b""
    for part, asked in parts:
        digest.append(part)
        whole += part
        if asked:
            assert digest.digest() == digest.digest() == context_digest(whole)
    assert digest.digest() == context_digest(whole)


def request(token_ids=ADDED, prefix_tokens=2, context=context_digest(BEFORE + ADDED), sample="g0.0", turn=1):
    return Generate(RequestId(sample, turn, 0), token_ids, SAMPLING, prefix_tokens, context)


@pytest.fixture
def contexts():
    kept = KeptContexts(100)
    kept.keep(RequestId("g0.0", 0, 0), BEFORE)
    return kept


def test_a_request_gets_the_tokens_that_are_kept_and_its_digest(contexts):
    whole = contexts.whole(request())
    assert whole == Generate(RequestId("g0.0", 1, 0), BEFORE + ADDED, SAMPLING, 0, context_digest(BEFORE + ADDED))
    assert contexts.whole(request()) == whole, "all its tokens are kept while it is generated"
    longer = request(b"mnop", 3, context_digest(BEFORE + ADDED + b"mnop"), turn=2)
    assert contexts.whole(longer).token_ids == BEFORE + ADDED + b"mnop"


def test_a_request_of_all_tokens_needs_nothing_kept_and_takes_its_place(contexts):
    whole = contexts.whole(request(b"wxyz", 0, ""))
    assert (whole.token_ids, whole.context) == (b"wxyz", context_digest(b"wxyz"))
    assert contexts.whole(request()) is None


def test_a_longer_context_is_cut_to_the_prefix(contexts):
    contexts.keep(RequestId("g0.0", 0, 0), BEFORE + b"more")
    assert contexts.whole(request()).token_ids == BEFORE + ADDED


@pytest.mark.parametrize(
    "wrong",
    [
        request(sample="g0.1"),
        request(prefix_tokens=3),  # longer than what is kept
        request(prefix_tokens=1),
        request(token_ids=b"ijkm"),
        request(context=""),
        request(prefix_tokens=-1),
    ],
)
def test_a_request_that_is_about_other_tokens_is_missing_its_prefix(contexts, wrong):
    assert contexts.whole(wrong) is None


def test_the_oldest_contexts_make_room_for_new_ones():
    contexts = KeptContexts(20)
    for sample in ("g0.0", "g0.1", "g0.0", "g0.2"):
        contexts.keep(RequestId(sample, 0, 0), BEFORE)
    assert [contexts.whole(request(sample=f"g0.{member}")) is None for member in range(3)] == [False, True, False]
    contexts.keep(RequestId("g0.3", 0, 0), bytes(24))
    contexts.keep(RequestId("g0.4", 0, 0), BEFORE)
    assert contexts.whole(request(sample="g0.4")) is not None, "one that is longer than the bound is not kept"


def test_samples_are_forgotten(contexts):
    contexts.keep(RequestId("g0.1", 0, 0), BEFORE)
    contexts.keep(RequestId("g0.2", 0, 0), BEFORE)
    contexts.forget(["g0.0", "g7.7"])
    assert contexts.whole(request()) is None and contexts.whole(request(sample="g0.1")) is not None
    contexts.clear()
    assert contexts.whole(request(sample="g0.2")) is None
    contexts.keep(RequestId("g0.2", 0, 0), bytes(100))
    assert contexts.whole(request(bytes(4), 25, context_digest(bytes(104)), "g0.2")) is not None, "the room is free"


def test_the_first_request_of_a_branch_continues_the_context_of_the_branch_that_it_was_made_from(contexts):
    def of_branch(name, turn=1, prefix_tokens=2, token_ids=ADDED, context=BEFORE + ADDED):
        request_id = RequestId("g0.0", turn, 0, name)
        return Generate(request_id, token_ids, SAMPLING, prefix_tokens, context_digest(context))

    contexts.keep(RequestId("g0.0", 1, 0), BEFORE + b"more")
    for name in ("1.1", "1.2", "1.1/1.1"):
        assert contexts.whole(of_branch(name)).token_ids == BEFORE + ADDED
    assert contexts.whole(of_branch("1.3", context=BEFORE)) is None
    assert contexts.whole(of_branch("1.1", 2, 3, b"mnop", BEFORE + ADDED + b"mnop")) is not None
    contexts.forget(["g0.0", "g0.0@1.2"])
    assert contexts.whole(of_branch("1.4")) is None and contexts.whole(of_branch("1.2")) is None
    assert contexts.whole(of_branch("1.1/2.1", 2, 3, b"mnop", BEFORE + ADDED + b"mnop")) is not None
