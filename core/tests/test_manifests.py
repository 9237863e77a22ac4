"""Rendered objects: names, labels, owners, security, requests, and commands without literal paths or ports."""

import itertools
import json
import re

import pytest

from core.tests.goldens import CONTEXTS, JOB
from rljob.api.load import load, override, validate
from rljob.api.models import RLJob
from rljob.api.resolve import resolve
from rljob.manifests import ALL_TOKENS, TOKEN_ROLES, problems, render, secret, secret_name
from rljob.manifests.inputs import Cluster, RenderTarget
from rljob.manifests.names import NAME_LIMIT, bounded

LONG = "a" + "b-" * 30 + "cd"
UID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"


def roles(manifest, context=None):
    return {role.name: role for role in render(validate(manifest), context or RenderTarget(uid=UID))}


def objects(found):
    return [rendered for role in found.values() for rendered in role.objects]


def pod_of(role):
    return next(o["spec"]["template"] for o in role.objects if "template" in o.get("spec", {}))


def main_of(role):
    return next(c for c in pod_of(role)["spec"]["containers"] if c["name"] == "main")


def variables(role):
    return {entry["name"]: entry.get("value") for entry in main_of(role)["env"]}


@pytest.fixture
def long_manifest(manifest):
    """A manifest in which every name has the maximum length, and names differ only in the last character."""
    spec = manifest["spec"]
    manifest["metadata"]["name"] = LONG
    spec["rollouts"] = [{"name": f"{LONG[:-1]}{i}", "replicas": {"max": 2}} for i in range(3)]
    spec["rewards"] += [{"name": f"{LONG[:-1]}{i}", "builtin": "exact_match", "replicas": {"max": 2}} for i in range(3)]
    spec["runner"] = {"replicas": {"max": 2}}
    return manifest


def test_names_of_objects_are_bounded_and_unique_for_the_longest_names(long_manifest):
    assert len(LONG) == 63
    found = objects(roles(long_manifest, RenderTarget(uid=UID, attempt=10_000)))
    names = [(rendered["kind"], rendered["metadata"]["name"]) for rendered in found]
    assert len(set(names)) == len(names)
    assert all(len(name) <= NAME_LIMIT for _, name in names)
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])", name) for _, name in names)
    labels = [value for rendered in found for value in rendered["metadata"]["labels"].values()]
    assert all(len(value) <= 63 for value in labels)


def test_a_long_name_is_cut_with_a_hash_of_the_whole_name():
    assert bounded("short") == "short"
    one, other = bounded("x" * 52 + "a"), bounded("x" * 52 + "b")
    assert len(one) == 52
    assert one != other
    assert bounded("x" * 42 + "-" + "y" * 60).count("--") == 0


def test_a_pod_refers_to_objects_of_the_job_by_their_names(long_manifest):
    found = roles(long_manifest)
    names = {(rendered["kind"], rendered["metadata"]["name"]) for rendered in objects(found)}
    for role in found.values():
        for rendered in role.objects:
            for volume in rendered.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", []):
                if "configMap" in volume:
                    assert ("ConfigMap", volume["configMap"]["name"]) in names
                if "persistentVolumeClaim" in volume:
                    assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in names
                if "secret" in volume:
                    assert volume["secret"]["secretName"] == secret_name(LONG, UID)
    host = re.match(r"http://([^.]+)\.default\.svc", variables(found["runner"])["RLJOB_COORDINATOR"])
    assert ("Service", host[1]) in names
    assert ("Service", pod_of(found["trainer"])["spec"]["subdomain"]) in names
    assert ("ServiceAccount", pod_of(found["coordinator"])["spec"]["serviceAccountName"]) in names
    for url in json.loads(variables(found["runner"])["RLJOB_REWARD_URLS"]).values():
        assert ("Service", re.match(r"http://([^.]+)\.default\.svc", url)[1]) in names


def test_only_the_trainer_gets_what_copies_checkpoints(manifest):
    plain = roles(manifest)
    manifest["spec"]["checkpoints"] = {"uri": "s3://bucket/run"}
    manifest["spec"]["downloads"] = {"s3Endpoint": "http://minio", "secret": "access"}
    found = roles(manifest)
    assert variables(found["trainer"])["AWS_ENDPOINT_URL_S3"] == "http://minio"
    keys = {entry["name"]: entry.get("valueFrom") for entry in main_of(found["trainer"])["env"]}
    assert keys["AWS_ACCESS_KEY_ID"]["secretKeyRef"]["name"] == "access"
    assert "RLJOB_MODEL_CACHE" not in keys and "initializer" in plain
    for name in found.keys() - {"trainer"}:
        if name in ("runner", "rollout-main", "coordinator", "initializer"):
            assert not {"AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID"} & variables(found[name]).keys()
    manifest["spec"]["downloads"]["secret"] = "other"
    others = roles(manifest)
    assert {name for name in found if found[name].hash != others[name].hash} == {"trainer"}


