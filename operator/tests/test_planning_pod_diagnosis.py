"""Messages on pods that are not ready."""

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
        ("0/3 nodes are unavailable: 3 Insufficient nvidia.com/gpu.", "insufficient nvidia.com/gpu"),  # Volcano
        ("all nodes are unavailable: 3 Insufficient nvidia.com/gpu.", "insufficient nvidia.com/gpu"),
        ("no nodes available to schedule pods", "there are no nodes"),
        ("0/0 nodes are available.", "there are no nodes"),
        ("something new.", "something new"),
        ("", "no node was found yet"),
    ],
)
def test_scheduler_messages_are_shown_without_counts(message, text):
    assert pod_diagnosis.scheduling(message) == text


def test_unschedulable_pods_are_counted(world):
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
    text = f"image rljob-rollout of rollout-main cannot be pulled: {text}; correct its name or pull secret"
    assert world.condition("Ready") == ("False", "ImagePullFailed", text)


def test_a_container_that_cannot_be_created_has_a_cause(world):
    world.waiting("CreateContainerConfigError", 'secret "keys" not found', "reward")
    world.settle()
    assert world.condition("Ready")[1:] == (
        "ContainerCreateFailed",
        '1 of 1 reward-exact pod waiting: secret "keys" not found',
    )


def test_a_crash_loop_shows_the_exit_and_the_last_line(world):
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
    ("storage_class", "text"),
    [
        (None, "the cluster has no default storage class; set the chart's jobs.storage.className, or create a new job"),
        ("fast", "storage class fast has not provisioned a volume of 10Gi with ReadWriteMany yet"),
    ],
)
def test_a_claim_that_is_not_bound_is_named(world, storage_class, text):
    claim = world.children["PersistentVolumeClaim", "sums-storage"].body
    claim["spec"]["storageClassName"] = storage_class
    claim["status"] = {"phase": "Pending"}
    world.unschedulable("0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.", "trainer")
    world._rendering.forget("uid")
    made = world.decide()
    ready = made.status.conditions[0]
    assert ready.reason == "VolumeClaimPending"
    assert f"claim sums-storage is not bound: {text}" in ready.message


def test_a_missing_claim_is_named(world):
    world.unschedulable('persistentvolumeclaim "mine" not found', "trainer")
    world.settle()
    assert world.why == "VolumeClaimPending"
    assert "claim mine does not exist; create it, or correct the template that names it" in world.condition("Ready")[2]


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
def test_refused_pods_have_a_cause(world, message, reason, text):
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    world.children["Deployment", "sums-runner"].body["status"]["conditions"] = [failure]
    world.pods = {name: pod for name, pod in world.pods.items() if "runner" not in name}
    world.settle()
    assert world.why == reason
    assert world.role("runner").summary.startswith("1 of 1 runner pod refused: ")
    assert text in world.role("runner").summary
    assert "x1z2y" not in world.role("runner").summary  # it differs at every try


def test_a_message_of_any_length_fits_into_the_status(world):
    world.waiting("ErrImagePull", "x" * 9000, "runner")
    world.settle()
    assert len(world.role("runner").summary) == len(world.condition("Ready")[2]) == 4096


def test_the_worst_reason_is_shown_and_the_others_are_counted(world):
    world.unschedulable(NO_GPU, "trainer")
    world.waiting("ErrImagePull", "not found", "runner")
    world.waiting("ContainerCreating", "", "reward")
    world.settle()
    message = world.condition("Ready")[2]
    assert world.why == "ImagePullFailed"
    assert message.startswith("image rljob-runner of runner cannot be pulled: not found")
    assert message.endswith("; 1 more role is not ready")  # the reward is only starting


def test_an_engine_above_the_minimum_does_not_affect_readiness():
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


def test_a_deployment_with_an_outdated_observed_generation_is_not_ready(world):
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
    assert world.children["Deployment", "sums-runner"].metadata.generation == 2  # not observed yet
    assert world.condition("Ready")[:2] == ("True", "Running")
    assert world.role("runner").summary == "2 of 3 runner pods not created yet"


def test_a_deployment_that_is_rolled_out_is_not_ready(world):
    world.children["Deployment", "sums-rollout-main"].body["status"]["updatedReplicas"] = 1
    world.settle()
    assert world.why == "PodsNotReady"


def test_pods_with_a_deletion_timestamp_do_not_count(world):
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
def test_exits_are_described(end, text):
    assert container_exits.describe(end) == text


def test_control_characters_of_a_termination_message_are_escaped():
    end = Terminated(1, message="\x1b[2Jloading\n\x1b]0;title\x07last words\n")
    assert container_exits.with_last_line(end) == r"exit code 1: \x1b]0;title\x07last words"
    assert container_exits.with_log_end(end) == "exit code 1: \\x1b[2Jloading\n\\x1b]0;title\\x07last words"


