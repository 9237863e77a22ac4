"""Kubeconfigs: choice of the context, merging of several files, and messages for unusable files."""

import base64
import json
import ssl
import stat

import pytest
import yaml

from rljob.kube import kubeconfig as module
from rljob.kube.access import in_cluster
from rljob.kube.kubeconfig import default_access, from_kubeconfig, read


def kubeconfig(tmp_path, user=None, server="http://127.0.0.1:1", name="kubeconfig", context="c", **cluster):
    config = {
        "current-context": context,
        "contexts": [{"name": context, "context": {"cluster": "k", "user": "u", "namespace": "team-a"}}],
        "clusters": [{"name": "k", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "u", "user": user or {}}],
    }
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(config))
    return path


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def plugin(command, **more):
    return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(command), **more}}


def answer(**status):
    return json.dumps({"kind": "ExecCredential", "status": status})


def test_the_token_is_read_from_the_kubeconfig_or_its_file(tmp_path):
    assert from_kubeconfig(kubeconfig(tmp_path, {"token": "t"})).headers() == {"Authorization": "Bearer t"}
    (tmp_path / "token").write_text("f\n")
    access = from_kubeconfig(kubeconfig(tmp_path, {"tokenFile": "token"}))
    assert access.headers() == {"Authorization": "Bearer f"}


def test_a_token_file_is_read_again_after_a_minute(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("rljob.kube.access.time.monotonic", lambda: now[0])
    (tmp_path / "token").write_text("old")
    access = from_kubeconfig(kubeconfig(tmp_path, {"tokenFile": "token"}))
    assert access.headers() == {"Authorization": "Bearer old"}
    (tmp_path / "token").write_text("new")
    assert access.headers() == {"Authorization": "Bearer old"}
    now[0] = 61.0
    assert access.headers() == {"Authorization": "Bearer new"}


def test_a_context_has_server_user_and_namespace(tmp_path):
    user = {"token": "t", "as": "jane"}
    access = from_kubeconfig(kubeconfig(tmp_path, user, **{"proxy-url": "http://p:1", "tls-server-name": "n"}))
    assert (access.server, access.context, access.user) == ("http://127.0.0.1:1", "c", "u")
    assert (access.namespace, access.proxy, access.server_name) == ("team-a", "http://p:1", "n")
    assert access.headers() == {"Authorization": "Bearer t", "Impersonate-User": "jane"}


def test_the_first_file_with_a_value_wins(tmp_path):
    one = kubeconfig(tmp_path, {"token": "one"}, name="one/config", context="first")
    two = kubeconfig(tmp_path, {"tokenFile": "token"}, server="http://two:1", name="two/config", context="second")
    config = read([tmp_path / "none", one, two])
    assert config.access().context == "first"
    assert config.access("second").server == "http://127.0.0.1:1"  # the cluster k of the first file
    (tmp_path / "two" / "token").write_text("beside its own file")
    access = read([two, one]).access("first")
    assert access.headers() == {"Authorization": "Bearer beside its own file"}


def test_kubeconfig_and_home_are_read_as_kubectl_does(tmp_path, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"there is no kubeconfig: .*/\.kube/config does not exist; .* KUBECONFIG"):
        default_access()
    kubeconfig(tmp_path, {"token": "home"}, name=".kube/config")
    assert default_access().token == "home"
    other = kubeconfig(tmp_path, {"token": "other"}, context="other")
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'none'}:{other}")
    assert default_access().token == default_access("other").token == "other"


def test_a_pod_without_a_kubeconfig_uses_its_service_account(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setattr(module, "in_cluster", lambda: in_cluster(tmp_path))
    (tmp_path / "token").write_text("account")
    (tmp_path / "namespace").write_text("team-b")
    (tmp_path / "ca.crt").write_bytes(b"")
    monkeypatch.setattr("ssl.create_default_context", lambda cafile: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    access = default_access()
    assert (access.server, access.namespace) == ("https://[fd00::1]:443", "team-b")
    assert access.headers() == {"Authorization": "Bearer account"}
    with pytest.raises(ValueError, match="there is no kubeconfig"):
        default_access("named")


def test_outside_a_cluster_the_message_names_the_option(monkeypatch, tmp_path):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match="--kubeconfig"):
        in_cluster()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ValueError, match="service account"):
        in_cluster(tmp_path)


