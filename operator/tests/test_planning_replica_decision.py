"""The built-in autoscaler: windows, bounds, no flapping, and when it keeps off."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.operator.planning.replica_decision import decide, policies, replicas_for
from rljob.operator.scale_policy import LoadPoint, ScalePolicy

from .world import World

POLICY = ScalePolicy(target=10, minimum=1, maximum=8, out_seconds=30, in_seconds=300)
STEP = 10.0


def history(*loads, step=STEP):
    """Return points that end now, at 0."""
    return [LoadPoint((i - len(loads) + 1) * step, load) for i, load in enumerate(loads)]


@pytest.mark.parametrize(
    ("loads", "current", "replicas"),
    [
        ([], 3, 3),
        ([90], 1, 1),  # one point covers no window
        ([90, 90, 90], 1, 1),  # 20 s
        ([35, 35, 35, 35], 1, 4),  # 30 s
        ([90, 90, 90, 90], 1, 5),  # one step adds 4 at most
        ([90, 90, 90, 90], 6, 8),
        ([10, 90, 90, 90], 1, 1),  # the load rose 20 s ago
        ([90, 90, 35, 90], 1, 4),  # the lowest
        ([20] * 30, 5, 5),  # 290 s
        ([20] * 31, 5, 2),
        ([20] * 30 + [50], 5, 5),
        ([30] + [20] * 31, 5, 2),
        ([0] * 31, 5, 1),
        ([54] * 40, 5, 5),  # within the tolerance
        ([46] * 40, 5, 5),
        ([900] * 40, 8, 8),
    ],
)
def test_a_load_must_last_for_a_window(loads, current, replicas):
    assert decide(history(*loads), current, POLICY, 0.0) == replicas


@pytest.mark.parametrize(("loads", "current", "replicas"), [([1], 0, 1), ([0], 0, 0), ([70], 0, 4), ([0] * 31, 2, 0)])
def test_a_role_without_pods_gets_one_at_once_and_the_last_goes_after_the_window(loads, current, replicas):
    policy = ScalePolicy(target=10, minimum=0, maximum=8, out_seconds=30, in_seconds=300)
    assert decide(history(*loads), current, policy, 0.0) == replicas


def test_an_environment_shrinks_only_without_episodes():
    policy = ScalePolicy(target=10, minimum=1, maximum=8, out_seconds=30, in_seconds=300, idle_only=True)
    assert decide(history(*[5] * 40), 3, policy, 0.0) == 3
    assert decide(history(*[5] * 40, 0), 3, policy, 0.0) == 1


LOADS = st.lists(st.floats(0, 1000), min_size=1, max_size=60)
POLICIES = st.builds(
    lambda target, least, more, out, fewer: ScalePolicy(target, least, least + more, out, fewer),
    st.integers(1, 100), st.integers(0, 4), st.integers(1, 20), st.integers(0, 120), st.integers(0, 400),
)  # fmt: skip


@given(LOADS, POLICIES, st.integers(0, 30))
def test_a_decision_is_within_the_bounds(loads, policy, current):
    current = policy.clamp(current)
    assert policy.minimum <= decide(history(*loads), current, policy, 0.0) <= policy.maximum


@given(
    st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 1000)), min_size=1, max_size=60), POLICIES, st.integers(0, 9)
)
def test_a_higher_load_never_gives_fewer_replicas(pairs, policy, current):
    current = policy.clamp(current)
    low, high = (history(*(choose(pair) for pair in pairs)) for choose in (min, max))
    assert decide(low, current, policy, 0.0) <= decide(high, current, policy, 0.0)


def play(loads, policy, current=1):
    """Return (time, replicas) of every change while a load per step is sampled."""
    changes, points = [], []
    for i, load in enumerate(loads):
        now = i * STEP
        points.append(LoadPoint(now, load))
        decided = decide(points, current, policy, now)
        if decided != current:
            changes.append((now, decided))
            current, points = decided, []
    return changes


@given(st.floats(0, 200), POLICIES, st.integers(0, 30))
def test_a_constant_load_ends_at_the_replicas_that_it_needs_and_stays(load, policy, current):
    changes = play([load] * 500, policy, policy.clamp(current))
    last = changes[-1][1] if changes else policy.clamp(current)
    assert last == policy.clamp(replicas_for(load, policy.target, last))
    directions = [after > before for (_, before), (_, after) in itertools.pairwise(changes)]
    assert len(set(directions)) <= 1, "it goes one way only"
    assert not changes or changes[-1][0] < 450 * STEP


@given(st.lists(st.floats(0, 1000), max_size=300), POLICIES)
def test_two_changes_are_never_closer_than_a_window(loads, policy):
    changes = play(loads, policy, policy.minimum)
    before, at = policy.minimum, -math.inf
    for now, after in changes:
        window = policy.out_seconds if after > before else policy.in_seconds
        assert now - at >= window or before == 0
        before, at = after, now


@given(st.randoms(use_true_random=False), st.integers(2, 7))
def test_noise_around_what_the_replicas_are_for_changes_nothing(random, replicas):
    loads = [10 * replicas * random.uniform(0.5, 1.5) for _ in range(200)]
    for i in range(0, 200, 3):  # noise has no long run on one side
        loads[i] = 10 * replicas
    assert play(loads, POLICY, replicas) == []


def test_a_wave_that_is_shorter_than_the_window_for_less_is_answered_once():
    wave = ([70] * 10 + [5] * 10) * 20
    assert [after for _, after in play(wave, POLICY)] == [5, 7]


# --- in a plan --------------------------------------------------------------------------------------------------------

REWARD = {"name": "exact", "builtin": "reasoning_gym", "replicas": {"min": 1, "max": 4}}


@pytest.fixture
def world():
    made = World(rewards=[REWARD])
    made.run_up()
    return made


def decision(world, load, **observed):
    """Return the plan with a load of the reward for ten minutes."""
    points = {"reward-exact": [LoadPoint(world.now - 600 + i, load) for i in range(601)]}
    return world.decide(loads=points, **observed)


def test_a_plan_scales_a_role_and_says_why(world):
    made = decision(world, 30)
    assert made.scales == {"reward-exact": 4}
    assert [(event.reason, event.message) for event in made.events] == [
        ("ScaledOut", "reward-exact: 1 → 4 replicas, for a load of 30, 8 for each")
    ]
    assert made.desired == world.decide().desired, "the Deployment follows the RLJobScale"
    world.scale("reward-exact", 4)
    world.settle()
    assert world.children["Deployment", "sums-reward-exact"].body["spec"]["replicas"] == 4
    made = decision(world, 10)
    assert (made.scales, made.events[0].reason) == ({"reward-exact": 2}, "ScaledIn")


def test_roles_with_a_range_are_sampled_while_the_run_is_active(world):
    assert set(world.decide().sampled) == {"reward-exact", "rollout-main"}
    for state in ("Starting", "Finishing", "Succeeded"):
        world.tell(state=state)
        assert decision(world, 30).scales == world.decide().sampled == {}


def test_a_role_whose_scale_is_created_again_is_sampled_from_then_on(world):
    """The operator hears no event of the RLJobScale that it creates, so no later plan would begin."""
    world.scale("reward-exact", 2)
    world.settle()
    del world.children["RLJobScale", "sums-reward-exact"]
    made = decision(world, 30, scales={})
    assert made.scales == {}, "it does not exist yet"
    assert made.sampled["reward-exact"].replicas == 2


def test_nothing_is_decided_while_the_coordinator_that_writes_the_load_is_away(world):
    world.waiting("CrashLoopBackOff", "", "coordinator")
    assert decision(world, 30).scales == world.decide().sampled == {}


def test_the_autoscaler_keeps_off_when_something_else_sets_the_replicas(world):
    owned = {"scale_owners": {"reward-exact": "kubectl"}}
    made = decision(world, 30, **owned)
    assert made.scales == {} and "reward-exact" not in made.sampled
    status = {each["metadata"]["name"]: each.get("status", {}) for each in made.desired if each["kind"] == "RLJobScale"}
    assert status["sums-reward-exact"]["message"] == (
        "kubectl has set the replicas, so the built-in autoscaler does not; delete this RLJobScale to give them back"
    )
    assert "message" not in status["sums-rollout-main"]


@pytest.mark.parametrize(
    "autoscaling", [{"provider": "none"}, {"provider": "keda", "keda": {"serverAddress": "http://p"}}]
)
def test_another_provider_has_no_built_in_autoscaler(autoscaling):
    world = World(rewards=[REWARD | {"autoscaling": autoscaling}])
    world.run_up()
    assert decision(world, 30).scales == {}
    assert decision(world, 30, scale_owners={"reward-exact": "keda"}).desired == world.decide().desired


def test_engines_that_go_to_the_gang_are_not_scaled(world):
    world.unschedulable("Insufficient nvidia.com/gpu", "trainer")
    world.now += 60
    assert decision(world, 30).scales == {}


def test_every_role_has_its_target():
    world = World(
        rewards=[REWARD | {"processes": 3}],
        environments=[{"name": "lake", "builtin": "frozen_lake", "replicas": {"min": 0, "max": 2}}],
        runner={"replicas": {"max": 3}, "autoscaling": {"targetInFlight": 7, "scaleInSeconds": 5}},
    )
    found = policies(world.observe().job.spec)
    assert {role: policy.target for role, policy in found.items()} == {
        "reward-exact": 24, "environment-lake": 256, "rollout-main": 1, "runner": 7,
    }  # fmt: skip
    assert found["environment-lake"].idle_only and not found["runner"].idle_only
    assert found["runner"].in_seconds == 5
