"""Random workloads: whatever happens on the way, every request gets exactly its tokens."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_world import VOCAB, Arrival, Engine, Setup, Window, check, names_by_key, request

LENGTH = 48
WINDOWS: list[tuple[Window, ...]] = [
    (None,),
    (None,),
    (None, 5),
    (3,),
    (None, 7, 16),
    (None, ("chunked", 6)),
    ("state",),
    (None, "state"),
    ("state", 4, ("chunked", 16), "state"),
]


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    max_num_seqs = draw(st.integers(1, 5))
    chunked = draw(st.sampled_from([True, True, True, False]))
    windows = draw(st.sampled_from(WINDOWS))
    recurrent = "state" in windows
    return Setup(
        block_size=draw(st.one_of(st.integers(1, 8), st.integers(1, 64))),
        windows=windows,
        spare=draw(st.integers(0, 12)),
        max_num_seqs=max_num_seqs,
        budget=draw(st.integers(max_num_seqs, 40)) if chunked else LENGTH + draw(st.integers(0, 20)),
        max_model_len=LENGTH,
        threshold=draw(st.sampled_from([0, 0, 1, 3, 10])) if chunked else 0,
        chunked=chunked,
        num_drafts=0 if recurrent else draw(st.sampled_from([0, 0, 1, 3])),
        depth=draw(st.integers(1, 3)),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        caching=draw(st.booleans()) and (chunked or not recurrent),
    )


@st.composite
def workloads(draw: st.DrawFn) -> list[Arrival]:
    common = [1, 2] * 10
    arrivals = []
    for index in range(draw(st.integers(1, 7))):
        shared = draw(st.integers(0, 20))
        prompt = common[:shared] + draw(st.lists(st.integers(0, VOCAB - 1), min_size=shared == 0, max_size=14))
        max_tokens = draw(st.integers(1, LENGTH - len(prompt)))
        asked = request(
            f"r{index}",
            prompt,
            min(max_tokens, 20),
            eos=draw(st.sampled_from([[], [0], [0, 3]])),
            stop_token_ids=draw(st.sampled_from([None, [4], [0, 5]])),
            min_tokens=draw(st.sampled_from([0, 0, 2, 6])),
            priority=draw(st.integers(-1, 2)),
            arrival=index,
            cache_salt=draw(st.sampled_from(["", "", "other"])),
        )
        at = draw(st.integers(0, 12))
        abort_at = draw(st.one_of(st.none(), st.none(), st.none(), st.integers(at, at + 15)))
        arrivals.append(Arrival(asked, at, abort_at))
    return arrivals


@settings(max_examples=250, deadline=None)
@given(setup=setups(), arrivals=workloads(), seed=st.integers(0, 99))
def test_every_request_gets_its_tokens(setup: Setup, arrivals: list[Arrival], seed: int) -> None:
    check(setup, arrivals, seed)


@settings(max_examples=60, deadline=None)
@given(setup=setups(), arrivals=workloads())
def test_requests_start_in_the_order_of_their_keys(setup: Setup, arrivals: list[Arrival]) -> None:
    """Those that are there from the start are admitted for the first time in order, whatever the policy."""
    together = [replace(arrival, at=0, abort_at=None) for arrival in arrivals]
    engine = check(setup, together)
    assert list(dict.fromkeys(engine.admitted)) == list(names_by_key(engine))


@settings(max_examples=60, deadline=None)
@given(setup=setups(), arrivals=workloads(), depth=st.integers(2, 3))
def test_overlapped_steps_tell_what_the_plain_loop_tells(setup: Setup, arrivals: list[Arrival], depth: int) -> None:
    kept = [replace(arrival, abort_at=None) for arrival in arrivals]
    plain = Engine(replace(setup, depth=1), kept).run()
    overlapped = Engine(replace(setup, depth=depth), kept).run()
    for name, told in plain.items():
        other = overlapped[name]
        assert (told.tokens, told.finish, told.stop_reason) == (other.tokens, other.finish, other.stop_reason)


@settings(max_examples=40, deadline=None)
@given(
    depth=st.integers(1, 3),
    block_size=st.integers(1, 6),
    drafts=st.sampled_from([0, 2]),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_a_pool_for_one_serves_many(depth: int, block_size: int, drafts: int, policy: str) -> None:
    """All of them grow to the longest length there is, in a pool that holds one: they must take turns."""
    setup = Setup(
        block_size=block_size, spare=0, depth=depth, num_drafts=drafts, policy=policy, max_model_len=20, budget=16
    )
    arrivals = [
        Arrival(request(f"r{i}", [1, 2, 3][: 1 + i % 3], 20 - (1 + i % 3), arrival=i, priority=-i)) for i in range(5)
    ]
    engine = check(setup, arrivals)
    assert len(engine.admitted) > len(arrivals), "somebody was preempted and came back"
