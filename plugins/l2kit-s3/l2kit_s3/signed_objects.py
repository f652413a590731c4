"""Objects of an S3 bucket by requests that obstore signs and that travel over connections of our own.

obstore keeps the credentials, and finds and renews them; a signed URL is all that it hands out. Measured, obstore's own
transfers cost two to three times the CPU, because they copy; listings and uploads in parts stay with it.
"""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final, Literal, NamedTuple
from urllib.parse import quote, urlsplit

import obstore
from obstore.store import S3Store

from l2kit.outcomes import StoreStatus
from l2kit_s3.config import S3Config
from l2kit_s3.failures import NO_PLACE, RefusalError
from l2kit_s3.objects import CheckWanted, Found, Requests
from l2kit_s3.obstore_objects import ObstoreObjects
from l2kit_s3.stores import s3_endpoint
from l2kit_s3.wire import Address, Answer, ProtocolError, Request, Wire

_VALID: Final = timedelta(minutes=15)
_FIRST_PAUSE_S: Final = 0.1
_SLICE_S: Final = 0.05
_PRECONDITION_FAILED: Final = 412

Method = Literal["GET", "PUT", "HEAD", "DELETE"]


class _Call(NamedTuple):
    """A request before it is signed."""

    method: Method
    name: str
    headers: Mapping[str, str] = {}
    body: Sequence[memoryview] = ()
    into: Sequence[memoryview] = ()
    lands: bool = False