def test_an_oom_kill_is_reported_with_a_remedy(world):
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


def test_restarts_are_counted_once_even_if_a_pod_is_replaced(world):
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
def test_exit_code_2_of_any_role_ends_the_run(world, role):
    name = world.find(role)[0].metadata.name
    world.exit(name, 2, message="no such reward", fatal=False)
    world.settle()
    assert world.condition("Failed")[1] == "ConfigurationError"
    assert world.condition("Failed")[2].endswith("rejects its configuration: exit code 2: no such reward")


@pytest.mark.parametrize(("form", "reason"), [({"function": "mine:reward"}, "ConfigurationError"), ({}, "")])
def test_exit_code_2_of_a_reward_ends_the_run_if_rljob_serves_it(form, reason):
    template = {"spec": {"containers": [{"name": "main", "image": "mine"}]}}
    world = World(rewards=[{"name": "exact", "template": template, **form}])
    world.run_up()
    world.exit(world.find("reward")[0].metadata.name, 2, message="no such option", fatal=False)
    world.settle()
    assert world.condition("Failed")[1] == reason


def test_a_role_that_exceeds_max_restarts_ends_the_run():
    world = World(failurePolicy={"maxRestarts": 2})
    world.run_up()
    for _ in range(3):
        assert world.condition("Failed")[0] == ""
        world.exit("runner", 1, fatal=False)
        world.settle()
    assert world.condition("Failed")[1] == "MaxRestartsExceeded"


def test_the_lifetime_of_a_pod_offsets_its_restarts():
    world = World(failurePolicy={"maxRestarts": 2})
    world.run_up()
    for _ in range(8):
        world.now += 601
        world.exit("runner", 1, fatal=False)
        world.settle()
    assert world.condition("Failed")[0] == ""


def test_pods_that_are_pending_too_long_fail_the_run():
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


def test_a_scheduled_pod_ends_the_pending_time():
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
            "claim mine does not exist; create it, or create a new job with another spec.storage.claim",
        ),
        (
            'persistentvolumeclaim "mine" not found',
            "claim mine does not exist; create it, or create a new job with another spec.storage.claim",
        ),
        (
            "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found",
            "claim mine (spec.storage.claim) is not bound: kubectl describe pvc mine shows the reason",
        ),
        (
            "0/1 nodes are available: 1 node(s) didn't find available persistent volumes to bind. preemption: 0/1",
            "claim mine (spec.storage.claim) is not bound: kubectl describe pvc mine shows the reason",
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
def test_an_unusable_claim_of_the_user_is_named(message, text):
    world = World(storage={"claim": "mine"})
    world.settle()
    world.make_pods()
    world.unschedulable(message, "coordinator")
    world.settle()
    assert world.condition("Ready")[1] == "VolumeClaimPending"
    assert world.condition("Ready")[2].startswith(f"1 of 1 coordinator pod pending: {text}")


def test_an_unbound_claim_of_a_template_is_named(world):
    world.unschedulable("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.", "runner")
    claim = world.children["PersistentVolumeClaim", "sums-storage"].body
    claim["status"] = {"phase": "Bound"}
    world.settle()
    text = (
        "1 of 1 runner pod pending: a claim of the pod's template is not bound: kubectl describe pvc shows the reason"
    )
    assert world.condition("Ready")[1:] == ("VolumeClaimPending", text)


@pytest.mark.parametrize(
    ("reason", "message", "text"),
    [
        ("ErrImagePull", "not found", ("ImagePullFailed", "image rljob-trainer of initializer cannot be pulled")),
        ("ErrImageNeverPull", "", ("ImagePullFailed", "image rljob-trainer of initializer cannot be pulled")),
        ("CreateContainerConfigError", 'secret "k" not found', ("ContainerCreateFailed", 'secret "k" not found')),
    ],
)
def test_the_problem_of_an_initializer_is_reported_at_once(reason, message, text):
    world = World(initializer={"command": ["make"]})
    world.settle()
    world.make_pods()
    world.waiting(reason, message, "initializer")
    world.settle()
    assert world.condition("Ready")[1] == text[0]
    assert text[1] in world.condition("Ready")[2]


def test_a_missing_model_ends_the_run_with_the_message_of_the_role():
    """No restart helps, because nothing creates the model; engine or trainer may detect it first."""
    for role in ("rollout", "trainer"):
        world = World()
        world.run_up()
        sentence = "models: /var/lib/rljob/model holds no Hugging Face model (no config.json); check source"
        world.exit(world.find(role)[0].metadata.name, 2, message=sentence, fatal=role == "trainer")
        if role == "trainer":
            world.fail_job(
                "PodFailurePolicy", "Container main for pod ns/x failed with exit code 2 matching FailJob rule"
            )
        world.settle()
        assert world.condition("Failed")[1] == "ConfigurationError"
        assert sentence in world.condition("Failed")[2]
