"""Pod templates are checked against Kubernetes' own schema."""

import pytest

from rljob.api.errors import ManifestError
from rljob.api.load import validate
from rljob.api.pod_models import main_container

TEMPLATE = {
    "metadata": {"labels": {"team": "a"}},
    "spec": {
        "nodeSelector": {"gpu": "yes"},
        "hostNetwork": True,
        "tolerations": None,
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}],
        "containers": [
            {"name": "side"},
            {
                "name": "main",
                "image": "mine:1",
                "env": [{"name": "HF_TOKEN", "value": "x"}],
                "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "1Gi"}},
                "livenessProbe": {"httpGet": {"port": "http"}},
            },
        ],
    },
}


def test_a_valid_template_is_not_changed(manifest):
    manifest["spec"]["trainer"] = {"template": TEMPLATE}
    template = validate(manifest).spec.trainer.template
    assert template == TEMPLATE
    assert main_container(template)["image"] == "mine:1"
    assert main_container({}) == main_container(None) == {}


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ({"spec": {"container": []}}, "spec.container: unknown field; did you mean containers?"),
        ({"spec": {"zz": 1}}, "spec.zz: unknown field; a PodTemplateSpec has no such field; remove it"),
        ({"foo": 1}, "foo: unknown field; a PodTemplateSpec has no such field; remove it"),
        ({"spec": {"containers": {}}}, "spec.containers: must be a list"),
        ({"spec": {"hostNetwork": "yes"}}, "spec.hostNetwork: must be true or false"),
        ({"spec": {"nodeSelector": {"gpu": 1}}}, "spec.nodeSelector.gpu: must be text; put it in quotes"),
        ({"spec": {"terminationGracePeriodSeconds": True}}, "spec.terminationGracePeriodSeconds: must be a whole numb"),
        (
            {"spec": {"containers": [{"name": "main", "evn": []}]}},
            "spec.containers[0].evn: unknown field; did you mean",
        ),
        (
            {"spec": {"containers": [{"image": "a"}]}},
            "spec.containers[0].name: required; add it (the name of rljob's container",
        ),
        (
            {"spec": {"restartPolicy": "Never"}},
            "spec.restartPolicy: governed by rljob, which restarts processes itself",
        ),
        (
            {"spec": {"containers": [{"name": "main", "env": [{"name": "RLJOB_TOKEN", "value": "x"}]}]}},
            "spec.containers[0].env[0]: variables that begin with RLJOB_ are reserved for rljob",
        ),
        ({"metadata": {"labels": {"rljob.dev/role": "x"}}}, "metadata.labels.rljob.dev/role: labels that begin with"),
        (
            {"metadata": {"annotations": {"rljob.dev/role-hash": "x"}}},
            "metadata.annotations.rljob.dev/role-hash: annot",
        ),
        (
            {"spec": {"containers": [{"name": "side", "ports": [{"containerPort": 9}, {"containerPort": 8080}]}]}},
            "spec.containers[0].ports[1]: port 8080 is reserved for rljob, whose servers read it from RLJOB_LISTEN",
        ),
        (
            {"spec": {"initContainers": [{"name": "side", "ports": [{"containerPort": 9, "name": "http"}]}]}},
            "spec.initContainers[0].ports[0].name: http is the name of rljob's port; choose another",
        ),
    ],
)
def test_an_invalid_field_of_a_template_is_refused_with_its_path(manifest, template, sentence):
    manifest["spec"]["rollouts"][0]["template"] = template
    with pytest.raises(ManifestError) as caught:
        validate(manifest)
    (found,) = caught.value.problems
    assert found.startswith(f"spec.rollouts[0].template.{sentence}")


def test_other_ports_are_accepted(manifest):
    ports = [{"containerPort": 8080, "protocol": "UDP"}, {"containerPort": 9000, "name": "debug"}]
    template = {"spec": {"containers": [{"name": "main", "ports": ports}]}}
    manifest["spec"]["rollouts"][0]["template"] = template
    assert validate(manifest).spec.rollouts[0].template == template
