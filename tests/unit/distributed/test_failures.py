"""Who gives up on whose account, from what ranks tell each other, in whatever order it comes."""

import itertools
import threading
from typing import Any

from megakv.base.errors import MegaKVError, PeerLostError
from megakv.distributed.failures import Failures


def world(size: int) -> list[Failures]:
    """All ranks, after three steps that all took."""
    ranks = [Failures(rank, size) for rank in range(size)]
    for _ in range(3):
        for one in ranks:
            one.begin_step()
    return ranks


def tell(message: dict[str, Any], *others: Failures) -> None:
    for other in others:
        other.take(dict(message))


def test_a_failure_of_all_at_one_place_concerns_nobody() -> None:
    for order in itertools.permutations(range(3)):
        ranks = world(3)
        for rank in order:
            assert ranks[rank].verdict() is None
            tell(ranks[rank].fail(ValueError("wrong")), *(one for one in ranks if one.rank != rank))
        for one in ranks:
            assert one.settle(0.0) and not one.apart and not one.missing and one.verdict() is None
        # The fastest goes on, and fails again, before the others have gone on from the first time.
        first, *rest = ranks
        first.renew(life=False)
        again = first.fail(KeyError("again"))
        tell(again, *rest)
        for one in rest:
            assert not one.apart
            one.renew(life=False)
            assert one.verdict() is None
            one.begin_step()
            found = one.verdict()
            assert found is not None and found.says == "rank 0 failed: KeyError: 'again'"


def test_who_waits_for_a_rank_that_failed_gives_up() -> None:
    early, waiting, behind = world(3)
    waiting.begin_pass()
    told = early.fail(TypeError("here only"))
    tell(told, waiting, behind)
    # Who has not come so far is not concerned yet, unless its connection broke.
    assert behind.verdict() is None and behind.wait(0.0) is not None
    found = waiting.verdict()
    assert found is not None
    error = waiting.follow(found)
    assert type(error) is MegaKVError and str(error) == "rank 0 failed: TypeError: here only"
    followed = waiting.fail(error)
    tell(followed, early, behind)
    assert not early.settle(0.0)
    behind.begin_pass()
    # Two have failed by now: the one that failed by itself is named.
    found = behind.verdict()
    assert found is not None and found.rank == 0
    tell(behind.fail(behind.follow(found)), early, waiting)
    for one in (early, waiting, behind):
        assert one.settle(0.0) and one.apart and not one.missing
        one.renew(life=True)
        assert one.verdict() is None and one.own is None and (one.life, one.step) == (1, 0)
    # What is told late of the earlier life is of no use; of the new one it is.
    tell(followed, early)
    early.begin_pass()
    assert early.verdict() is None
    waiting.begin_pass()
    tell(waiting.fail(MemoryError("none")), early)
    assert early.verdict() is not None


def test_a_lost_rank_is_waited_for_no_longer_and_stays_missing() -> None:
    one, other, _ = world(3)
    one.begin_pass()
    one.miss([2])
    told = one.fail(PeerLostError("rank 0: rank 2 (host h, pid 7) was lost during pass_kv"))
    other.begin_pass()
    tell(told, other)
    found = other.verdict()
    assert found is not None
    error = other.follow(found)
    assert isinstance(error, PeerLostError) and str(error) == "rank 1: rank 2 (host h, pid 7) was lost during pass_kv"
    threading.Timer(0.1, tell, (other.fail(error), one)).start()
    assert one.settle(30.0) and other.settle(0.0)
    assert one.missing == other.missing == [2]


def test_a_rank_that_ended_in_good_order_is_not_lost() -> None:
    one, *_ = world(3)
    tell({"kind": "ended", "rank": 1}, one)
    tell({"kind": "lost", "rank": 1}, one)
    assert one.lost == [] and one.quiet and one.missing == [1]
    tell({"kind": "lost", "rank": 2}, one)
    assert one.lost == [2] and not one.quiet


def test_a_rank_that_others_take_for_lost_goes_on_with_none_of_them() -> None:
    here, slow = world(2)
    here.begin_step()
    here.miss([1])
    told = here.fail(PeerLostError("rank 0: rank 1 did not answer"))
    tell(told, slow)
    verdict = slow.verdict(broken=True)
    assert verdict is not None
    assert str(slow.follow(verdict)) == "rank 0 gave up this one for lost: rank 1 did not answer"
    slow.cause = None
    tell(slow.fail(ValueError("late")), here)
    assert here.settle(0.0) and slow.settle(0.0)
    # Were only one of them to refuse, the other would wait for it.
    assert here.missing == [1] and slow.missing == [0]
