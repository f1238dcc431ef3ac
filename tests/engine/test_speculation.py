"""Drafts come from what followed the same tokens before, and stop where they are not worth it."""

from kestrel.engine.speculation import Drafter


def test_a_draft_is_what_followed_the_last_tokens_before() -> None:
    drafter = Drafter(8)
    text = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3]
    assert drafter.propose(text, 9) == [4, 5]
    drafter.learn(2, 2)
    assert drafter.propose([*text, 4, 5], 9) == [6, 9, 1, 2]
    drafter.learn(4, 4)
    assert drafter.propose([*text, 4, 5, 6], 3) == [9, 1, 2]


def test_the_latest_occurrence_counts_and_the_end_never_finds_itself() -> None:
    assert Drafter(2).propose([1, 2, 7, 7, 1, 2, 8, 8, 1, 2], 9) == [8, 8]
    assert Drafter(2).propose([1, 2, 3], 9) == []
    assert Drafter(2).propose([5, 5, 5], 9) == [5]


def test_wrong_drafts_make_pauses_that_grow_and_right_ones_end_them() -> None:
    drafter = Drafter(4)
    text = [1, 2, 3] * 5
    proposed = []
    for _ in range(40):
        draft = drafter.propose(text, 9)
        proposed.append(bool(draft))
        drafter.learn(len(draft), 0)
    assert sum(proposed) == 5  # then pauses of 2, 4, 8, 16, …
    drafter = Drafter(4)
    drafter.learn(2, 0)
    drafter.learn(2, 1)
    assert [bool(drafter.propose(text, 9)) for _ in range(3)] == [False, False, True]


def test_nothing_is_drafted_when_switched_off_or_without_room() -> None:
    assert Drafter(0).propose([1, 2, 1, 2], 9) == []
    assert Drafter(4).propose([1, 2, 1, 2], 0) == []
