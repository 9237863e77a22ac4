"""The chart's admission webhook: off by default, certificates of Helm and cert-manager, what the API server stores."""

from __future__ import annotations

import base64
import ssl

import pytest

from e2e.integration.helm_program import CHART, KUBERNETES, Helm, of_kind
from rljob.operator.config import WebhookSettings, read_settings

ON = ("--set", "webhook.enabled=true")
MANAGER = ("--set", "webhook.enabled=true,webhook.certificates=certManager")
KIND = "ValidatingWebhookConfiguration"


def webhook(found: list[dict]) -> dict:
    (only,) = of_kind(found, KIND)["webhooks"]
    return only


def test_by_default_there_is_no_webhook(program: Helm):
    found = program.template()
    assert not {KIND, "Secret", "Issuer", "Certificate"} & {each["kind"] for each in found}
    assert "webhook" not in of_kind(found, "ConfigMap")["data"]["operator.json"]


def test_helm_makes_a_certificate_for_the_name_that_the_api_server_uses(program: Helm, tmp_path):
    found = program.template(*ON)
    secret = of_kind(found, "Secret")
    data = {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}
    client = webhook(found)["clientConfig"]
    assert base64.b64decode(client["caBundle"]).decode() == data["ca.crt"]
    assert client["service"] == {
        "namespace": "rljob-system",
        "name": "rljob-operator-webhook",
        "path": "/validate",
        "port": 443,
    }
    for name, text in data.items():
        (tmp_path / name).write_text(text)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    authority = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = server.wrap_bio(incoming, outgoing, server_side=True)
    other = authority.wrap_bio(outgoing, incoming, server_hostname="rljob-operator-webhook.rljob-system.svc")
    for _ in range(4):  # the client checks the name and the authority of the certificate
        for side in (other, one):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert other.version() == "TLSv1.3"


def test_the_operator_listens_where_the_service_points_and_reads_the_mounted_certificate(program: Helm, tmp_path):
    found = program.template(*ON, "--set", "webhook.port=9999")
    path = tmp_path / "operator.json"
    path.write_text(of_kind(found, "ConfigMap")["data"]["operator.json"])
    assert read_settings(path).webhook == WebhookSettings(listen=":9999")
    pod = of_kind(found, "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {"name": "webhook", "containerPort": 9999} in container["ports"]
    mount = next(each for each in container["volumeMounts"] if each["name"] == "webhook")
    assert WebhookSettings().certificate == f"{mount['mountPath']}/tls.crt"
    assert WebhookSettings().key == f"{mount['mountPath']}/tls.key"
    volume = next(each for each in pod["volumes"] if each["name"] == "webhook")
    assert volume["secret"]["secretName"] == of_kind(found, "Secret")["metadata"]["name"]
    (service,) = [each for each in found if each["kind"] == "Service" and each["metadata"]["name"].endswith("-webhook")]
    assert service["spec"]["ports"] == [{"name": "https", "port": 443, "targetPort": "webhook"}]


@pytest.mark.parametrize(
    ("values", "issuer"),
    [
        ((), {"kind": "Issuer", "name": "rljob-operator-webhook"}),
        (
            ("--set", "webhook.issuer.kind=ClusterIssuer,webhook.issuer.name=company"),
            {"kind": "ClusterIssuer", "name": "company"},
        ),
    ],
)
def test_cert_manager_issues_the_certificate(program: Helm, values, issuer):
    found = program.template(*MANAGER, *values)
    assert not [each for each in found if each["kind"] == "Secret"]
    certificate = of_kind(found, "Certificate")["spec"]
    assert certificate["issuerRef"] == issuer
    assert certificate["dnsNames"] == ["rljob-operator-webhook.rljob-system.svc"]
    assert bool([each for each in found if each["kind"] == "Issuer"]) == (not values)
    volumes = of_kind(found, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "webhook", "secret": {"secretName": certificate["secretName"]}} in volumes
    metadata = of_kind(found, KIND)["metadata"]
    assert metadata["annotations"]["cert-manager.io/inject-ca-from"] == "rljob-system/rljob-operator-webhook"
    assert "caBundle" not in webhook(found)["clientConfig"]


def test_only_rljobs_of_the_served_namespaces_are_checked(program: Helm):
    assert "namespaceSelector" not in webhook(program.template(*ON))
    found = program.template(
        *ON,
        "--set",
        "watchNamespaces={a,b},webhook.namespaceSelector.matchLabels.checked=yes,webhook.failurePolicy=Fail",
    )
    assert webhook(found)["namespaceSelector"] == {
        "matchLabels": {"checked": "yes"},
        "matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a", "b"]}],
    }
    assert webhook(found)["failurePolicy"] == "Fail"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("webhook.port=8080", "webhook.port: must differ from metrics.port, 8081 and 8082"),
        ("webhook.failurePolicy=Never", "at '/webhook/failurePolicy': value must be one of 'Ignore', 'Fail'"),
        ("webhook.timeoutSeconds=60", "at '/webhook/timeoutSeconds': maximum: got 60, want 30"),
        ("webhook.certificates=mine", "at '/webhook/certificates': value must be one of 'helm', 'certManager'"),
    ],
)
def test_a_wrong_value_is_rejected_by_name(program: Helm, value, sentence):
    text = program("template", "rljob", str(CHART), "--kube-version", KUBERNETES, *ON, "--set", value, code=1)
    assert sentence in text


def test_the_api_server_stores_the_webhook_and_an_upgrade_keeps_its_certificate(cluster, namespace, helm: Helm):
    values = (*ON, "--set", f"watchNamespaces={{{namespace}}}")
    helm("install", namespace, str(CHART), "-n", namespace, *values)
    try:
        secrets = cluster.api.path("v1", "Secret", namespace, f"{namespace}-operator-webhook")
        made = cluster.api.get(secrets)["data"]
        helm("upgrade", namespace, str(CHART), "-n", namespace, *values, "--set", "workers=3")
        assert cluster.api.get(secrets)["data"] == made
        name = f"{namespace}.{namespace}-operator.rljob.dev"
        stored = cluster.api.get(cluster.api.path("admissionregistration.k8s.io/v1", KIND, None, name))
        (only,) = stored["webhooks"]
        assert only["clientConfig"]["caBundle"] == made["ca.crt"]
        assert (only["failurePolicy"], only["sideEffects"], only["timeoutSeconds"]) == ("Ignore", "None", 5)
    finally:
        helm("uninstall", namespace, "-n", namespace)
    assert not cluster.api.exists(secrets)
