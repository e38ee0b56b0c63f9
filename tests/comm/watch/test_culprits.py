"""Who is to blame for a wait."""

from __future__ import annotations

import pytest

from moeclipse.comm.watch.culprits import Stand, all_wait, describe_cut, describe_wait, reached_from


def waits(op: str, *ranks: int, host: str = "") -> Stand:
    return Stand(waits=True, op=op, ranks=ranks, since_s=5.0, host=host)


BUSY = Stand(waits=False, op="ATTN_F", since_s=7.25)


@pytest.mark.parametrize(
    ("stands", "words"),
    [
        ({0: waits("a", 0, 1)}, "rank 1 did not arrive"),
        ({0: waits("a", 0, 1, 2), 1: waits("a", 0, 1, 2)}, "rank 2 did not arrive"),
        ({0: waits("a", 0, 1), 1: waits("b", 1, 2)}, "rank 2 did not arrive"),
        ({0: waits("a", 0, 1), 1: waits("b", 1, 2), 2: waits("c", 2, 3)}, "rank 3 did not arrive"),
        (
            {0: waits("a", 0, 1), 1: waits("b", 1, 2), 2: BUSY},
            "rank 2 did not arrive (it is 7.25 s behind ATTN_F)",
        ),
        ({0: waits("a", 0, 1), 1: Stand(waits=False)}, "rank 1 did not arrive"),
        ({0: waits("a", 0, 1), 1: waits("b", 0, 1)}, "rank 1 waits in b"),
        (
            {0: waits("a", 0, 1), 1: waits("b", 1, 2), 2: waits("c", 2, 0)},
            "rank 1 waits in b; rank 2 waits in c",
        ),
        ({0: waits("a", 0, 1), 1: waits("a", 0, 1)}, "all ranks arrived, so the network stalled"),
        ({0: waits("a", 0, 1), 1: waits("a", 0, 1), 2: BUSY}, "all ranks arrived, so the network stalled"),
    ],
)
def test_words(stands: dict[int, Stand], words: str) -> None:
    assert describe_wait(0, stands) == words


def test_a_silent_rank_outweighs_those_that_wait_for_it() -> None:
    stands = {0: waits("a", 0, 1, 2), 1: waits("b", 1, 3), 2: waits("b", 2, 3)}
    assert reached_from(0, stands) == [1, 2, 3]
    assert describe_wait(0, stands) == "rank 3 did not arrive"


def test_hosts_are_named_where_there_are_several() -> None:
    stands = {0: waits("a", 0, 1, host="east"), 1: Stand(waits=False, op="x", since_s=3.0, host="west")}
    assert describe_wait(0, stands) == "rank 1 on west did not arrive (it is 3 s behind x)"
    stands[1] = Stand(waits=False, op="x", since_s=3.0, host="east")
    assert describe_wait(0, stands) == "rank 1 did not arrive (it is 3 s behind x)"


def test_the_fewer_are_cut_off() -> None:
    stands = {rank: waits("a", 0, 1, 2, host="west" if rank == 2 else "east") for rank in range(3)}
    told = "rank 2 on west cannot be reached by the others: the network there is cut"
    assert describe_cut([2], stands) == told
    assert describe_cut([0, 1], stands) == told, "so says rank 2 itself, which reaches nobody"
    pair = {rank: stands[rank] for rank in (0, 2)}
    expected = "rank 0 and rank 2 do not reach each other: the network between them is cut"
    assert describe_cut([2], pair) == expected
    many = {rank: waits("a", *range(20)) for rank in range(20)}
    assert describe_cut(range(12, 20), many).startswith("ranks 12, 13, 14, 15 and 4 more cannot be reached")


def test_the_network_is_asked_only_where_all_ranks_wait() -> None:
    assert all_wait(0, {0: waits("a", 0, 1), 1: waits("a", 0, 1)})
    assert all_wait(0, {0: waits("a", 0, 1), 1: waits("b", 0, 1)}), "one got through what the other did not"
    assert not all_wait(0, {0: waits("a", 0, 1)})
    assert not all_wait(0, {0: waits("a", 0, 1), 1: BUSY})


def test_of_many_a_few_are_named() -> None:
    words = describe_wait(0, {0: waits("a", *range(1000))})
    assert words.endswith("rank 4 did not arrive; and 995 more")


def test_a_stand_survives_its_record() -> None:
    stand = waits("a", 3, 4, host="east")
    assert Stand.read({**stand.record(), "ranks": [3, 4]}) == stand
