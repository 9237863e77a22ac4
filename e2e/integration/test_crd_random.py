"""Whatever a manifest says, rljob and the API server agree on it, but for what crd_cases.py says they do not."""

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

OPERATOR_S = [case.says for case in (*FIELDS, *BOUNDS) if not case.server_says and case.why not in (KEYS, WRITTEN_NULL)]
OPERATOR_S += ["not supported yet", "in a cluster", "rljob's own"]
"""Parts of the sentences that the operator says in the API server's place."""
CLUSTER_S = [case.server_says for case in FIELDS if case.why == ONLY_IN_A_CLUSTER and case.server_says]
PROMPTS = st.text("{}{}ab.!:[] \n", max_size=10).map(lambda text: f"spec.tasks[0].prompt={json.dumps(text)}")
PLACES = st.text("./a:\n", max_size=6).map(lambda text: f"spec.models[0].source={json.dumps('job://' + text)}")
CHANGES = st.tuples(overrides_of(None), st.one_of(st.just([]), PROMPTS.map(lambda p: [p]), PLACES.map(lambda p: [p])))
EXAMPLES = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def pods(schema, depth=0):
    """Return a strategy for what a part of a pod template's schema allows, now and then for what it does not."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    kinds = {"string": WORDS, "integer": st.integers(0, 9), "number": st.just(0.5), "boolean": st.booleans()}
    kind = schema.get("type")
    if kind in kinds:
        return st.one_of(*[kinds[kind]] * 12, st.none(), st.sampled_from(["a", 1, True, [], {}]))
    if kind == "array":
        return st.lists(pods(schema["items"], depth + 1), max_size=2)
    if kind == "object" and "properties" not in schema:
        return st.dictionaries(WORDS, pods(schema["additionalProperties"], depth + 1), max_size=2)
    if kind == "object":
        names = sorted(schema["properties"])
        keyed = [name for name in ("name", "mountPath") if name in names]
        chosen = st.lists(st.sampled_from([*names, *keyed * len(names)]), max_size=max(1, 5 - depth), unique=True)
        return chosen.flatmap(
            lambda found: st.fixed_dictionaries(
                {name: st.deferred(lambda name=name: pods(schema["properties"][name], depth + 1)) for name in found}
            )
        )
    return st.sampled_from([1, "1Gi", "http", None, 0.5, True])


WORDS = st.sampled_from(["a", "b", "main", "RLJOB_A", "rljob.dev/x", "http", "é", "8080"])
TEMPLATES = pods(SCHEMA)


def told_by_rljob(manifest):
    try:
        validate(manifest)
    except ManifestError as error:
        return error.problems
    return []


def told_by_the_api_server(cluster, jobs, manifest):
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
    except ManifestError:  # one change took away what another changes
        return
    agree(told_by_rljob(manifest), told_by_the_api_server(cluster, jobs, manifest))


def agree(ours, theirs):
    shared = [problem for problem in ours if not any(words in problem for words in OPERATOR_S)]
    alone = [problem for problem in theirs if not any(words in problem for words in CLUSTER_S)]
    if shared:
        assert theirs, f"the API server took what rljob refuses: {shared}"
    elif not ours:
        assert alone == [], "rljob took what the API server refuses"


@EXAMPLES
@given(template=TEMPLATES)
def test_rljob_and_the_api_server_agree_on_random_pod_templates(cluster, namespace, template):
    jobs = cluster.api.path("rljob.dev/v1alpha1", "RLJob", namespace)
    manifest = changed(())
    manifest["spec"]["trainer"] = {"template": template}
    agree(told_by_rljob(manifest), told_by_the_api_server(cluster, jobs, manifest))
