"""When a component counts as hanging, from observations and their times."""

from rljob.local.watchdog import HangDetector


def observe(patience, *observations):
    """Return the result of each observation (now, beat, stopped)."""
    detector = HangDetector(patience, now=0.0)
    return [detector.observe(*each) for each in observations]


def test_an_unchanged_heartbeat_counts_as_hanging_after_the_patience():
    assert observe(10, (1, 7, False), (5, 7, False), (9, 7, False), (11, 7, False)) == [False, False, False, True]


def test_a_beat_resets_the_patience():
    assert not any(observe(10, (4, 7, False), (8, 8, False), (12, 8, False), (16, 8, False), (17, 8, False)))


def test_before_the_first_beat_only_a_stopped_process_counts():
    assert not any(observe(10, *((4 * i, 0, False) for i in range(10))))
    assert observe(10, (4, 0, True), (8, 0, True), (12, 0, True)) == [False, False, True]


def test_a_stopped_child_counts_even_if_the_parent_beats():
    assert observe(10, (4, 1, True), (8, 2, True), (12, 3, True)) == [False, False, True]


def test_time_in_which_the_supervisor_did_not_run_is_not_counted():
    """`rljob run` itself was stopped, or the machine was suspended."""
    assert observe(10, (1, 7, False), (4, 7, False), (100, 7, False), (104, 7, False)) == [False] * 4
    assert observe(10, (1, 7, False), (100, 7, False), (104, 7, False), (108, 7, False), (111, 7, False))[-1]