class SignedObjects(ObstoreObjects):
    """An S3 bucket. Any thread: `Wire` guards the connections, the base the client."""

    def __init__(self, config: S3Config, requests: Requests, check_wanted: CheckWanted) -> None:
        """See `ObstoreObjects`; reads the certificates."""
        super().__init__(config, requests, check_wanted)
        self._s3: Final = config
        address, self._root = _place(config)
        self._wire = Wire(
            address,
            connect_timeout_s=config.connect_limit_s,
            idle_timeout_s=config.socket_limit_s,
            tls=_tls_context(config),
            check_wanted=check_wanted,
        )

    def check(self) -> None:
        """Ask for an object that is not there: what else is wrong, the answer says.

        Who may not list a bucket is told 403 in place of 404. To them every miss would be an error.
        """
        self._ask(_Call("GET", self._name_of_nothing()))

    def read(self, name: str, into: Sequence[memoryview], offset: int | None = None) -> Found | None:
        """See `Objects.read`: one GET, of a range where a part is wanted."""
        room = sum(map(len, into))
        if offset is None:
            answer = self._ask(_Call("GET", name, into=into))
        else:
            wanted = {"Range": f"bytes={offset}-{offset + room - 1}"}
            answer = self._ask(_Call("GET", name, wanted, into=into))
        version = answer.headers.get("etag")
        match answer.status:
            case 404:
                return None
            case 200 if not offset:
                return Found(int(answer.headers["content-length"]), version)
            case 416 if offset is not None:
                return Found(_total(answer, "*"), version)
            case 206 if offset is not None:
                total = _total(answer)
                if _begin(answer) != offset or answer.filled != min(room, total - offset):
                    raise ProtocolError("another part of the object came than was asked for")
                return Found(total, version)
            case _:
                raise ProtocolError(f"an object was asked for, and the answer is HTTP {answer.status}")

    def write(self, name: str, data: Sequence[memoryview]) -> StoreStatus:
        """See `Objects.write`: one PUT from the caller's memory, or through obstore where its content is signed.

        What is there and has another size is what a store that failed has left, and is replaced.
        """
        nbytes = sum(map(len, data))
        if self._s3.signs_payload or (self._s3.multipart and nbytes > self._s3.multipart_bytes):
            return super().write(name, data)
        if self._s3.if_absent:
            answer = self._ask(_Call("PUT", name, {"If-None-Match": "*"}, body=data, lands=True))
            if answer.status != _PRECONDITION_FAILED:
                return StoreStatus.STORED
            if self.size(name) == nbytes:
                return StoreStatus.ALREADY_PRESENT
        self._ask(_Call("PUT", name, body=data, lands=True))
        return StoreStatus.STORED

    def size(self, name: str) -> int | None:
        """See `Objects.size`."""
        answer = self._ask(_Call("HEAD", name))
        if answer.status == 404:
            return None
        length = answer.headers.get("content-length", "")
        if not length.isdigit():
            raise ProtocolError("the answer does not say how long the object is")
        return int(length)

    def delete(self, name: str) -> bool:
        """See `ObstoreObjects.delete`."""
        if self.size(name) is None:
            return False
        return self._ask(_Call("DELETE", name, lands=True)).status != 404

    def close(self) -> None:
        """Close all connections."""
        self._wire.close()
        super().close()

    def _ask(self, call: _Call) -> Answer:
        """Sign and send; again after failures that another attempt may mend, and once with new credentials.

        Returns:
            The answer, of 2xx, 404, 412 or 416.

        Raises:
            RefusalError: any other answer.
            OSError, ProtocolError: as `Wire.ask`.
        """
        attempt, renewed = 0, False
        while True:
            store = self._client()
            if attempt:
                self._requests.add("retry")
                self._pause(attempt)
            self._requests.add(call.method.lower())
            try:
                target = self._target(store, call.method, call.name)
                answer = self._wire.ask(Request(call.method, target, call.headers, call.body, call.into, call.lands))
            except ssl.SSLCertVerificationError:
                raise
            except OSError:
                attempt += 1
                if attempt > self._s3.retries:
                    raise
                continue
            if answer.status < 300 or answer.status in (412, 416):
                return answer
            refusal = RefusalError.of(answer)
            if answer.status == 404 and refusal.said not in NO_PLACE:
                return answer
            if refusal.stale and not renewed and self._renew(store):
                renewed = True
                continue
            attempt += 1
            if not refusal.again or attempt > self._s3.retries:
                raise refusal

    def _target(self, store: object, method: Method, name: str) -> str:
        """Path and query of a signed request."""
        if self._s3.anonymous:
            return f"{self._root}/{quote(name)}"
        assert isinstance(store, S3Store)
        signed = urlsplit(obstore.sign(store, method, name, _VALID))
        return f"{signed.path}?{signed.query}"

    def _pause(self, attempt: int) -> None:
        until = time.monotonic() + _FIRST_PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
        while (left := until - time.monotonic()) > 0:
            self._check_wanted()
            time.sleep(min(left, _SLICE_S))


def _place(config: S3Config) -> tuple[Address, str]:
    """Where to connect to, and what stands in front of every path."""
    endpoint = urlsplit(s3_endpoint(config))
    assert endpoint.hostname is not None
    tls = endpoint.scheme == "https"
    address = Address(endpoint.hostname, endpoint.port or (443 if tls else 80), tls)
    return address, "" if config.virtual else f"/{config.bucket}"


def _tls_context(config: S3Config) -> ssl.SSLContext | None:
    if not config.tls:
        return None
    context = ssl.create_default_context()
    authorities = config.read_ca_file()
    if authorities is not None:
        context.load_verify_locations(cadata=authorities)
    if not config.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _begin(answer: Answer) -> int:
    """Where the part begins that an answer holds."""
    unit, _, rest = answer.headers.get("content-range", "").partition(" ")
    begin = rest.partition("-")[0]
    if unit != "bytes" or not begin.isdigit():
        raise ProtocolError("the answer does not say which part of the object it is")
    return int(begin)


def _total(answer: Answer, part: str | None = None) -> int:
    """The whole object's size, as the answer to a request for a part says it."""
    asked, _, total = answer.headers.get("content-range", "").removeprefix("bytes ").partition("/")
    if not total.isdigit() or (part is not None and asked != part):
        raise ProtocolError("the answer does not say how long the object is")
    return int(total)
