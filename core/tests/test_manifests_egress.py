"""Outgoing connections by role: a service with an egress of its own is selected by no other policy for egress."""

import ipaddress

import pytest

from rljob.api.load import validate
from rljob.manifests import render
from rljob.manifests.inputs import RenderTarget

INSIDE = {"policy": "Listed", "to": [{"name": "inside", "cidr": "10.0.0.0/8"}]}
NOTHING = {"policy": "Listed"}
ROLES = (
    "reward-exact",
    "reward-own",
    "environment-own",
    "runner",
    "trainer",
    "coordinator",
    "rollout-main",
    "initializer",
)


def network(manifest, job, own):
    spec = manifest["spec"]
    spec["network"] = {"egress": job}
    spec["rewards"] = [{"name": "exact", "builtin": "reasoning_gym"}, {"name": "own", "builtin": "exact_match"}]
    spec["environments"] = [{"name": "own", "builtin": "frozen_lake"}]
    for service in (spec["rewards"][1], spec["environments"][0]):
        service |= {"egress": own} if own is not None else {}
    roles = {role.name: role for role in render(validate(manifest), RenderTarget(uid="uid"))}
    return roles["network"]


def selects(selector, labels):
    excluded = {value for each in selector.get("matchExpressions", ()) for value in each["values"]}
    return selector["matchLabels"].items() <= labels.items() and labels["rljob.dev/role"] not in excluded


def reaches(role, policies, address):
    """Return whether a pod of a role may connect to an address, by Kubernetes' rules: without a policy to all,
    else to what one of them allows."""
    labels = {"rljob.dev/job": "sums", "rljob.dev/role": role}
    specs = [each["spec"] for each in policies if selects(each["spec"]["podSelector"], labels)]
    restricting = [spec for spec in specs if "Egress" in spec["policyTypes"]]
    blocks = [
        to["ipBlock"]["cidr"]
        for spec in restricting
        for rule in spec["egress"]
        for to in rule.get("to", ())
        if "ipBlock" in to
    ]
    return not restricting or any(ipaddress.ip_address(address) in ipaddress.ip_network(cidr) for cidr in blocks)


@pytest.mark.parametrize("job", [{}, INSIDE, NOTHING], ids=["any", "inside", "nothing"])
@pytest.mark.parametrize("own", [None, {}, INSIDE, NOTHING], ids=["default", "any", "inside", "nothing"])
def test_each_role_reaches_what_its_egress_allows(manifest, job, own):
    policies = network(manifest, job, own).objects
    for role in ROLES:
        applies = own if role.endswith("-own") and own is not None else job
        anywhere = applies.get("policy", "Any") == "Any"
        for address, listed in (("10.1.2.3", bool(applies.get("to"))), ("169.254.169.254", False)):
            assert reaches(role, policies, address) == (anywhere or listed), (role, address)


def test_ingress_is_restricted_for_all_roles_whatever_their_egress(manifest):
    for policies in (network(manifest, job, own).objects for job in ({}, INSIDE) for own in ({}, INSIDE)):
        ingress = [each["spec"] for each in policies if "Ingress" in each["spec"]["policyTypes"]]
        assert all(
            any(selects(spec["podSelector"], {"rljob.dev/job": "sums", "rljob.dev/role": role}) for spec in ingress)
            for role in ROLES
        )


def test_a_change_of_the_egress_of_a_service_changes_its_policies_and_restarts_nothing(manifest):
    before, after = network(manifest, {}, None), network(manifest, {}, NOTHING)
    assert before.hash != after.hash
    hashes = []
    for own in (None, NOTHING):
        network(manifest, {}, own)
        found = render(validate(manifest), RenderTarget(uid="uid"))
        hashes.append({role.name: role.hash for role in found if role.name != "network"})
    assert hashes[0] == hashes[1]


def test_with_policies_disabled_there_are_none(manifest):
    network(manifest, {}, NOTHING)
    manifest["spec"]["network"] = {"policy": "Disabled"}
    roles = {role.name: role for role in render(validate(manifest), RenderTarget(uid="uid"))}
    assert roles["network"].objects == ()
