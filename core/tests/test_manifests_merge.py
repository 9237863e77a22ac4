"""Merging of templates follows the rules in core/tests/golden/merge.yaml."""

import copy

import pytest

from core.tests.goldens import DIRECTORY
from rljob.api.yaml_loader import read_yaml
from rljob.manifests.merge import KEYS, merge

RULES = read_yaml((DIRECTORY / "merge.yaml").read_text())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["rule"])
def test_a_rule_holds(rule):
    base, template = {"spec": rule["base"]}, {"spec": rule["template"]}
    given = copy.deepcopy((base, template))
    assert merge(base, template) == {"spec": rule["result"]}
    assert (base, template) == given


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["rule"])
def test_without_a_template_nothing_changes(rule):
    assert merge(rule["base"], None) == rule["base"]


def test_labels_and_annotations_merge():
    base = {"metadata": {"labels": {"a": "1"}, "annotations": {"b": "1"}}}
    template = {"metadata": {"labels": {"c": "2"}, "annotations": {"b": None}}}
    assert merge(base, template) == {"metadata": {"labels": {"a": "1", "c": "2"}, "annotations": {}}}


def test_every_merged_list_has_a_rule():
    def lists(value):
        if isinstance(value, dict):
            for key, inner in value.items():
                if isinstance(inner, list):
                    yield key
                yield from lists(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from lists(inner)

    shown = {key for rule in RULES for key in lists(rule["template"])}
    assert {*KEYS} - shown == {"volumeDevices", "resourceClaims", "schedulingGates"}  # as volumeMounts, as containers
