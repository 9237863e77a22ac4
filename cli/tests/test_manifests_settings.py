"""A cluster's settings, and `rljob render`."""

import dataclasses
import json
import re

import pytest
import yaml

from core.tests.goldens import JOB
from rljob.api.kubernetes import Peer
from rljob.api.yaml_loader import write_yaml
from rljob.manifests import render
from rljob.manifests.accelerator_profiles import AcceleratorProfile
from rljob.manifests.inputs import Cluster, ClusterSettings, RenderTarget, read_cluster

SET = {
    "images": {"runner": "registry/runner:2"},
    "imagePullPolicy": "Never",
    "imagePullSecrets": ["a", "b"],
    "domain": "cluster.test",
    "storageClass": "fast",
    "storageSize": "5Gi",
    "accessModes": ["ReadWriteOnce"],
    "accelerator": "cpu",
    "gang": "volcano",
    "gangScheduler": "mine",
    "requestsPerGpu": {"cpu": "4", "memory": "16Gi"},
    "acceleratorProfiles": {"h100": {"resource": "example.com/gpu"}},
    "user": 1000,
    "allowFrom": [{"name": "prometheus", "namespaceLabels": {"name": "monitoring"}}],
}


def test_without_settings_a_cluster_is_as_the_contract_says():
    assert read_cluster({}) == Cluster()


def test_every_setting_can_be_set_and_reaches_the_cluster():
    assert {field.alias for field in ClusterSettings.model_fields.values()} == SET.keys()
    assert len(SET) == len(dataclasses.fields(Cluster))
    assert read_cluster(SET) == Cluster(
        images={**Cluster().images, "runner": "registry/runner:2"},
        image_pull_policy="Never",
        image_pull_secrets=("a", "b"),
        domain="cluster.test",
        storage_class="fast",
        storage_size="5Gi",
        access_modes=("ReadWriteOnce",),
        accelerator="cpu",
        gang="volcano",
        gang_scheduler="mine",
        requests_per_gpu={"cpu": "4", "memory": "16Gi"},
        accelerator_profiles={"h100": AcceleratorProfile(resource="example.com/gpu")},
        user=1000,
        allow_from=(Peer(name="prometheus", namespace_labels={"name": "monitoring"}),),
    )


@pytest.mark.parametrize("setting", sorted(SET.keys() - {"gangScheduler", "acceleratorProfiles"}))
def test_every_setting_changes_what_is_rendered(manifest, setting):
    from rljob.api.load import validate

    job = validate(manifest)
    assert render(job, RenderTarget(read_cluster({setting: SET[setting]}))) != render(job, RenderTarget())


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"acelerator": "cpu"}, "acelerator: unknown field; did you mean accelerator?"),
        ({"images": {"runer": "a"}}, "images.runer: unknown field; did you mean runner?"),
        ({"images": {"runner": 1}}, "images.runner: must be text, not 1; put it in quotes"),
        ({"accelerator": "tpu"}, "accelerator: must be 'nvidia' or 'cpu', not 'tpu'"),
        ({"accessModes": []}, "accessModes: must have at least 1 entry, not 0"),
        ({"storageSize": "big"}, "storageSize: must be an amount such as 10Gi, not 'big'"),
        ({"user": 0}, "user: must be at least 1, not 0"),
        ({"allowFrom": [{"name": "A"}]}, "allowFrom[0].name: must consist of lower-case letters"),
        ({"domain": ""}, "domain: is empty; give it a value"),
    ],
)
def test_a_setting_that_cannot_be_is_a_sentence(bad, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        read_cluster(bad)


def test_render_prints_documents_that_yaml_reads(rljob):
    code, out, err = rljob("render", JOB, "--namespace", "research")
    assert (code, err) == (0, "")
    documents = list(yaml.safe_load_all(out))
    assert {document["metadata"]["namespace"] for document in documents} == {"research"}
    assert not any("ownerReferences" in document["metadata"] for document in documents)
    [config] = [document for document in documents if document["kind"] == "ConfigMap"]
    assert json.loads(config["data"]["job.json"])["metadata"] == {"name": "sums"}


def test_render_prints_the_same_as_a_list_in_json(rljob):
    as_json = json.loads(rljob("render", JOB, "-o", "json")[1])
    assert (as_json["apiVersion"], as_json["kind"]) == ("v1", "List")
    assert as_json["items"] == list(yaml.safe_load_all(rljob("render", JOB)[1]))


def test_render_asks_for_gpus_where_there_are_any(rljob, tmp_path):
    settings = tmp_path / "settings.yaml"
    settings.write_text(write_yaml(SET))
    assert "nvidia.com/gpu" in rljob("render", JOB)[1]
    assert "nvidia.com/gpu" not in rljob("render", JOB, "--cpu")[1]
    assert "nvidia.com/gpu" not in rljob("render", JOB, "--cluster", settings)[1]
    assert "nvidia.com/gpu" in rljob("render", JOB, "--cluster", settings, "--gpu")[1]
    assert "registry/runner:2" in rljob("render", JOB, "--cluster", settings)[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", "the settings are not a mapping; write one per line, NAME: VALUE"),
        ("a: [", "line 1"),
        ("acelerator: cpu", "acelerator: unknown field; did you mean accelerator?"),
        (None, "there is no such file; give the path of a YAML file"),
    ],
)
def test_settings_that_cannot_be_read_are_a_sentence(rljob, tmp_path, text, said):
    settings = tmp_path / "settings.yaml"
    if text is not None:
        settings.write_text(text)
    code, out, err = rljob("render", JOB, "--cluster", settings)
    assert (code, out) == (2, "")
    assert err.startswith(f"rljob: {settings}: ")
    assert said in err


def test_fields_that_clusters_do_not_support_are_rejected(rljob):
    code, out, err = rljob("render", JOB, "--set", "spec.models[policy].source=/models/a")
    assert (code, out) == (2, "")
    assert err.startswith(f"rljob: {JOB}: spec.models[0].source: '/models/a' is a path of one machine")
