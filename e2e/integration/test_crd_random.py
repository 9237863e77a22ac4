"""rljob and the API server accept the same random manifests, except for the differences listed in crd_cases.py."""

from __future__ import annotations

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.tests.crd_cases import BOUNDS, FIELDS, KEYS, ONLY_IN_A_CLUSTER, WRITTEN_NULL, changed
from core.tests.test_api_properties import overrides_of
from rljob.api.errors import ManifestError
from rljob.api.load import validate
from rljob.api.pod_models import SCHEMA
from tools.cluster.client import ApiError

OPERATOR_MESSAGES = [
    case.message for case in (*FIELDS, *BOUNDS) if not case.server_message and case.why not in (KEYS, WRITTEN_NULL)
]
OPERATOR_MESSAGES += ["not supported yet", "in a cluster", "reserved for rljob", "the name of rljob's"]
"""Parts of messages about errors that the operator finds instead of the API server."""
SERVER_MESSAGES = [case.server_message for case in FIELDS if case.why == ONLY_IN_A_CLUSTER and case.server_message]
PROMPTS = st.text("{}{}ab.!:[] \n", max_size=10).map(lambda text: f"spec.tasks[0].prompt={json.dumps(text)}")
PLACES = st.text("./a:\n", max_size=6).map(lambda text: f"spec.models[0].source={json.dumps('job://' + text)}")
CHANGES = st.tuples(overrides_of(None), st.one_of(st.just([]), PROMPTS.map(lambda p: [p]), PLACES.map(lambda p: [p])))
EXAMPLES = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def pod_values(schema, depth=0):
    """Return a strategy for what a part of a pod template's schema allows, now and then for what it does not."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    kinds = {"string": WORDS, "integer": st.integers(0, 9), "number": st.just(0.5), "boolean": st.booleans()}
    kind = schema.get("type")
    if kind in kinds:
        return st.one_of(*[kinds[kind]] * 12, st.none(), st.sampled_from(["a", 1, True, [], {}]))
    if kind == "array":
        return st.lists(pod_values(schema["items"], depth + 1), max_size=2)
    if kind == "object" and "properties" not in schema:
        return st.dictionaries(WORDS, pod_values(schema["additionalProperties"], depth + 1), max_size=2)
    if kind == "object":
        names = sorted(schema["properties"])
        keyed = [name for name in ("name", "mountPath") if name in names]
        chosen = st.lists(st.sampled_from([*names, *keyed * len(names)]), max_size=max(1, 5 - depth), unique=True)
        return chosen.flatmap(
            lambda found: st.fixed_dictionaries(
                {
                    name: st.deferred(lambda name=name: pod_values(schema["properties"][name], depth + 1))
                    for name in found
                }
            )
        )
    return st.sampled_from([1, "1Gi", "http", None, 0.5, True])


WORDS = st.sampled_from(["a", "b", "main", "RLJOB_A", "rljob.dev/x", "http", "é", "8080"])
TEMPLATES = pod_values(SCHEMA)


def errors_of_rljob(manifest):
    try:
        validate(manifest)
    except ManifestError as error:
        return error.problems
    return []


def errors_of_api_server(cluster, jobs, manifest):
    try:
        cluster.api.post(jobs, manifest, fieldValidation="Strict", dryRun="All")
    except ApiError as error:
        causes = error.body.get("details", {}).get("causes", [])
        return [cause["message"] for cause in causes] or [error.message]
    return []


@EXAMPLES
@given(changes=CHANGES)
def test_rljob_and_the_api_server_agree_on_random_manifests(cluster, namespace, changes):
    jobs = cluster.api.path("rljob.dev/v1alpha1", "RLJob", namespace)
    try:
        manifest = changed(tuple([*changes[0], *changes[1]]))
    except ManifestError:  # one change removed the field that another changes
        return
    assert_agreement(errors_of_rljob(manifest), errors_of_api_server(cluster, jobs, manifest))


def assert_agreement(ours, theirs):
    shared = [problem for problem in ours if not any(words in problem for words in OPERATOR_MESSAGES)]
    alone = [problem for problem in theirs if not any(words in problem for words in SERVER_MESSAGES)]
    if shared:
        assert theirs, f"the API server accepted a manifest that rljob rejects: {shared}"
    elif not ours:
        assert alone == [], "rljob accepted a manifest that the API server rejects"


@EXAMPLES
@given(template=TEMPLATES)
def test_rljob_and_the_api_server_agree_on_random_pod_templates(cluster, namespace, template):
    jobs = cluster.api.path("rljob.dev/v1alpha1", "RLJob", namespace)
    manifest = changed(())
    manifest["spec"]["trainer"] = {"template": template}
    assert_agreement(errors_of_rljob(manifest), errors_of_api_server(cluster, jobs, manifest))
