"""Operations on any test cluster: kubectl, manifests, namespaces, service accounts."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tools.cluster import identity
from tools.cluster.client import Api, ApiError, Object


class Access:
    """Administrator access to a cluster."""

    context = "test"
    """The only context in kubeconfigs."""
    bin: Path
    """The directory with kubectl."""
    directory: Path
    """Directory of the cluster's files."""
    kubeconfig: Path
    """The administrator's kubeconfig."""
    url: str
    """Address of the API server."""
    authority: Path
    """The certificate authority of the API server."""
    api: Api
    """Administrator client."""

    def kubectl(self, *arguments: str, stdin: str | None = None, kubeconfig: Path | None = None) -> str:
        """Run kubectl, by default as administrator, and return its output.

        Raises:
            RuntimeError: it failed; the message has its output.
        """
        done = subprocess.run(
            [str(self.bin / "kubectl"), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            env=os.environ | {"KUBECONFIG": str(kubeconfig or self.kubeconfig), "HOME": str(self.directory)},
        )
        if done.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(arguments)} failed: {done.stderr.strip()}")
        return done.stdout

    def install(self, manifests: Sequence[Path]) -> None:
        """Apply the objects of YAML files; wait until CustomResourceDefinitions are served."""
        objects = [found for path in manifests for found in yaml.safe_load_all(path.read_text()) if found]
        for found in objects:
            self.api.apply_object(found, "cluster")
        for found in objects:
            if found["kind"] == "CustomResourceDefinition":
                self._wait_served(found["metadata"]["name"])

    def _wait_served(self, name: str) -> None:
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
        found = self.api.wait_condition(path, "Established")
        version = f"{found['spec']['group']}/{found['spec']['versions'][0]['name']}"
        kind = found["spec"]["names"]["kind"]
        self.api.wait_for(lambda: self._serves(version, kind), what=f"{name} to be served")

    def _serves(self, version: str, kind: str) -> bool:
        with contextlib.suppress(KeyError):
            return self.api.get(self.api.path(version, kind)) is not None
        return False

    def service_account_token(self, namespace: str, name: str) -> str:
        """Return a token of a service account; create the account if necessary."""
        accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        self._create(accounts, {"metadata": {"name": name}})
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token: str = self.api.post(f"{accounts}/{name}/token", request)["status"]["token"]
        return token

    def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """Return a kubeconfig of a service account; create the account if necessary."""
        return self._kubeconfig(f"{namespace}-{name}", self.service_account_token(namespace, name), namespace)

    def allowed(self, account: str, where: str, verb: str, resource: str, group: str, name: str = "") -> bool:
        """Return whether a service account ("namespace:name") has a right in the namespace ``where``.

        ``resource``: RESOURCE or RESOURCE/SUBRESOURCE.
        """
        resource, _, subresource = resource.partition("/")
        attributes = {"namespace": where, "verb": verb, "group": group, "resource": resource}
        attributes |= {"subresource": subresource, "name": name}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": f"system:serviceaccount:{account}", "resourceAttributes": attributes},
        }
        may: bool = self.api.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)["status"]["allowed"]
        return may

    def wait_allowed(self, account: str, where: str, verb: str, resource: str, group: str, name: str = "") -> None:
        """Wait until :meth:`allowed` is true: the API server uses a new RoleBinding with a delay."""
        what = f"{account} to be allowed to {verb} {resource} {name}".rstrip()
        self.api.wait_for(lambda: self.allowed(account, where, verb, resource, group, name), what=what)

    def namespace(self, prefix: str = "test", labels: Mapping[str, str] | None = None) -> str:
        """Create a namespace for a test and return its name; it is ready for pods."""
        name = f"{prefix}-{secrets.token_hex(4)}"
        self.api.post("/api/v1/namespaces", {"metadata": {"name": name, "labels": dict(labels or {})}})
        self._create(f"/api/v1/namespaces/{name}/serviceaccounts", {"metadata": {"name": "default"}})
        return name

    def _create(self, collection: str, body: Object) -> None:
        try:
            self.api.post(collection, body)
        except ApiError as error:
            if error.code != 409:
                raise

    def _kubeconfig(self, name: str, token: str, namespace: str = "default") -> Path:
        path = self.directory / f"{name}.kubeconfig"
        return identity.kubeconfig(path, self.url, self.authority, token, namespace, self.context)
