"""Why pods are not ready, in words that a user can act on."""

import pytest

from rljob.operator.api_types import Terminated
from rljob.operator.planning import container_exits, pod_diagnosis
from rljob.operator.planning.timestamps import instant

from .world import World, put

NO_GPU = (
    "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/3 nodes are "
    "available: 3 Preemption is not helpful for scheduling."
)


@pytest.fixture
def world():
    made = World(rollouts=[{"name": "main", "replicas": {"min": 4}}])
    made.run_up()
    return made


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (NO_GPU, "insufficient nvidia.com/gpu"),
        ("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", "insufficient nvidia.com/gpu"),
        (
            "0/5 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/unreachable: }, "
            "4 Insufficient cpu. preemption: 0/5 nodes are available",
            "had untolerated taint {node.kubernetes.io/unreachable: }, insufficient cpu",
        ),
        (
            "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.",
            "didn't match Pod's node affinity/selector",
        ),
        ("0/1 nodes are available: 1 node(s) were unschedulable.", "nodes are cordoned"),
        ("no nodes available to schedule pods", "there are no nodes"),
        ("0/0 nodes are available.", "there are no nodes"),
        ("something new.", "something new"),
        ("", "no node was found yet"),
    ],
)
def test_what_the_scheduler_says_without_its_counts(message, text):
    assert pod_diagnosis.scheduling(message) == text


def test_pods_that_find_no_node_are_counted(world):
    world.unschedulable(NO_GPU, *[pod.metadata.name for pod in world.find("rollout")[:2]])
    world.settle()
    text = "2 of 4 rollout-main pods pending: insufficient nvidia.com/gpu"
    assert world.condition("Ready") == ("False", "PodsPending", text)
    assert world.role("rollout-main").summary == text
    assert world.status.ready.rollout == "2/4"


@pytest.mark.parametrize(
    ("reason", "message", "text"),
    [
        (
            "ImagePullBackOff",
            'Back-off pulling image "reg/rollout:1": ErrImagePull: rpc error: code = NotFound desc = failed to pull '
            'and unpack image "reg/rollout:1": failed to resolve reference: not found',
            "failed to resolve reference: not found",
        ),
        (
            "ErrImagePull",
            'rpc error: code = NotFound desc = failed to pull and unpack image "reg/rollout:1": '
            "failed to resolve reference: not found",
            "failed to resolve reference: not found",
        ),
        ("InvalidImageName", 'couldn\'t parse image name "A B"', 'couldn\'t parse image name "A B"'),
        ("ErrImageNeverPull", "", "ErrImageNeverPull"),
        (
            "ErrImageNeverPull",
            'Container image "reg/rollout:1" is not present with pull policy of Never',
            'Container image "reg/rollout:1" is not present with pull policy of Never',
        ),
        (
            "InvalidImageName",
            'Failed to apply default image tag "A B": couldn\'t parse image name "A B": invalid reference format',
            'Failed to apply default image tag "A B": couldn\'t parse image name "A B": invalid reference format',
        ),
        (
            "ErrImagePull",
            'failed to pull and unpack image "reg/rollout:1": failed to resolve reference "reg/rollout:1": failed to do'
            ' request: Head "https://reg/v2/rollout/manifests/1": dial tcp: lookup reg on 10.96.0.10:53: no such host',
            'failed to resolve reference "reg/rollout:1": failed to do request: Head '
            '"https://reg/v2/rollout/manifests/1": dial tcp: lookup reg on 10.96.0.10:53: no such host',
        ),
    ],
)
def test_an_image_that_cannot_be_pulled_is_named(world, reason, message, text):
    world.waiting(reason, message, "rollout")
    world.settle()
    said = f"image rljob-rollout of rollout-main cannot be pulled: {text}; correct its name or pull secret"
    assert world.condition("Ready") == ("False", "ImagePullFailed", said)


def test_a_container_that_cannot_be_made_says_why(world):
    world.waiting("CreateContainerConfigError", 'secret "keys" not found', "reward")
    world.settle()
    assert world.condition("Ready")[1:] == (
        "ContainerCreateFailed",
        '1 of 1 reward-exact pod waiting: secret "keys" not found',
    )


