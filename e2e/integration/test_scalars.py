"""The manifest's YAML loader and the real kubectl read the same values from the same text."""

from __future__ import annotations

import json
import random

import pytest
import yaml

from rljob.api.yaml_loader import YamlError, read_yaml

_ACCEPTED = """
3e-4 1e3 1E3 1e+3 1e-3 12e03 0e0 -0e0 1e0 0.1e1 1.5e300 1.7976931348623157e308 5e-324 1e-400
0.1000000000000000055511151231257827 100000000000000000000.0 4.0e2 1.e1 1e20 1e21 1e22
.5 -.5 +.5 5. 5.e3 .e1 +.5e1 1.0 1.50 0.0 -0.0 +0.0 0 -0 +0 +1 +1e3 -7
123456789012345678 9223372036854775807 9223372036854775808 -9223372036854775808
18446744073709551616 100000000000000000000
true True TRUE tRUE false False FALSE ~ null Null NULL nULL nullx true2 NaN nan inf Infinity yEs oN
1:80 a:80 2026-01 e3 1e 1e+ 1.2.3 0.5.1 1,000 0x 0b 0o 0b102 0x-1 0x1.8p1 1p3 _ __ _1 . ..
on-off yes! http://a:80/x a#b job://model 10Gi 1Gi 1Ti 0.5cpu 1/2 $x a,b é 日本
"""
_REFUSED = """
y yes on Y Yes ON n no off N No OFF 017 -017 08 00 00.5 0_7 0o17 0O17 0x1F -0X1f 0b101 0B11 1_000 .5_0 1_0.5 1e1_0
-9223372036854775809 18446744073709551615 99999999999999999999 123456789012345678901234567890
1:30 12:30:00 190:20:30 2026-01-01 2026-01-01T00:00:00Z .inf -.Inf .nan 1e309 << =
"""
ACCEPTED, REFUSED = _ACCEPTED.split(), _REFUSED.split()
DOCUMENTS = {
    "nothing": "x:\n",
    "quotes": "x: [\"5\", '5', \"on\", 'null', \"a\\tb\\u00e9\\n\", 'it''s']\n",
    "a text of lines": "x: |\n  a\n   b\n\n  c\n",
    "a text of lines without the last end": "x: |-\n  a\n  b\n",
    "a text of lines with every end": "x: |+\n  a\n\n\nw: 1\n",
    "folded": "x: >\n  a\n  b\n\n  c\n    d\n",
    "plain text over lines": "x: a\n  b\n\n  c\n",
    "quoted text over lines": 'x: "a\n  b\\\n  c"\n',
    "comments": "x: 1 # one\n# two\nw: a#b\n",
    "an anchor": "x: &a {b: [1, 2]}\nw: *a\n",
    "flow": "x: {a: [1, {b: c}], d: {}}\nw: []\n",
    "no values": "x: {a, b: }\n",
    "a long key": f"? {'a' * 2000}\n: 1\n",
    "keys like numbers in quotes": "'1': a\n\"on\": b\n",
    "a tag of text": "x: !!str 5\n",
    "JSON": '{"x": [1, 2.5, true, null, "on"]}\n',
    "lines of DOS": "x: 1\r\nw: |\r\n  a\r\n  b\r\n",
    "a byte order mark": "\ufeffx: 1\n",
    "a list not indented": "x:\n- 1\n- a: 2\n  b: 3\n",
    "one document marked": "---\nx: 1\n",
}
REFUSED_BY_DESIGN = {
    "the same key twice": "x: 1\nx: 2\n",
    "a number as key": "1: a\n",
    "a bare on as key": "on: a\n",
    "a tag of numbers": "x: !!float 5\n",
    "a merge": "x: &a {b: 1, c: 2}\nw: {<<: *a, c: 3}\n",
    "an open list": "x: [1, 2\n",
    "a tab": "x:\n\ty: 1\n",
}
SEED, HOW_MANY = 20260101, 3000


HEADER = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}


@pytest.fixture
def kubectl_reads(cluster):
    """Return a function that returns the mapping in a text as kubectl sends it. The text is the start of an object."""

    def read(text):
        if text.startswith("{"):
            text = text.rstrip().removesuffix("}") + "," + json.dumps(HEADER)[1:]
        else:
            text += "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n"
        arguments = ("create", "--dry-run=client", "--validate=false", "-o", "json", "-f", "-")
        found = json.loads(cluster.kubectl(*arguments, stdin=text))
        assert found.pop("metadata")["name"] == "a"
        return {key: value for key, value in found.items() if key not in HEADER}

    return read


def same(one, other):
    """Return whether two values are equal for Kubernetes: integers below 2⁶³ exactly, other numbers as floats."""
    if isinstance(one, dict | list):
        if type(one) is not type(other) or len(one) != len(other):
            return False
        if isinstance(one, list):
            return all(map(same, one, other))
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    numbers = [isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other)]
    if all(numbers):
        whole = [isinstance(value, int) and abs(value) < 2**63 for value in (one, other)]
        return one == other if all(whole) else float(one) == float(other)
    return isinstance(one, str) == isinstance(other, str) and type(one) is type(other) and one == other


def assert_same(texts, kubectl_reads):
    """Compare the values of plain scalars."""
    document = "x:\n" + "".join(f"- {text}\n" for text in texts)
    ours, theirs = read_yaml(document)["x"], kubectl_reads(document)["x"]
    assert len(ours) == len(theirs) == len(texts)
    differing = [
        (text, our, their) for text, our, their in zip(texts, ours, theirs, strict=True) if not same(our, their)
    ]
    assert differing == []


def refused(text):
    """Return whether a plain scalar is rejected."""
    try:
        read_yaml(f"- {text}\n")
    except YamlError as error:
        assert "put it in quotes" in str(error)
        return True
    return False


def test_accepted_scalars_are_read_as_kubectl_reads_them(kubectl_reads):
    assert_same(ACCEPTED, kubectl_reads)


@pytest.mark.parametrize("text", REFUSED)
def test_scalars_that_yaml_versions_read_differently_are_rejected(text):
    assert refused(text)


@pytest.mark.parametrize("text", DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_document_is_read_as_kubectl_reads_it(kubectl_reads, text):
    ours, theirs = read_yaml(text), kubectl_reads(text)
    assert same(ours, theirs), (ours, theirs)


@pytest.mark.parametrize("text", REFUSED_BY_DESIGN.values(), ids=REFUSED_BY_DESIGN)
def test_documents_that_are_ambiguous_or_invalid_are_rejected(text):
    with pytest.raises(YamlError):
        read_yaml(text)


def test_scalars_like_numbers_are_rejected_or_read_as_kubectl_reads_them(kubectl_reads):
    dice = random.Random(SEED)
    pieces = [
        *"0123456789+-._eExXobO",
        "0x",
        "0b",
        "0o",
        "1e",
        ".",
        "00",
        "18446744073709551615",
        "9223372036854775808",
    ]
    found = set()
    while len(found) < HOW_MANY:
        text = "".join(dice.choice(pieces) for _ in range(dice.randint(1, 7)))
        try:
            node = yaml.compose(f"- {text}\n").value[0]
        except yaml.YAMLError:
            continue
        if isinstance(node, yaml.ScalarNode) and node.value == text and text != "-":
            found.add(text)
    accepted = sorted(text for text in found if not refused(text))
    assert len(accepted) > HOW_MANY / 10
    assert_same(accepted, kubectl_reads)