@pytest.mark.parametrize(
    ("user", "sentence"),
    [
        ({"auth-provider": {"name": "gcp"}}, "users with auth-provider are not supported; use a certificate, a token"),
        ({"client-certificate-data": base64.b64encode(b"x").decode(), "client-key-data": "eA=="}, "cannot be used"),
        ({"client-certificate": "none.crt", "client-key": "none.key"}, r"cannot be used: .*none\.crt"),
        ({"exec": {"command": "x"}}, r"user u: exec\.apiVersion: None is not supported; use client\.auth.*/v1 or"),
        (plugin(""), r"user u: exec\.command: missing"),
    ],
)
def test_an_unusable_kubeconfig_is_refused_in_one_sentence(tmp_path, user, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        from_kubeconfig(kubeconfig(tmp_path, user, "https://127.0.0.1:1"))
    assert str(tmp_path / "kubeconfig") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("contexts: [{", "cannot be read as a kubeconfig"),
        ("- a list", "is not a kubeconfig; correct it"),
        ("contexts: [{context: {}}]", "is not a kubeconfig"),
        ("", "current-context is missing; name a context: none"),
        ("current-context: here", "there is no context 'here'; there are none"),
        (
            "{current-context: c, contexts: [{name: c, context: {cluster: k}}]}",
            r"clusters\[k\] is missing, which context c",
        ),
    ],
)
def test_a_file_that_is_not_a_kubeconfig_is_refused_in_one_sentence(tmp_path, text, sentence):
    (tmp_path / "kubeconfig").write_text(text)
    with pytest.raises(ValueError, match=sentence) as caught:
        from_kubeconfig(tmp_path / "kubeconfig")
    assert "\n" not in str(caught.value)


def test_an_unknown_context_is_refused_with_the_known_contexts(tmp_path):
    with pytest.raises(ValueError, match=r"there is no context 'prod'; there are c$"):
        from_kubeconfig(kubeconfig(tmp_path), "prod")


def test_a_plugin_runs_once_until_its_token_expires(tmp_path):
    command = script(tmp_path / "login", f"echo x >> {tmp_path}/runs; echo '{answer(token='secret')}'")
    access = from_kubeconfig(kubeconfig(tmp_path, plugin(command)))
    assert access.headers() == access.headers() == {"Authorization": "Bearer secret"}
    assert (tmp_path / "runs").read_text() == "x\n"
    assert access.plugin is not None
    access.plugin.forget()
    access.headers()
    assert (tmp_path / "runs").read_text() == "x\nx\n"


def test_a_plugin_runs_again_when_its_token_has_expired(tmp_path):
    text = answer(token="old", expirationTimestamp="2020-01-01T00:00:00Z")
    command = script(tmp_path / "login", f"echo x >> {tmp_path}/runs; echo '{text}'")
    access = from_kubeconfig(kubeconfig(tmp_path, plugin(command)))
    access.headers()
    access.headers()
    assert (tmp_path / "runs").read_text() == "x\nx\n"


def test_a_plugin_receives_the_settings_of_its_kubeconfig(tmp_path):
    script(
        tmp_path / "login",
        f"echo \"$KUBERNETES_EXEC_INFO|$PROFILE|$*\" > {tmp_path}/received; echo '{answer(token='t')}'",
    )
    config = plugin("./login", args=["a b", "c"], env=[{"name": "PROFILE", "value": "p"}], provideClusterInfo=True)
    from_kubeconfig(kubeconfig(tmp_path, config)).headers()
    info, profile, arguments = (tmp_path / "received").read_text().strip().split("|")
    assert (profile, arguments) == ("p", "a b c")
    assert json.loads(info) == {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "spec": {"interactive": False, "cluster": {"server": "http://127.0.0.1:1"}},
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("exit 3", "ended with exit code 3; log in again"),
        ("echo nonsense", "is not an ExecCredential of client.authentication.k8s.io/v1"),
        ("echo '{\"status\": {}}'", "prints neither a token nor a certificate"),
    ],
)
def test_a_plugin_without_credentials_is_an_error_in_one_sentence(tmp_path, text, sentence):
    access = from_kubeconfig(kubeconfig(tmp_path, plugin(script(tmp_path / "login", text))))
    with pytest.raises(ValueError, match=sentence):
        access.headers()


def test_a_missing_plugin_is_an_error_with_its_install_hint(tmp_path):
    access = from_kubeconfig(kubeconfig(tmp_path, plugin("no-such-program", installHint="See example.com.\n")))
    with pytest.raises(ValueError, match=r"there is no program no-such-program on the PATH; See example.com\.$"):
        access.headers()
