"""Certificates for tests of TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """Make a certificate that is its own authority; return the files of the certificate and its key.

    Args:
        directory: is created.
        name: DNS:NAME or IP:ADDRESS of the server.
    """
    directory.mkdir()
    path, key = directory / "tls.crt", directory / "tls.key"
    names = ["-subj", f"/CN={name.partition(':')[2]}", "-addext", f"subjectAltName={name}"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command = ["openssl", "req", "-x509", *curve, *names, "-days", "2", "-keyout", str(key), "-out", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path, key
