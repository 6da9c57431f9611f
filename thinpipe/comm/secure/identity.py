"""The identity of this machine: an Ed25519 key with its self-signed certificate, made on first use, as ssh does.

Both are in one file, so that they are created together, and because Python's ``ssl`` loads keys from files only. Peers
pin the key: names, dates and issuers of certificates are not checked.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from thinpipe.system.files import check_regular, errors_named, make_folder, replace_file, sync

HOME = "THINPIPE_HOME"  # environment variable: the folder of the key and of the known peers
FINGERPRINT_BYTES = 32
_FILE, _FILE_BYTES = "identity.pem", 100_000
_WHAT = "this machine's key"
_REMEDY = "restore it, or remove it to get a new key: peers that know the old one then need a new ticket"
_VALID = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # the latter: never expires


class Identity:
    """The Ed25519 key of this machine; ``path`` is the file of both, with the PEM text ``pem``."""

    def __init__(self, path: Path, pem: bytes) -> None:
        self.path, self.server_context = path, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.server_context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.server_context.num_tickets = 0  # no resumption: every connection proves the key
        try:
            key = load_pem_private_key(pem, None)
            self.server_context.load_cert_chain(path)  # also checks that the certificate is that of the key
        except (ValueError, TypeError, UnsupportedAlgorithm, OSError):
            raise ValueError("it is not a key with its certificate") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError("it is not an Ed25519 key")
        self._key = key
        self.public_key: bytes = key.public_key().public_bytes_raw()
        self.fingerprint = fingerprint_of(self.public_key)

    def sign(self, data: bytes) -> bytes:
        """Return the signature of ``data``, which must begin with a label: TLS and the certificate use the key too."""
        return self._key.sign(data)


def own_identity(folder: Path | None = None) -> Identity:
    """Return the identity of this machine, created on first use; raise ValueError if its file is unusable.

    ``folder``: by default $THINPIPE_HOME, or ~/.config/thinpipe.
    """
    folder = home() if folder is None else folder
    path = folder / _FILE
    if not os.path.lexists(path):
        with locked(folder):  # two processes must not create two keys
            if not os.path.lexists(path):
                _create(path)
    pem = _read_private(path)
    with errors_named(path, _WHAT, _REMEDY):
        return Identity(path, pem)


def home() -> Path:
    """Return the folder of the key and of the known peers."""
    try:
        return Path(os.environ.get(HOME) or "~/.config/thinpipe").expanduser()
    except RuntimeError:
        raise ValueError(f"this user has no home folder for keys: name a folder in {HOME}") from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of the key folder, which is created with mode 0700; threads and processes wait for each other."""
    try:
        make_folder(folder.parent)
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
            sync(folder.parent)
        if folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(
                f"{folder}, which holds {_WHAT}, can be written by other users: chmod 700 it, "
                f"or name another folder in {HOME}"
            )
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ValueError(f"{folder} cannot hold {_WHAT}: {error.strerror}; name another folder in {HOME}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_private(path: Path, content: bytes) -> None:
    """Write a file with mode 0600, atomically and durably; the caller holds the lock of the folder."""
    with replace_file(path) as temporary:
        temporary.unlink(missing_ok=True)  # of a process with the same number that was killed
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)


def fingerprint_of(public_key: bytes) -> bytes:
    """Return the SHA-256 of a raw public key."""
    return hashlib.sha256(public_key).digest()


def fingerprint_text(fingerprint: bytes) -> str:
    """Return a fingerprint for people: 43 characters of base64, as ssh writes it."""
    return base64.b64encode(fingerprint).decode().rstrip("=")


def fingerprint_bytes(text: str) -> bytes:
    """Return the fingerprint that ``fingerprint_text`` wrote; raise ValueError for any other text."""
    try:
        fingerprint = base64.b64decode(text.strip() + "=", validate=True)
    except ValueError:
        fingerprint = b""
    if len(fingerprint) != FINGERPRINT_BYTES or fingerprint_text(fingerprint) != text.strip():
        raise ValueError(
            f"a fingerprint has 43 letters, digits, + and /, as `thinpipe peers` shows it; got {text[:60]!r}"
        )
    return fingerprint


def _create(path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "thinpipe")])  # the same on all machines
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), *_VALID)
        .sign(key, None)
        .public_bytes(Encoding.PEM)
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        write_private(path, private + certificate)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}; name another folder in {HOME}") from None


def _read_private(path: Path) -> bytes:
    """Return the contents of the key file; raise ValueError unless it is a regular file of this user alone."""
    check_regular(path, _WHAT, _REMEDY, limit=_FILE_BYTES)
    with errors_named(path, _WHAT, _REMEDY):
        mode = stat.S_IMODE(path.stat().st_mode)
        content = path.read_bytes()
        if not content:
            raise ValueError("it is empty")
    if mode & 0o077:
        raise ValueError(f"{path} is {_WHAT}, and other users can read or write it (mode {mode:04o}): chmod 600 {path}")
    return content


def public_key_of(certificate: bytes) -> bytes:
    """Return the raw public key of a certificate in DER; raise ValueError unless it is an Ed25519 key."""
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except Exception:  # cryptography raises several types for damaged certificates and unknown algorithms
        raise ValueError("its certificate cannot be read") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("its certificate has no Ed25519 key")
    return key.public_bytes_raw()