def test_a_container_that_ends_again_and_again_says_how_and_its_last_words(world):
    world.exit("runner", 1, message="Traceback\nImportError: no module x", fatal=False)
    world.waiting("CrashLoopBackOff", "back-off 5m0s restarting", "runner")
    world.settle()
    assert world.condition("Ready")[1:] == (
        "CrashLoop",
        "1 of 1 runner pod crashing: exit code 1: ImportError: no module x",
    )
    assert world.role("runner").restarts == 1
    assert world.role("runner").last_exit == "exit code 1"


@pytest.mark.parametrize(
    ("storage_class", "said"),
    [
        (None, "the cluster has no default storage class; set the chart's jobs.storage.className, or make a new job"),
        ("fast", "storage class fast has given no volume of 10Gi with ReadWriteMany yet"),
    ],
)
def test_a_claim_that_is_not_bound_is_named(world, storage_class, said):
    claim = world.children["PersistentVolumeClaim", "sums-storage"].body
    claim["spec"]["storageClassName"] = storage_class
    claim["status"] = {"phase": "Pending"}
    world.unschedulable("0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.", "trainer")
    world._rendering.forget("uid")
    made = world.decide()
    ready = made.status.conditions[0]
    assert ready.reason == "VolumeClaimPending"
    assert f"claim sums-storage is not bound: {said}" in ready.message


def test_a_claim_that_is_not_there_is_named(world):
    world.unschedulable('persistentvolumeclaim "mine" not found', "trainer")
    world.settle()
    assert world.why == "VolumeClaimPending"
    assert "claim mine is not there; make it, or correct the template that names it" in world.condition("Ready")[2]


@pytest.mark.parametrize(
    ("message", "reason", "text"),
    [
        (
            'pods "sums-runner-abc-x1z2y" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, '
            "used: requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=8",
            "QuotaExceeded",
            "exceeded quota: gpus",
        ),
        (
            'pods "sums-runner-abc-x1z2y" is forbidden: violates PodSecurity "restricted:latest": privileged',
            "PodsForbidden",
            'violates PodSecurity "restricted:latest": privileged',
        ),
        (
            'pods "sums-runner-abc-" is forbidden: no PriorityClass with name high was found',
            "PodsForbidden",
            "no PriorityClass with name high was found",
        ),
        (
            'pods "sums-runner-abc-" is forbidden: error looking up service account default/me: serviceaccount "me" '
            "not found",
            "PodsForbidden",
            'serviceaccount "me" not found',
        ),
    ],
)
def test_pods_that_may_not_be_made_say_why(world, message, reason, text):
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    world.children["Deployment", "sums-runner"].body["status"]["conditions"] = [failure]
    world.pods = {name: pod for name, pod in world.pods.items() if "runner" not in name}
    world.settle()
    assert world.why == reason
    assert world.role("runner").summary.startswith("1 of 1 runner pod refused: ")
    assert text in world.role("runner").summary
    assert "x1z2y" not in world.role("runner").summary  # another at every try


def test_a_message_of_any_length_fits_into_the_status(world):
    world.waiting("ErrImagePull", "x" * 9000, "runner")
    world.settle()
    assert len(world.role("runner").summary) == len(world.condition("Ready")[2]) == 4096


def test_the_worst_reason_is_told_and_the_rest_are_counted(world):
    world.unschedulable(NO_GPU, "trainer")
    world.waiting("ErrImagePull", "not found", "runner")
    world.waiting("ContainerCreating", "", "reward")
    world.settle()
    message = world.condition("Ready")[2]
    assert world.why == "ImagePullFailed"
    assert message.startswith("image rljob-runner of runner cannot be pulled: not found")
    assert message.endswith("; 1 more role is not ready")  # the reward is merely starting


def test_an_engine_beyond_the_least_does_not_make_a_run_unready():
    world = World()
    world.run_up()
    world.scale("rollout-main", 4)
    world.settle()
    world.make_pods()
    world.unschedulable(NO_GPU, "elastic")
    world.settle()
    text = "all roles are ready; 2 of 4 rollout-main pods pending: insufficient nvidia.com/gpu"
    assert world.condition("Ready") == ("True", "Running", text)
    assert world.status.pending_since is None


def test_a_deployment_that_has_not_seen_its_newest_spec_is_not_ready(world):
    child = world.children["Deployment", "sums-runner"]
    put(child.metadata, generation=child.metadata.generation + 1)
    world.settle()
    assert world.condition("Ready")[:2] == ("False", "PodsNotReady")
    assert "being replaced" in world.condition("Ready")[2]