def test_pods_that_read_models_get_what_downloads_them(manifest):
    """With remote models there is an initializer; a change of the downloads restarts only the pods that read models."""
    manifest["spec"].pop("initializer", None)
    plain = roles(manifest)
    manifest["spec"]["downloads"] = {"claim": "shared", "hubEndpoint": "http://mirror", "secret": "access"}
    unused = roles(manifest)
    assert "initializer" not in unused
    assert all("HF_TOKEN" not in variables(unused[name]) for name in ("trainer", "runner", "rollout-main"))
    manifest["spec"]["models"][0]["source"] = "hf://org/name"
    remote = roles(manifest)
    assert main_of(remote["initializer"])["command"] == ["python", "-m", "rljob.trainer.initialize", "--"]
    for name in ("initializer", "trainer", "runner", "rollout-main"):
        assert variables(remote[name])["RLJOB_MODEL_CACHE"] == "/var/cache/rljob"
        assert variables(remote[name])["HF_ENDPOINT"] == "http://mirror"
        (token,) = [entry for entry in main_of(remote[name])["env"] if entry["name"] == "HF_TOKEN"]
        assert token["valueFrom"]["secretKeyRef"] == {"name": "access", "key": "HF_TOKEN", "optional": True}
        (volume,) = [each for each in pod_of(remote[name])["spec"]["volumes"] if each["name"] == "rljob-models"]
        assert volume["persistentVolumeClaim"] == {"claimName": "shared"}
    for name in ("coordinator", "reward-exact"):
        assert not {"RLJOB_MODEL_CACHE", "HF_ENDPOINT", "HF_TOKEN"} & variables(remote[name]).keys()
    manifest["spec"]["downloads"] = {"emptyDir": True}
    others = roles(manifest)
    changed = {"initializer", "trainer", "runner", "rollout-main"}
    assert {name for name in remote if remote[name].hash != others[name].hash} == changed
    assert all(plain[name].hash == unused[name].hash for name in plain)
    (volume,) = [each for each in pod_of(others["runner"])["spec"]["volumes"] if each["name"] == "rljob-models"]
    assert volume == {"name": "rljob-models", "emptyDir": {}}
    del manifest["spec"]["downloads"]
    assert variables(roles(manifest)["trainer"])["RLJOB_MODEL_CACHE"] == "/var/lib/rljob/models"


def test_the_trainers_master_is_its_first_pod(manifest):
    trainer = roles(manifest, RenderTarget(uid=UID, attempt=4, namespace="research"))["trainer"]
    assert variables(trainer)["RLJOB_MASTER"] == "sums-trainer-4-0.sums-trainer.research.svc.cluster.local"


def test_every_object_has_labels_owner_and_hashes(manifest):
    manifest["spec"]["storage"] = {"retention": "Delete"}
    for role in roles(manifest).values():
        for rendered in role.objects:
            metadata = rendered["metadata"]
            assert metadata["labels"]["rljob.dev/job"] == "sums"
            assert metadata["labels"]["rljob.dev/role"] == role.name
            assert metadata["labels"]["app.kubernetes.io/component"] == role.kind
            assert metadata["annotations"]["rljob.dev/role-hash"] == role.hash
            assert metadata["annotations"]["rljob.dev/rendered-hash"]
            [owner] = metadata["ownerReferences"]
            assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (UID, True, True)
            if "template" in rendered.get("spec", {}):
                template = rendered["spec"]["template"]["metadata"]
                assert template["annotations"]["rljob.dev/role-hash"] == role.hash
                wanted = rendered["spec"].get("selector", {}).get("matchLabels", {})
                assert wanted.items() <= template["labels"].items()


def test_a_retained_claim_has_a_spec_hash_and_no_owner(manifest):
    [claim] = roles(manifest)["storage"].objects
    assert "ownerReferences" not in claim["metadata"]
    assert claim["metadata"]["annotations"]["rljob.dev/spec-hash"]
    manifest["spec"]["storage"] = {"retention": "Delete"}
    [claim] = roles(manifest)["storage"].objects
    assert claim["metadata"]["ownerReferences"]


