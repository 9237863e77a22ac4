"""Settings: valid values are read, and invalid values are errors."""

import pytest

from rljob.manifests.inputs import Cluster
from rljob.operator import main
from rljob.operator.config import OperatorSettings, read_settings


def read(tmp_path, text):
    path = tmp_path / "operator.yaml"
    path.write_text(text)
    return read_settings(path)


def test_an_empty_file_gives_the_defaults(tmp_path):
    assert read(tmp_path, "") == OperatorSettings()
    assert OperatorSettings().for_rendering() == Cluster()


def test_settings_are_read_from_yaml_and_json(tmp_path):
    settings = read(tmp_path, '{"namespaces": ["a", "b"], "cluster": {"images": {"trainer": "x:1"}, "domain": "d.e"}}')
    assert settings.namespaces == ["a", "b"]
    assert settings.for_rendering().images["trainer"] == "x:1"
    assert settings.for_rendering().images["runner"] == "rljob-runner"
    assert read(tmp_path, "workers: 3\nlease: {name: other}").lease.name == "other"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("workers: 0", "workers: must be at least 1, not 0"),
        ("worker: 3", "worker: unknown field; did you mean workers?"),
        ("cluster: {accelerator: tpu}", "cluster.accelerator: must be"),
        ("cluster: {images: {trainr: x}}", "cluster.images.trainr: unknown field"),
        ("lease: {renewSeconds: 20}", "lease.retrySeconds: must be less than renewSeconds"),
        ("lease: {durationSeconds: 4, renewSeconds: 3.5}", "lease.durationSeconds: must be at least 1 more than"),
        ("listen: here", "listen: must be host:port, such as :8080"),
        ("listen: '0.0.0.0:70000'", "listen: must be host:port"),
        ("webhook: {listen: here}", "webhook.listen: must be host:port, such as :8080"),
        ("webhook: {certificat: x}", "webhook.certificat: unknown field; did you mean certificate?"),
        ("namespaces: [Team_A]", "namespaces[0]: "),
        ("[]", "not a mapping"),
        ("a: b: c", "cannot be read"),
    ],
)
def test_each_wrong_value_is_one_sentence(tmp_path, text, sentence):
    with pytest.raises(ValueError) as refusal:
        read(tmp_path, text)
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_write_ends_before_another_operator_may_lead(tmp_path):
    for text in ("", "lease: {durationSeconds: 5, renewSeconds: 4, retrySeconds: 1}"):
        lease = read(tmp_path, text).lease
        assert lease.renew_seconds + lease.write_seconds <= lease.duration_seconds


def test_wrong_settings_end_the_operator_with_code_2(tmp_path, monkeypatch, caplog):
    path = tmp_path / "operator.yaml"
    path.write_text("workers: many")
    monkeypatch.setenv("RLJOB_OPERATOR_CONFIG", str(path))
    monkeypatch.setattr("sys.argv", ["rljob-operator"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2 and "workers: must be a whole number" in caplog.text
