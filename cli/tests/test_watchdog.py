"""When a component counts as hanging: by what is seen of it and when."""

from rljob.local.watchdog import HangDetector


def looks(patience, *seen):
    """Return what each look says; a look is (now, beat, stopped)."""
    detector = HangDetector(patience, now=0.0)
    return [detector.observe(*look) for look in seen]


def test_a_heartbeat_that_stands_still_is_too_long_after_the_patience():
    assert looks(10, (1, 7, False), (5, 7, False), (9, 7, False), (11, 7, False)) == [False, False, False, True]


def test_a_beat_begins_the_patience_again():
    assert not any(looks(10, (4, 7, False), (8, 8, False), (12, 8, False), (16, 8, False), (17, 8, False)))


def test_before_the_first_beat_only_a_stopped_process_counts():
    assert not any(looks(10, *((4 * i, 0, False) for i in range(10))))
    assert looks(10, (4, 0, True), (8, 0, True), (12, 0, True)) == [False, False, True]


def test_a_stopped_child_counts_although_the_parent_beats():
    assert looks(10, (4, 1, True), (8, 2, True), (12, 3, True)) == [False, False, True]


def test_one_who_did_not_look_blames_nobody():
    """`rljob run` itself was stopped, or the machine was asleep."""
    assert looks(10, (1, 7, False), (4, 7, False), (100, 7, False), (104, 7, False)) == [False] * 4
    assert looks(10, (1, 7, False), (100, 7, False), (104, 7, False), (108, 7, False), (111, 7, False))[-1]