def test_without_a_uid_no_object_has_an_owner(manifest):
    assert all("ownerReferences" not in o["metadata"] for o in objects(roles(manifest, RenderTarget())))


def test_a_named_claim_is_used_and_none_is_created(manifest):
    manifest["spec"]["storage"] = {"claim": "mine"}
    found = roles(manifest)
    assert found["storage"].objects == ()
    volumes = {volume["name"]: volume for volume in pod_of(found["trainer"])["spec"]["volumes"]}
    assert volumes["rljob-storage"]["persistentVolumeClaim"]["claimName"] == "mine"


def test_roles_are_in_order_of_creation(manifest):
    assert [*roles(manifest)] == [
        *("storage", "config", "access", "network", "initializer"),
        *("coordinator", "reward-exact", "runner", "trainer", "rollout-main"),
    ]


def _command_elements(value):
    """Yield the elements of every command and argument list."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("command", "args"):
                yield from inner
            else:
                yield from _command_elements(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _command_elements(inner)


@pytest.mark.parametrize("context", CONTEXTS)
def test_no_command_contains_a_port_a_path_or_an_address(context):
    rendered = objects({role.name: role for role in render(load(JOB), CONTEXTS[context])})
    assert {*itertools.chain.from_iterable(map(_command_elements, rendered))} == {
        *("python", "-m", "--"),
        *(f"rljob.{name}.main" for name in ("coordinator", "runner", "rollout", "rewards")),
        *(
            "rljob.trainer.launch",
            "2",
            "rljob.trainer.initialize",
            "rljob.protocol.health_probe",
            "alive",
            "90",
            "ready",
        ),
        *("rljob-example-model", "job://model"),  # the initializer's command
    }


def test_pods_are_restricted(manifest):
    for role in roles(manifest).values():
        for rendered in role.objects:
            template = rendered.get("spec", {}).get("template")
            if template is None:
                continue
            pod = template["spec"]
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert pod["automountServiceAccountToken"] is (role.name == "coordinator")
            for container in pod["containers"]:
                security = container["securityContext"]
                assert security["allowPrivilegeEscalation"] is False
                assert security["readOnlyRootFilesystem"] is True
                assert security["capabilities"] == {"drop": ["ALL"]}
                assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_a_pod_may_read_its_own_token_only(manifest):
    keys = {}
    for role in roles(manifest).values():
        for rendered in role.objects:
            for volume in rendered.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", []):
                if "secret" in volume:
                    keys[role.kind] = [item["key"] for item in volume["secret"]["items"]]
    assert keys == {
        "coordinator": ["coordinator"],
        "reward": ["reward"],
        "runner": ["runner", "reward"],
        "trainer": ["trainer"],
        "rollout": ["agent"],
    }


def test_the_secret_has_a_key_for_each_role(manifest):
    made = secret(validate(manifest), RenderTarget(uid=UID), dict.fromkeys((*TOKEN_ROLES, ALL_TOKENS), "x"))
    assert made["metadata"]["name"] == secret_name("sums", UID) == "sums-tokens-0f1e2d3c"
    assert {*made["stringData"]} == {
        "coordinator",
        "trainer",
        "agent",
        "runner",
        "reward",
        "environment",
        "pool",
        "ray",
    }
    assert made["metadata"]["ownerReferences"]


def test_a_user_s_reward_container_has_image_and_listen_address(manifest):
    template = {"spec": {"containers": [{"name": "main", "image": "judge:1"}, {"name": "side", "image": "a"}]}}
    manifest["spec"]["rewards"].append({"name": "judge", "template": template})
    found = roles(manifest)["reward-judge"]
    assert "command" not in main_of(found)
    assert main_of(found)["image"] == "judge:1"
    assert variables(found)["RLJOB_LISTEN"] == ":8080"
    assert variables(found)["RLJOB_TOKEN_FILE"] == "/etc/rljob/token/token"
    assert variables(roles(manifest)["runner"])["RLJOB_REWARD_TOKEN_FILE"] == "/etc/rljob/token/reward-token"
    containers = pod_of(found)["spec"]["containers"]
    assert [container["terminationMessagePolicy"] for container in containers] == ["FallbackToLogsOnError"] * 2


def test_code_runs_in_a_restricted_pod_with_the_runtime_class_of_the_template(manifest):
    template = {"spec": {"runtimeClassName": "gvisor"}}
    reward = {"name": "passes", "builtin": "code", "config": {"layers": ["seccomp"]}, "template": template}
    manifest["spec"]["rewards"].append(reward)
    found = roles(manifest)["reward-passes"]
    pod, security = pod_of(found)["spec"], main_of(found)["securityContext"]
    assert pod["runtimeClassName"] == "gvisor"
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert (security["allowPrivilegeEscalation"], security["capabilities"]) == (False, {"drop": ["ALL"]})
    assert security["readOnlyRootFilesystem"] is True
    assert main_of(found)["command"] == ["python", "-m", "rljob.rewards.main"]


def test_a_reward_with_a_url_has_no_objects_and_the_runner_has_its_address(manifest):
    manifest["spec"]["rewards"].append({"name": "far", "url": "http://far:1/x"})
    found = roles(manifest)
    assert "reward-far" not in found
    urls = json.loads(variables(found["runner"])["RLJOB_REWARD_URLS"])
    name = "sums-replicas-reward-exact"
    assert urls == {"exact": f"http://{name}.default.svc.cluster.local:8080", "far": "http://far:1/x"}
    services = {
        each["metadata"]["name"]: each["spec"] for each in found["reward-exact"].objects if each["kind"] == "Service"
    }
    assert services.keys() == {name, "sums-reward-exact"}
    assert services[name]["clusterIP"] == "None", "the runner asks for the addresses of the pods"


def test_accelerators_are_requested_in_a_cluster_with_gpus(manifest):
    manifest["spec"]["trainer"] = {"processesPerNode": 4}
    gpu = roles(manifest)
    assert main_of(gpu["trainer"])["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert main_of(gpu["rollout-main"])["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    manifest["spec"]["rollouts"][0]["parallelism"] = {"tensor": 2, "pipeline": 2, "data": 2}
    parallel = main_of(roles(manifest)["rollout-main"])["resources"]["limits"]
    assert parallel == {"nvidia.com/gpu": "8"}
    cpu = roles(manifest, RenderTarget(Cluster(accelerator="cpu")))
    assert "limits" not in main_of(cpu["trainer"])["resources"]
    assert "nvidia.com/gpu" in tolerated(gpu["trainer"])
    assert "nvidia.com/gpu" not in tolerated(cpu["trainer"])


@pytest.mark.parametrize("role", ["trainer", "rollout-main", "runner", "coordinator", "reward-exact"])
def test_every_main_container_requests_cpu_and_memory(manifest, role):
    assert main_of(roles(manifest)[role])["resources"]["requests"].keys() == {"cpu", "memory"}


def test_a_limit_in_a_template_replaces_the_request(manifest):
    resources = {"limits": {"memory": "64Gi", "cpu": "8"}, "requests": {"cpu": "4"}}
    template = {"spec": {"containers": [{"name": "main", "resources": resources}]}}
    manifest["spec"]["trainer"] = {"template": template}
    found = main_of(roles(manifest)["trainer"])["resources"]
    assert found["requests"] == {"cpu": "4"}
    assert found["limits"] == {"memory": "64Gi", "cpu": "8", "nvidia.com/gpu": "1"}


def tolerated(role):
    """Return the keys of the taints that a role's pods tolerate."""
    return [toleration["key"] for toleration in pod_of(role)["spec"].get("tolerations", ())]