def test_a_deployment_that_is_scaled_stays_ready():
    world = World(runner={"replicas": {"min": 1, "max": 3}})
    world.run_up()
    world.scale("runner", 3)
    world.settle()
    assert world.children["Deployment", "sums-runner"].metadata.generation == 2  # which it has not seen yet
    assert world.condition("Ready")[:2] == ("True", "Running")
    assert world.role("runner").summary == "2 of 3 runner pods not made yet"


def test_a_deployment_that_is_rolled_out_is_not_ready(world):
    world.children["Deployment", "sums-rollout-main"].body["status"]["updatedReplicas"] = 1
    world.settle()
    assert world.why == "PodsNotReady"


def test_pods_that_are_going_do_not_count(world):
    pod = world.find("runner")[0]
    put(pod.metadata, deletion_timestamp=instant(world.now))
    world.settle()
    assert world.role("runner").ready == 0


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (Terminated(137, reason="OOMKilled"), "exit code 137 (OOMKilled)"),
        (Terminated(137, reason="Error"), "killed by signal 9"),
        (Terminated(0, signal=9), "killed by signal 9"),
        (Terminated(1, reason="Error"), "exit code 1"),
        (Terminated(255, reason="Error"), "exit code 255"),
        (Terminated(0, reason="Completed"), "exit code 0"),
        (Terminated(128, reason="StartError"), "exit code 128 (StartError)"),
    ],
)
def test_an_exit_in_words(end, text):
    assert container_exits.describe(end) == text


def test_memory_that_was_used_up_is_said_with_what_to_do_about_it(world):
    end = Terminated(137, reason="OOMKilled", message="loading\nlast words\n")
    advice = "its memory limit was reached; raise it in the role's template or the namespace's LimitRange"
    text = f"exit code 137 (OOMKilled): {advice}"
    assert container_exits.with_last_line(end) == f"{text}: last words"
    assert container_exits.with_log_end(end) == f"{text}: loading\nlast words"
    world.exit("trainer", 137, reason="OOMKilled")
    world.fail_job()
    world.settle()
    assert text in world.condition("Ready")[2]
    assert world.role("trainer").last_exit == "exit code 137 (OOMKilled)"


def test_restarts_are_counted_once_also_when_a_pod_is_replaced(world):
    for _ in range(3):
        world.exit("runner", 1, fatal=False)
        world.settle()
    world.settle()
    assert world.role("runner").restarts == 3
    world.pods = {name: pod for name, pod in world.pods.items() if "runner" not in name}
    world.settle()
    world.make_pods()
    world.ready()
    world.settle()
    assert (world.role("runner").restarts, world.role("runner").counted) == (3, 0)
    world.exit("runner", 1, fatal=False)
    world.settle()
    assert world.role("runner").restarts == 4
    assert world.role("runner").last_exit == "exit code 1"


@pytest.mark.parametrize("role", ["runner", "coordinator", "reward", "rollout"])
def test_exit_code_2_of_any_part_ends_the_run(world, role):
    name = world.find(role)[0].metadata.name
    world.exit(name, 2, message="no such reward", fatal=False)
    world.settle()
    assert world.condition("Failed")[1] == "ConfigurationError"
    assert world.condition("Failed")[2].endswith("refuses its configuration: exit code 2: no such reward")


@pytest.mark.parametrize(("form", "reason"), [({"function": "mine:reward"}, "ConfigurationError"), ({}, "")])
def test_exit_code_2_of_a_reward_ends_the_run_where_rljob_s_program_serves_it(form, reason):
    template = {"spec": {"containers": [{"name": "main", "image": "mine"}]}}
    world = World(rewards=[{"name": "exact", "template": template, **form}])
    world.run_up()
    world.exit(world.find("reward")[0].metadata.name, 2, message="no such option", fatal=False)
    world.settle()
    assert world.condition("Failed")[1] == reason


def test_a_part_that_dies_too_often_ends_the_run():
    world = World(failurePolicy={"maxRestarts": 2})
    world.run_up()
    for _ in range(3):
        assert world.condition("Failed")[0] == ""
        world.exit("runner", 1, fatal=False)
        world.settle()
    assert world.condition("Failed")[1] == "MaxRestartsExceeded"


