"""Real servers for tests: redis-server (or valkey-server), and moto's S3. Each on a free port, stopped by its id."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.ports import free_port

START_S = 60.0
BUCKET = "stowage-tests"


def wait_until(ready: Callable[[], Any], seconds: float = START_S, what: str = "the server") -> None:
    until_s = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, redis.RedisError):
            if ready():
                return
        assert time.monotonic() < until_s, f"{what} was not ready within {seconds:.0f} s"
        time.sleep(0.02)


class RedisServer:
    """`options` as on its command line. `client`: another way in, for tests to look and to damage."""

    def __init__(self, *options: str, port: int = 0, **client: Any) -> None:
        program = shutil.which("valkey-server") or shutil.which("redis-server")
        if program is None:
            pytest.skip("neither valkey-server nor redis-server is installed (Debian: apt-get install redis-server)")
        self.port = port or free_port()
        self._command = [program, "--port", str(self.port), "--save", "", "--bind", "127.0.0.1", *options]
        self.client = redis.Redis(**({"host": "127.0.0.1", "port": self.port, "socket_timeout": 5} | client))
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        try:
            wait_until(self._answers)
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            assert self._process.stdout is not None
            pytest.fail(f"the server did not start: {self._process.stdout.read()[-2000:]}")
        try:
            return bool(self.client.ping())
        except redis.AuthenticationError:
            return True

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"


@contextlib.contextmanager
def redis_server(*options: str, **client: Any) -> Iterator[RedisServer]:
    server = RedisServer(*options, **client)
    try:
        yield server
    finally:
        server.client.close()
        server.stop()


class S3Server:
    """moto, in a process of its own, with one bucket."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", host, "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: self.get("/moto-api/data.json"))
            self.get(f"/{BUCKET}", method="PUT")
        except BaseException:
            self.stop()
            raise

    def get(self, path: str, method: str = "GET") -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request, timeout=10) as answer:
            content: bytes = answer.read()
            return content

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def credentials(port: int) -> dict[str, str]:
    """Environment under which S3 is the server on that port."""
    return {
        "AWS_ACCESS_KEY_ID": "test-id",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "NO_PROXY": "127.0.0.1",
    }


def make_certificates(directory: Path) -> tuple[Path, Path, Path]:
    """A certificate authority's certificate, a server's certificate for 127.0.0.1, and its key."""
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)

    def certificate(name: str, issuer: x509.Name | None, key: Any, signer: Any, is_authority: bool) -> Any:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer or subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
            )
        )
        return builder.sign(signer, hashes.SHA256())

    authority_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = certificate("tests", None, authority_key, authority_key, True)
    server = certificate("server", authority.subject, server_key, authority_key, False)
    paths = directory / "ca.pem", directory / "server.pem", directory / "server.key"
    paths[0].write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(server.public_bytes(serialization.Encoding.PEM))
    paths[2].write_bytes(
        server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return paths