@pytest.mark.parametrize("role", ["rollout-main", "runner", "trainer", "coordinator"])
def test_pods_are_replaced_soon_after_their_node_is_lost(manifest, role):
    tolerations = pod_of(roles(manifest)[role])["spec"]["tolerations"]
    assert {
        each["key"]: each["tolerationSeconds"] for each in tolerations if each["effect"] == "NoExecute"
    } == dict.fromkeys(("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"), 10)


FABRIC = {
    "sharedMemory": "64Gi",
    "rdma": {"resource": "rdma/hca", "count": 8},
    "nccl": {"NCCL_IB_HCA": "mlx5", "NCCL_DEBUG": "WARN"},
}


@pytest.fixture(params=["trainer", "rollout-main"])
def fabric(request, manifest):
    """Function that renders the role of trainer or pool with additional fields: ``fabric(hostNetwork=True)``."""

    def made(**fields):
        spec = manifest["spec"]
        role = spec.setdefault("trainer", {}) if request.param == "trainer" else spec["rollouts"][0]
        role |= fields
        return roles(manifest)[request.param]

    return made


def test_shared_memory_has_the_requested_limit(fabric):
    def shm(role):
        return next(v for v in pod_of(role)["spec"]["volumes"] if v["name"] == "shm")["emptyDir"]

    assert shm(fabric()) == {"medium": "Memory"}
    assert shm(fabric(sharedMemory="64Gi")) == {"medium": "Memory", "sizeLimit": "64Gi"}


