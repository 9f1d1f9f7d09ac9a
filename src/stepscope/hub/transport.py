"""Connections to a hub: TLS certificates, and the user at the other end of a local connection.

The certificate is made for the run, or is the user's own.  One made here is self-signed and needs no authority: an
agent does not trust the certificate itself, but a signature over its fingerprint made with the user's key
(``wire/handshake.py``).  A browser warns about it once; with ``--tls-cert`` and ``--tls-key`` it does not.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import shutil
import ssl
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import HubError, UsageError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate, GeneralName

__all__ = ["TlsFiles", "make_certificate", "may_connect", "peer_uid", "server_context", "user_certificate"]


# -- TLS --------------------------------------------------------------------------------------------------------------

_PREFIX = "stepscope-tls-"
_BEFORE = datetime.timedelta(days=2)
_AFTER = datetime.timedelta(days=397)
"""The longest that browsers accept; starting two days ago tolerates a clock that is off by a day."""
_READ_BY_ALL = 0o004


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    certificate: Path
    key: Path
    fingerprint: bytes
    """SHA-256 of the certificate's DER, 32 bytes; joins are signed over it."""

    def remove(self) -> None:
        """Remove a certificate that was made for a run; leave the user's own alone."""
        if self.certificate.parent.name.startswith(_PREFIX):
            shutil.rmtree(self.certificate.parent, ignore_errors=True)


def make_certificate(hosts: Sequence[str] = (), *, folder: Path | None = None) -> TlsFiles:
    """Make a key and a self-signed certificate in a folder that only its owner can enter.  HubError on failure.

    ``hosts`` are names and addresses under which the hub is reached, besides this machine's own.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Stepscope hub")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + _AFTER)
        .add_extension(x509.SubjectAlternativeName(_names(hosts)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
        files = (place / "hub.key", secret), (place / "hub.crt", certificate.public_bytes(serialization.Encoding.PEM))
        for path, data in files:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(data)
    except OSError as error:
        raise HubError(f"cannot store the hub's certificate: {error.strerror}") from error
    return TlsFiles(certificate=place / "hub.crt", key=place / "hub.key", fingerprint=_fingerprint(certificate))


def user_certificate(certificate: Path, key: Path) -> TlsFiles:
    """Check the user's files; UsageError says what is wrong."""
    from cryptography import x509

    texts = {}
    for path, flag in ((certificate, "--tls-cert"), (key, "--tls-key")):
        try:
            texts[flag] = path.read_bytes()
        except OSError as error:
            raise UsageError(f"{flag} {path}: {error.strerror}") from error
    if key.stat().st_mode & _READ_BY_ALL:
        raise UsageError(f"--tls-key {key}: other users can read it; run `chmod 600` on it")
    try:
        first = x509.load_pem_x509_certificate(texts["--tls-cert"])
    except ValueError as error:
        raise UsageError(f"--tls-cert {certificate}: not a PEM certificate") from error
    if first.not_valid_after_utc < datetime.datetime.now(datetime.timezone.utc):
        raise UsageError(f"--tls-cert {certificate}: expired on {first.not_valid_after_utc:%Y-%m-%d}")
    tls = TlsFiles(certificate=certificate, key=key, fingerprint=_fingerprint(first))
    try:
        server_context(tls)
    except HubError as error:
        raise UsageError(f"--tls-key {key}: {error}") from error
    return tls


def server_context(tls: TlsFiles) -> ssl.SSLContext:
    """Allow TLS 1.2 or later, HTTP/1.1.  HubError if key and certificate do not work together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without this, OpenSSL asks on the terminal for the password of an encrypted key.
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise HubError("the key does not match the certificate") from error
        raise HubError("not a PEM private key, or it is encrypted with a password") from error
    except OSError as error:
        raise HubError(f"cannot be read: {error.strerror}") from error
    return context


def _fingerprint(certificate: Certificate) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()


def _names(hosts: Sequence[str]) -> list[GeneralName]:
    from cryptography import x509

    found: list[GeneralName] = []
    for host in dict.fromkeys(("localhost", "127.0.0.1", "::1", *hosts)):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if host.isascii() and host:
                found.append(x509.DNSName(host))
    return found


# -- local peers ------------------------------------------------------------------------------------------------------
# Which local user is at the other end of a TCP connection, from the kernel's table.  Linux only.  (psutil knows the
# process of a connection, not the user, and that of another user only as root.)  Both ends of a local
# connection are in ``/proc/net/tcp`` (or ``tcp6``), each with the user that opened it.

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
ESTABLISHED = "01"
"""The user is known only in this state: a closing connection has no owner and is listed as root."""


def peer_uid(host: str, port: int, own_port: int, tables: tuple[Path, ...] = TABLES) -> int | None:
    """Return the user connected from that address to our port.

    -1: there is no such local connection, or not any more.  None: this system does not tell.
    """
    wanted, listed = _plain(ip_address(host.partition("%")[0])), False
    for table in tables:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) < 8 or not fields[1].endswith(f":{port:04X}"):
                listed = listed or (len(fields) > 7 and fields[1].endswith(f":{own_port:04X}"))
                continue
            listed = True
            if fields[2].endswith(f":{own_port:04X}") and fields[3] == ESTABLISHED and _address(fields[1]) == wanted:
                return int(fields[7])
    return -1 if listed else None


def may_connect(uid: int | None, *, loopback: bool) -> bool:
    """Whether a connection of that user (see ``peer_uid``) makes the hub load its server.

    Any connection from another machine does, if the user had the hub listen there; also if the owner is unknown.
    """
    return uid in (None, 0, os.getuid()) or (uid == -1 and not loopback)


def _address(field: str) -> IPv4Address | IPv6Address:
    """Parse words of four bytes in the machine's byte order."""
    raw = bytes.fromhex(field.partition(":")[0])
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return _plain(ip_address(raw))


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address