def test_deaths_of_a_part_that_lives_long_are_forgiven():
    world = World(failurePolicy={"maxRestarts": 2})
    world.run_up()
    for _ in range(8):
        world.now += 601
        world.exit("runner", 1, fatal=False)
        world.settle()
    assert world.condition("Failed")[0] == ""


def test_pods_that_wait_too_long_for_a_node_fail_the_run():
    world = World(failurePolicy={"pendingSeconds": 300})
    world.run_up()
    world.unschedulable(NO_GPU, "trainer")
    assert world.settle().after == 300
    assert world.status.pending_since
    world.now += 299
    world.settle()
    world.now += 1
    world.settle()
    assert world.condition("Failed")[1] == "PendingTimeout"


def test_a_pod_that_finds_its_node_ends_the_waiting():
    world = World(failurePolicy={"pendingSeconds": 300})
    world.run_up()
    world.unschedulable(NO_GPU, "trainer")
    world.settle()
    world.ready()
    world.now += 400
    world.settle()
    assert world.status.pending_since is None
    assert world.why == "Running"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            '0/3 nodes are available: persistentvolumeclaim "mine" not found. not found',
            "claim mine is not there; make it, or make a new job with another spec.storage.claim",
        ),
        (
            'persistentvolumeclaim "mine" not found',
            "claim mine is not there; make it, or make a new job with another spec.storage.claim",
        ),
        (
            "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found",
            "claim mine (spec.storage.claim) is not bound: kubectl describe pvc mine tells why",
        ),
        (
            "0/1 nodes are available: 1 node(s) didn't find available persistent volumes to bind. preemption: 0/1",
            "claim mine (spec.storage.claim) is not bound: kubectl describe pvc mine tells why",
        ),
        (
            '0/1 nodes are available: persistentvolumeclaim "mine" is being deleted. not found',
            "claim mine is being deleted",
        ),
        (
            '0/1 nodes are available: persistentvolumeclaim "mine" bound to non-existent persistentvolume "pv". gone',
            'claim mine bound to non-existent persistentvolume "pv"',
        ),
    ],
)
def test_a_claim_of_the_users_that_cannot_be_used_is_named(message, text):
    world = World(storage={"claim": "mine"})
    world.settle()
    world.make_pods()
    world.unschedulable(message, "coordinator")
    world.settle()
    assert world.condition("Ready")[1] == "VolumeClaimPending"
    assert world.condition("Ready")[2].startswith(f"1 of 1 coordinator pod pending: {text}")


def test_a_claim_of_a_template_that_is_not_bound_is_said_to_be_one(world):
    world.unschedulable("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.", "runner")
    claim = world.children["PersistentVolumeClaim", "sums-storage"].body
    claim["status"] = {"phase": "Bound"}
    world.settle()
    text = "1 of 1 runner pod pending: a claim of the pod's template is not bound: kubectl describe pvc tells why"
    assert world.condition("Ready")[1:] == ("VolumeClaimPending", text)


@pytest.mark.parametrize(
    ("reason", "message", "said"),
    [
        ("ErrImagePull", "not found", ("ImagePullFailed", "image rljob-trainer of initializer cannot be pulled")),
        ("ErrImageNeverPull", "", ("ImagePullFailed", "image rljob-trainer of initializer cannot be pulled")),
        ("CreateContainerConfigError", 'secret "k" not found', ("ContainerCreateFailed", 'secret "k" not found')),
    ],
)
def test_what_keeps_an_initializer_is_said_at_once(reason, message, said):
    world = World(initializer={"command": ["make"]})
    world.settle()
    world.make_pods()
    world.waiting(reason, message, "initializer")
    world.settle()
    assert world.condition("Ready")[1] == said[0]
    assert said[1] in world.condition("Ready")[2]


def test_a_model_that_is_not_there_ends_the_run_in_its_parts_words():
    """Nothing makes it, so no restart helps: engine or trainer, whichever looks first."""
    for role in ("rollout", "trainer"):
        world = World()
        world.settle()
        world.make_pods()
        sentence = "models: /var/lib/rljob/model holds no Hugging Face model (no config.json); check source"
        world.exit(world.find(role)[0].metadata.name, 2, message=sentence, fatal=role == "trainer")
        if role == "trainer":
            world.fail_job(
                "PodFailurePolicy", "Container main for pod ns/x failed with exit code 2 matching FailJob rule"
            )
        world.settle()
        assert world.condition("Failed")[1] == "ConfigurationError"
        assert sentence in world.condition("Failed")[2]