def test_rdma_adapters_are_requested_in_addition_to_accelerators(fabric):
    limits = main_of(fabric(rdma=FABRIC["rdma"]))["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "1", "rdma/hca": "8"}


def test_nccl_variables_are_in_the_pod_and_the_template_wins(fabric):
    template = {"spec": {"containers": [{"name": "main", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}]}}
    found = variables(fabric(nccl=FABRIC["nccl"], template=template))
    assert (found["NCCL_IB_HCA"], found["NCCL_DEBUG"]) == ("mlx5", "INFO")


def test_pods_with_rdma_stay_restricted(fabric):
    security = main_of(fabric(**FABRIC))["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}


def test_a_pod_with_host_network_uses_the_cluster_dns(fabric, manifest):
    manifest["spec"]["network"] = {"policy": "Disabled"}
    assert "dnsPolicy" not in pod_of(fabric())["spec"]
    pod = pod_of(fabric(hostNetwork=True))["spec"]
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")


def test_trainers_with_host_network_have_different_rendezvous_ports(manifest):
    """On the node's network, trainers with one port would join each other. A new attempt avoids a port in use."""
    manifest["spec"]["network"] = {"policy": "Disabled"}
    manifest["spec"]["trainer"] = {"nodes": 2, "hostNetwork": True}
    ports = set()
    for uid in ("one", "other"):
        for attempt in (1, 2):
            master = variables(roles(manifest, RenderTarget(uid=uid, attempt=attempt))["trainer"])["RLJOB_MASTER"]
            host, _, port = master.partition(":")
            assert host == f"sums-trainer-{attempt}-0.sums-trainer.default.svc.cluster.local"
            assert 20_000 <= int(port) < 30_000
            ports.add(port)
    assert len(ports) == 4


def test_every_attempt_of_every_job_has_its_own_rendezvous_id(manifest):
    """A node that reaches another trainer's port cannot join the rendezvous of that trainer."""
    contexts = [RenderTarget(uid=uid, attempt=attempt) for uid in ("one", "other") for attempt in (1, 2)]
    found = [variables(roles(manifest, context)["trainer"])["RLJOB_RENDEZVOUS_ID"] for context in contexts]
    assert len(set(found)) == 4


def test_policies_admit_pods_with_host_network_by_the_addresses_of_nodes(manifest):
    manifest["spec"]["trainer"] = {"hostNetwork": True}
    manifest["spec"]["network"] = {"nodes": [{"name": "all", "cidr": "10.1.0.0/16"}], "egress": {"policy": "Listed"}}
    [policy] = [o for o in roles(manifest)["network"].objects if o["metadata"]["name"] == "sums-network-pods"]
    peers = [{"podSelector": {"matchLabels": {"rljob.dev/job": "sums"}}}, {"ipBlock": {"cidr": "10.1.0.0/16"}}]
    assert policy["spec"]["ingress"] == [{"from": peers}]
    assert policy["spec"]["egress"][0] == {"to": peers}


def test_a_change_of_rdma_and_nccl_restarts_only_its_role_and_does_not_change_job_json(manifest):
    before, job_json = roles(manifest), json.loads(roles(manifest)["config"].objects[0]["data"]["job.json"])
    manifest["spec"]["trainer"] = FABRIC
    manifest["spec"]["rollouts"][0] |= FABRIC
    after = roles(manifest)
    assert {n for n in before if before[n].hash != after[n].hash} == {"trainer", "rollout-main"}
    assert json.loads(after["config"].objects[0]["data"]["job.json"]) == job_json


def budgets(found):
    return {o["metadata"]["name"]: o["spec"] for o in objects(found) if o["kind"] == "PodDisruptionBudget"}


def test_a_drain_evicts_engines_and_rewards_one_at_a_time_and_trainers_without_a_budget(manifest):
    found = budgets(roles(manifest))
    assert {*found} == {"sums-rollout-main", "sums-reward-exact"}
    for spec in found.values():
        assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


def test_a_trainer_with_disruption_block_has_a_budget_of_all_its_pods(manifest):
    """The budget has minAvailable, because Kubernetes does not know the desired number of a Job's pods."""
    manifest["spec"]["trainer"] = {"nodes": 4}
    before = roles(manifest)["trainer"].hash
    manifest["spec"]["failurePolicy"] = {"disruption": "Block"}
    found = roles(manifest)
    spec = budgets(found)["sums-trainer"]
    assert (spec["minAvailable"], spec["unhealthyPodEvictionPolicy"]) == (4, "AlwaysAllow")
    assert "maxUnavailable" not in spec
    assert spec["selector"]["matchLabels"] == {"rljob.dev/job": "sums", "rljob.dev/role": "trainer"}
    assert found["trainer"].hash == before


@pytest.mark.parametrize("role", ["trainer", "rollout-main", "runner"])
def test_a_process_without_a_server_has_exec_probes(manifest, role):
    main = main_of(roles(manifest)[role])
    probe = ["python", "-m", "rljob.protocol.health_probe"]
    assert main["readinessProbe"]["exec"]["command"] == [*probe, "ready"]
    assert main["livenessProbe"]["exec"]["command"] == [*probe, "alive", "60"]
    assert "startupProbe" not in main  # liveness ignores a process before its first heartbeat


@pytest.mark.parametrize(("replicas", "gang", "elastic"), [(None, 2, 0), (2, 2, 0), (3, 2, 1), (5, 2, 3)])
def test_engines_beyond_the_minimum_of_a_pool_are_elastic(manifest, replicas, gang, elastic):
    manifest["spec"]["rollouts"][0]["replicas"] = {"min": 2, "max": 5}
    context = RenderTarget(uid=UID, replicas={} if replicas is None else {"rollout-main": replicas})
    role = roles(manifest, context)["rollout-main"]
    found = {o["metadata"]["name"]: o for o in role.objects if o["kind"] == "Deployment"}
    assert found["sums-rollout-main"]["spec"]["replicas"] == gang
    assert found["sums-rollout-main-elastic"]["spec"]["replicas"] == elastic
    assert role.desired == gang + elastic
    one, other = (found[name]["spec"]["selector"]["matchLabels"] for name in found)
    assert not one.items() <= other.items()


def test_only_roles_with_max_above_min_have_a_scale(manifest):
    spec = manifest["spec"]
    assert not [o for o in objects(roles(manifest)) if o["kind"] == "RLJobScale"]
    spec["rollouts"][0]["replicas"] = spec["rewards"][0]["replicas"] = {"min": 1, "max": 2}
    spec["runner"] = {"replicas": {"min": 1, "max": 2}}
    found = [o["spec"] for o in objects(roles(manifest)) if o["kind"] == "RLJobScale"]
    assert [entry["role"] for entry in found] == ["reward-exact", "runner", "rollout-main"]
    assert all(entry["replicas"] == 1 and entry["job"] == "sums" for entry in found)


def test_job_json_is_a_valid_manifest_without_the_fields_of_the_operator(manifest):
    spec = manifest["spec"]
    pod = {"spec": {"containers": [{"name": "main", "image": "a"}]}}
    spec |= {"suspend": True, "ttlSecondsAfterFinished": 5, "network": {"policy": "Disabled"}}
    spec |= {"trainer": {"template": pod, "processesPerNode": 2}, "runner": {"template": pod, "replicas": {"min": 3}}}
    spec["rewards"].append({"name": "judge", "template": pod})
    [config] = roles(manifest)["config"].objects
    job_json = json.loads(config["data"]["job.json"])
    assert job_json["spec"]["trainer"] == {"processesPerNode": 2}
    assert job_json["spec"]["rewards"][1] == {"name": "judge", "template": {}}
    assert job_json["spec"].keys() & {"suspend", "ttlSecondsAfterFinished", "network", "runner", "storage"} == set()
    assert RLJob.model_validate_json(config["data"]["job.json"]).spec.training.steps == 3


def test_the_initializer_inherits_image_and_variables_of_the_trainers_template(manifest):
    main = {
        "name": "main",
        "image": "mine",
        "env": [{"name": "HF_HOME", "value": "/x"}],
        "resources": {"limits": {"a": 1}},
    }
    template = {"spec": {"containers": [main], "nodeSelector": {"a": "b"}, "imagePullSecrets": [{"name": "s"}]}}
    manifest["spec"]["trainer"] = {"template": template}
    found = roles(manifest)["initializer"]
    assert main_of(found)["image"] == "mine"
    assert variables(found)["HF_HOME"] == "/x"
    assert "resources" not in main_of(found)
    assert pod_of(found)["spec"]["imagePullSecrets"] == [{"name": "s"}]
    assert "nodeSelector" not in pod_of(found)["spec"]


def test_the_initializers_template_is_merged_over_the_inherited_fields(manifest):
    main = {"name": "main", "image": "mine", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
    manifest["spec"]["trainer"] = {"template": {"spec": {"containers": [main]}}}
    before = roles(manifest)
    own = {
        "name": "main",
        "env": [{"name": "B", "value": None}, {"name": "C", "value": "3"}],
        "resources": {"limits": {"memory": "64Gi"}},
    }
    spec = {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}], "containers": [own]}
    manifest["spec"]["initializer"]["template"] = {"spec": spec}
    found = roles(manifest)
    main = main_of(found["initializer"])
    assert (main["image"], main["resources"]) == ("mine", own["resources"])
    assert variables(found["initializer"]).keys() & {"A", "B", "C", "RLJOB_SEED"} == {"A", "C", "RLJOB_SEED"}
    pod = pod_of(found["initializer"])["spec"]
    assert (pod["nodeSelector"], pod["tolerations"]) == (spec["nodeSelector"], spec["tolerations"])
    assert pod["restartPolicy"] == "Never"
    assert before["config"].objects == found["config"].objects  # job.json is unchanged, so the content key is too


def test_local_paths_and_commands_are_refused_in_a_cluster(manifest):
    spec = manifest["spec"]
    assert problems(validate(manifest)) == []
    spec["models"][0]["source"] = "/models/a"
    spec["tasks"][0]["data"] = {"jsonl": {"path": "rows.jsonl", "heldOutPath": "job://b"}}
    spec["tasks"].append({"name": "more", "data": {"datasets": {"path": "rows"}}, "reward": "mine"})
    spec["rewards"] = [
        {"name": "exact", "builtin": "exact_match"},
        {"name": "mine", "local": {"command": ["python"]}},
        {"name": "bare", "template": {"spec": {"nodeSelector": {"a": "b"}}}},
    ]
    found = problems(validate(manifest))
    assert [sentence.partition(":")[0] for sentence in found] == [
        "spec.models[0].source",
        "spec.tasks[0].data.jsonl.path",
        "spec.tasks[1].data.datasets.path",
        "spec.rewards[1].local",
        "spec.rewards[2].template",
    ]
    assert "write job://PATH" in found[0]


def test_pods_share_no_memory_for_weights(manifest):
    manifest["spec"]["weightSync"] = {"transport": "ipc"}
    assert problems(validate(manifest)) == [
        "spec.weightSync.transport: ipc is for rljob run, because pods do not share memory; in a cluster set auto, "
        "gloo or nccl"
    ]


def test_a_function_needs_an_image_with_its_package_and_runs_rljob_s_service_in_it(manifest):
    reward = {"name": "exact", "function": "mine.rewards:length", "config": {"unit": 2}}
    manifest["spec"]["rewards"] = [reward]
    sentence = (
        "spec.rewards[0].template: function needs an image that has the package of mine.rewards:length; set the image "
        "of its container main"
    )
    assert problems(validate(manifest)) == [sentence]
    reward["template"] = {"spec": {"containers": [{"name": "main", "image": "mine:1"}]}}
    assert problems(validate(manifest)) == []
    main = main_of(roles(manifest)["reward-exact"])
    assert (main["image"], main["command"]) == ("mine:1", ["python", "-m", "rljob.rewards.main"])
    assert main["readinessProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.parametrize(
    ("role", "field"),
    [
        ("trainer", "algorithm.advantage"),
        ("trainer", "algorithm.objective"),
        ("trainer", "algorithm.aggregation"),
        ("trainer", "algorithm.correction"),
        ("trainer", "trainer.backend"),
        ("runner", "tasks[0].loop"),
        ("runner", "tasks[0].agent.function"),
        ("runner", "tasks[0].groupFilter.function"),
        ("rewards[0]", "rewards[0].function"),
        ("environments[0]", "environments[0].function"),
        ("rollouts[0]", "rollouts[0].engine"),
    ],
)
def test_code_of_a_user_needs_an_image_in_the_template_of_its_role(manifest, role, field):
    override(manifest, 'spec.rewards[0]={name: exact, function: "acme:code"}')
    template = 'template={spec: {containers: [{name: main, image: "acme:1"}]}}'
    override(manifest, f"spec.rewards[0].{template}")
    override(manifest, 'spec.environments=[{name: lake, function: "acme:code"}]')
    override(manifest, f"spec.environments[0].{template}")
    if "agent" in field:
        override(manifest, "spec.tasks[0].loop=agent")
    override(manifest, f'spec.{field}="acme:code"')
    if role in ("rewards[0]", "environments[0]"):
        override(manifest, f"spec.{role}.template=null")
    [found] = problems(resolve(validate(manifest)))
    assert found == (
        f"spec.{role}.template: {field.removeprefix(f'{role}.')} needs an image that has the package of acme:code; set "
        "the image of its container main"
    )
    override(manifest, f"spec.{role}.{template}")
    assert problems(resolve(validate(manifest))) == []


def test_a_pool_with_the_name_of_another_pool_s_elastic_deployment_is_refused(manifest):
    manifest["spec"]["rollouts"] = [{"name": "main", "replicas": {"max": 2}}, {"name": "main-elastic"}]
    [found] = problems(validate(manifest))
    assert found.startswith("spec.rollouts[1].name: main-elastic is the name of the elastic engines of pool main")


def test_an_engine_of_the_user_runs_in_the_image_of_its_template(manifest):
    pool = manifest["spec"]["rollouts"][0]
    pool["engine"] = "acme.engine:Adapter"
    [found] = problems(validate(manifest))
    assert found == (
        "spec.rollouts[0].template: engine needs an image that has the package of acme.engine:Adapter; set the image "
        "of its container main"
    )
    pool["template"] = {"spec": {"containers": [{"name": "main", "image": "acme/engine:1"}]}}
    assert problems(validate(manifest)) == []
    main = main_of(roles(manifest)["rollout-main"])
    assert main["image"] == "acme/engine:1"
    assert main["command"] == ["python", "-m", "rljob.rollout.main"]


def test_a_built_in_engine_without_a_published_image_needs_one_in_its_template(manifest):
    pool = manifest["spec"]["rollouts"][0]
    pool["engine"] = "sglang"
    [found] = problems(validate(manifest))
    assert found == (
        "spec.rollouts[0].template: rljob publishes no image with sglang; build one (rollout-image/sglang/Dockerfile) "
        "and set the image of its container main"
    )
    pool["template"] = {"spec": {"containers": [{"name": "main", "image": "acme/sglang:1"}]}}
    assert problems(validate(manifest)) == []
    assert main_of(roles(manifest)["rollout-main"])["image"] == "acme/sglang:1"


@pytest.mark.parametrize("field", ["trainer", "rollouts"])
def test_host_network_in_a_template_is_refused_for_roles_with_a_field_for_it(manifest, field):
    spec = manifest["spec"]
    role = spec[field][0] if field == "rollouts" else spec.setdefault(field, {})
    role["template"] = {"spec": {"hostNetwork": True}}
    spec["network"] = {"policy": "Disabled"}
    [found] = problems(validate(manifest))
    path = f"spec.{field}[0]" if field == "rollouts" else f"spec.{field}"
    assert found == f"{path}.template.spec.hostNetwork: governed by rljob; set {path}.hostNetwork instead"


@pytest.mark.parametrize("shared", ["shareProcessNamespace", "hostPID"])
@pytest.mark.parametrize("field", ["trainer", "rollouts", "runner"])
def test_a_shared_process_namespace_is_refused_for_roles_with_exec_probes(manifest, field, shared):
    spec = manifest["spec"]
    role = spec[field][0] if field == "rollouts" else spec.setdefault(field, {})
    role["template"] = {"spec": {shared: True}}
    [found] = problems(validate(manifest))
    path = f"spec.{field}[0]" if field == "rollouts" else f"spec.{field}"
    assert found.startswith(f"{path}.template.spec.{shared}: the probes of this role need")


@pytest.mark.parametrize("field", ["runner", "coordinator", "rewards", "environments"])
def test_host_network_in_a_template_is_refused_with_network_policies(manifest, field):
    spec, template = manifest["spec"], {"spec": {"hostNetwork": True}}
    spec["environments"] = [{"name": "lake", "builtin": "frozen_lake"}]
    listed = field in ("rewards", "environments")
    role = spec[field][0] if listed else spec.setdefault(field, {})
    role["template"] = template
    [found] = problems(validate(manifest))
    assert found.startswith(f"spec.{field}{'[0]' if listed else ''}.template.spec.hostNetwork")
    for network in ({"policy": "Disabled"}, {"nodes": [{"name": "all", "cidr": "10.1.0.0/16"}]}):
        spec["network"] = network
        assert problems(validate(manifest)) == []
    spec["network"] = {"policy": "Enabled"}
    template["spec"]["hostNetwork"] = False
    assert problems(validate(manifest)) == []
