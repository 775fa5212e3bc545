from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.directory import Leg, Pair
from kvrelay.types import Peer
from router.booking import Bookings
from router.policy.values import Load

D, P, Q = (Peer(name, "i", f"{name}:1") for name in "dpq")
NOTHING = Load()


def remote(prefill: Peer = P) -> Pair:
    return Pair(Leg(peer=D, tokens=100, sequences=1), Leg(peer=prefill, prefill_s=2.0))


def local() -> Pair:
    return Pair(Leg(peer=D, tokens=100, sequences=1, prefill_s=2.0))


def test_load_counts_from_booking_and_is_given_back_once():
    bookings = Bookings()
    bookings.book(("r", 0), remote())
    assert bookings.load(D) == Load(tokens=100, sequences=1)
    assert bookings.load(P) == Load(prefill_s=2.0)
    assert bookings.end(("r", 0))
    assert not bookings.end(("r", 0))
    assert (bookings.load(D), bookings.load(P), len(bookings)) == (NOTHING, NOTHING, 0)


def test_prefill_work_ends_when_the_prompt_is_read_wherever_that_was():
    bookings = Bookings()
    for key, pair in ((("r", 0), remote()), (("l", 0), local())):
        bookings.book(key, pair)
        assert bookings.end_prefill(key)
        assert not bookings.end_prefill(key)
    assert bookings.load(P) == NOTHING
    assert bookings.load(D) == Load(tokens=200, sequences=2)


def test_an_alternate_takes_the_prefill_leg_over():
    bookings = Bookings()
    bookings.book(("r", 0), remote())
    moved = bookings.move_prefill(("r", 0), Leg(peer=Q, prefill_s=3.0))
    assert moved == Pair(Leg(peer=D, tokens=100, sequences=1), Leg(peer=Q, prefill_s=3.0))
    assert (bookings.load(P), bookings.load(Q)) == (NOTHING, Load(prefill_s=3.0))
    assert bookings.move_prefill(("gone", 0), Leg(peer=Q)) is None


def test_attempts_of_one_request_are_booked_apart():
    bookings = Bookings()
    bookings.book(("r", 0), remote())
    bookings.book(("r", 1), remote(Q))
    bookings.end(("r", 0))
    assert bookings.load(D) == Load(tokens=100, sequences=1)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["book", "rebook", "prefill", "move", "end"]), st.integers(0, 4), st.sampled_from([P, Q, D])
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(steps=STEPS)
def test_whatever_happens_nothing_is_left_when_all_requests_have_ended(steps):
    bookings = Bookings()
    for what, number, peer in steps:
        key = (f"r{number}", 0)
        match what:
            case "book":
                bookings.book(key, remote(peer))
            case "rebook":
                bookings.book(key, local())
            case "prefill":
                bookings.end_prefill(key)
            case "move":
                bookings.move_prefill(key, Leg(peer=peer, prefill_s=0.1))
            case "end":
                bookings.end(key)
    live = bookings.live()
    assert bookings.load(D).sequences == len(live)
    for key, _ in live:
        bookings.end(key)
    assert [bookings.load(peer) for peer in (D, P, Q)] == [NOTHING] * 3


def test_what_a_replica_reports_of_this_routers_own_work_is_not_counted_twice():
    bookings = Bookings()
    bookings.book(("r", 0), local())
    bookings.told(D, Load(prefill_s=2.0, tokens=100, sequences=1))
    assert bookings.load(D) == Load(prefill_s=2.0, tokens=100, sequences=1)
    bookings.end(("r", 0))
    bookings.told(D, Load(prefill_s=2.0, tokens=100, sequences=1))  # told before it learned of the end
    assert bookings.load(D) == NOTHING


def test_what_a_replica_reports_beyond_that_is_the_load_of_other_routers():
    bookings = Bookings()
    bookings.book(("r", 0), remote())
    bookings.told(D, Load(tokens=500, sequences=4))
    assert bookings.load(D) == Load(tokens=500, sequences=4)
    bookings.gone(D)
    assert bookings.load(D) == Load(tokens=100, sequences=1)
    bookings.told(D, Load())
    bookings.told(D, Load())
    assert bookings.load(D) == Load(tokens=100, sequences=1)
