"""The key of this machine: made once, for this user alone, and an unusable file is one clear error."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import ssl
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tests.comm.secure.meeting import with_certificate
from thinpipe.comm.secure.identity import (
    fingerprint_bytes,
    fingerprint_of,
    fingerprint_text,
    home,
    own_identity,
    public_key_of,
    write_private,
)
from thinpipe.extras import missing_extra


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_key_is_made_once_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "keys"
    made = own_identity(folder)
    assert mode(folder) == 0o700
    assert {path.name: mode(path) for path in folder.iterdir()} == {"identity.pem": 0o600, "lock": 0o600}
    assert own_identity(folder).fingerprint == made.fingerprint == hashlib.sha256(made.public_key).digest()
    assert own_identity(tmp_path / "other").fingerprint != made.fingerprint
    Ed25519PublicKey.from_public_bytes(made.public_key).verify(made.sign(b"data"), b"data")


def test_the_umask_does_not_matter(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        own_identity(tmp_path / "keys")
    finally:
        os.umask(before)
    assert mode(tmp_path / "keys") == 0o700
    assert mode(tmp_path / "keys" / "identity.pem") == 0o600


def test_the_folder_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINPIPE_HOME", str(tmp_path / "keys"))
    assert own_identity().path == tmp_path / "keys" / "identity.pem"
    monkeypatch.delenv("THINPIPE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home() == tmp_path / ".config" / "thinpipe"


def fingerprint_in(folder: str) -> bytes:
    return own_identity(Path(folder)).fingerprint


def test_threads_and_processes_at_once_get_the_same_key(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool, ThreadPoolExecutor(4) as threads:
        for attempt in range(5):
            folder = str(tmp_path / str(attempt))
            asked = pool.map_async(fingerprint_in, [folder] * 8, chunksize=1)
            found = {*threads.map(fingerprint_in, [folder] * 8), *asked.get(60)}
            assert found == {own_identity(Path(folder)).fingerprint}


def test_what_a_killed_process_left_is_no_key(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    left = folder / f".{os.getpid()}.tmp.identity.pem"  # its number may come again, in containers every time
    left.write_bytes(b"half")
    left.chmod(0o644)
    made = own_identity(folder)
    assert not left.exists()
    assert mode(made.path) == 0o600


DAMAGES = (
    *("empty", "half", "text", "binary", "no certificate", "no key", "another's certificate", "another kind of key"),
    *("encrypted", "too long"),
)


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    key, certificate = content.split(b"-----BEGIN CERTIFICATE-----")
    other = own_identity(path.parent / "other").path.read_bytes().split(b"-----BEGIN CERTIFICATE-----")[1]
    curve = with_certificate(generate_private_key(SECP256R1()))
    encrypted = load_pem_private_key(key, None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"passphrase")
    )
    damaged = {
        "encrypted": encrypted + b"-----BEGIN CERTIFICATE-----" + certificate,
        "empty": b"",
        "half": content[: len(content) // 2],
        "text": b"hello\n",
        "binary": bytes(range(256)),
        "no certificate": key,
        "no key": b"-----BEGIN CERTIFICATE-----" + certificate,
        "another's certificate": key + b"-----BEGIN CERTIFICATE-----" + other,
        "another kind of key": curve,
        "too long": content * 300,
    }
    path.write_bytes(damaged[how])


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_key_is_one_error_that_names_the_file_and_keeps_it(tmp_path: Path, how: str) -> None:
    path = own_identity(tmp_path).path
    damage(path, how)
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"identity\.pem cannot be read as this .*; restore it") as error:
        own_identity(tmp_path)
    assert "\n" not in str(error.value)
    assert path.read_bytes() == content


def test_every_cut_and_changed_byte_is_the_same_key_or_an_error(tmp_path: Path) -> None:
    path = own_identity(tmp_path).path
    content, fingerprint = path.read_bytes(), own_identity(tmp_path).fingerprint
    outcomes = set()
    for position in range(0, len(content), 3):
        for changed in (content[:position], content[:position] + b"*" + content[position + 1 :]):
            path.write_bytes(changed)
            try:
                outcomes.add(own_identity(tmp_path).fingerprint == fingerprint)
            except ValueError as error:
                outcomes.add("identity.pem" in str(error))
    assert outcomes == {True}


@pytest.mark.parametrize("kind", ["directory", "pipe", "link to nothing"])
def test_what_is_not_a_file_is_one_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "identity.pem"
    {"directory": path.mkdir, "pipe": lambda: os.mkfifo(path), "link to nothing": lambda: path.symlink_to("nowhere")}[
        kind
    ]()
    with pytest.raises(ValueError, match=r"identity\.pem cannot be read as this machine's key: it is a"):
        own_identity(tmp_path)


@pytest.mark.parametrize("permissions", [0o640, 0o604, 0o660, 0o777])
def test_a_key_that_others_can_read_is_an_error_with_the_command(tmp_path: Path, permissions: int) -> None:
    path = own_identity(tmp_path).path
    path.chmod(permissions)
    with pytest.raises(ValueError, match=rf"mode {permissions:04o}\): chmod 600 {path}"):
        own_identity(tmp_path)
    path.chmod(0o400)
    own_identity(tmp_path)


def test_a_folder_that_others_can_write_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="can be written by other users: chmod 700 it"):
        own_identity(folder)
    assert not (folder / "identity.pem").exists()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot hold this machine's key: .*name another folder in THINPIPE_HOME"):
        own_identity(tmp_path / "file" / "keys")


def test_a_private_file_replaces_another_one_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o644)
    write_private(path, b"new")
    assert (path.read_bytes(), mode(path)) == (b"new", 0o600)


def test_a_fingerprint_as_text_is_read_back_and_a_typo_found(tmp_path: Path) -> None:
    fingerprint = own_identity(tmp_path).fingerprint
    text = fingerprint_text(fingerprint)
    assert fingerprint_bytes(text) == fingerprint
    last = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    unused_bits = text[:-1] + last[last.index(text[-1]) ^ 1]  # two bits of the last character have no meaning
    for wrong in ("", text[:-1], text + "A", text[:-1] + "é", text[:-1] + "*", unused_bits, "x" * 1000):
        with pytest.raises(ValueError, match="a fingerprint has 43 letters, digits"):
            fingerprint_bytes(wrong)


def test_the_certificate_has_the_key_and_tells_nothing_else(tmp_path: Path) -> None:
    identity = own_identity(tmp_path)
    certificate = x509.load_pem_x509_certificate(identity.path.read_bytes())
    der = certificate.public_bytes(Encoding.DER)
    assert fingerprint_of(public_key_of(der)) == identity.fingerprint
    assert certificate.subject.rfc4514_string() == certificate.issuer.rfc4514_string() == "CN=thinpipe"
    assert certificate.not_valid_before_utc.year == 2000  # the same everywhere: not when the key was made
    assert identity.server_context.minimum_version == ssl.TLSVersion.TLSv1_3
    for wrong in (b"", der[:-1], b"junk", der[:20] + bytes(20) + der[40:]):
        with pytest.raises(ValueError, match="its certificate"):
            public_key_of(wrong)


def test_a_missing_package_is_named_with_what_to_install() -> None:
    error = ModuleNotFoundError("No module named 'cryptography'", name="cryptography.hazmat")
    assert missing_extra(error) == ("this needs cryptography, which is not installed: pip install 'thinpipe[train]'")
