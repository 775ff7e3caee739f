# SPDX-License-Identifier: Apache-2.0
"""Keys for a federation on one machine: an authority that signs itself, a server's certificate, and a key for every node."""

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["make_certificates", "make_node_key"]

_DAYS = 30
_CURVE = ec.SECP384R1()  # Flower takes NIST's curves


def make_certificates(folder: Path) -> tuple[Path, Path, Path]:
    """Make an authority and a certificate for 127.0.0.1 and localhost.  -> authority, certificate, key"""
    folder.mkdir(parents=True, exist_ok=True)
    root, server = ec.generate_private_key(_CURVE), ec.generate_private_key(_CURVE)
    issuer = _name("coterie loopback authority")
    authority = _builder(issuer, issuer, root).add_extension(x509.BasicConstraints(True, 0), critical=True)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    signed = (
        _builder(_name("localhost"), issuer, server)
        .add_extension(x509.BasicConstraints(False, None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key()), critical=False)
    )
    paths = (folder / "ca.pem", folder / "server.pem", folder / "server.key")
    paths[0].write_bytes(authority.sign(root, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(signed.sign(root, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))
    _write_secret(paths[2], server, serialization.PrivateFormat.PKCS8)
    return paths


def make_node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """Make the key that a node proves itself with.  -> private, public"""
    folder.mkdir(parents=True, exist_ok=True)
    private = ec.generate_private_key(_CURVE)
    public = private.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write_secret(folder / name, private, serialization.PrivateFormat.OpenSSH)
    (folder / f"{name}.pub").write_bytes(public)
    return folder / name, folder / f"{name}.pub"


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _write_secret(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    """Write a private key that only its owner may read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
