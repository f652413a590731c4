"""What can go wrong between us and an object store, and the one table that turns it into l2kit's error tree.

Nothing here quotes a URL, a header or a body: a signed URL is a credential, and some stores echo what they were sent.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from email.utils import parsedate_to_datetime
from typing import Final

from l2kit.errors import (
    AuthError,
    BackendBusyError,
    BackendError,
    BackendTimeoutError,
    CapacityError,
    ConfigError,
    L2Error,
    TransientBackendError,
)
from l2kit_s3.wire import Answer, ProtocolError

_CODE: Final = re.compile(rb"<Code>([A-Za-z]{1,64})</Code>")
_REGION: Final = re.compile(rb"<Region>([a-z0-9-]{1,40})</Region>")
_STATUS: Final = re.compile(r"(?:status code|status): (\d{3})\b")
_TEXT_CODE: Final = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_REGION_NAME: Final = re.compile(r"[a-z0-9-]{1,40}\Z")
#: Codes of a 404 that say more than that there is no object.
NO_PLACE: Final = ("NoSuchBucket", "ContainerNotFound")
#: Signatures and time limits of requests break when clocks differ by more.
MAX_SKEW_S: Final = 300.0

_KEYS: Final = "check access_key_id and secret_access_key, the profile, or the role"
_OLD_TOKEN: Final = (AuthError, "the credentials have expired; renew them where they come from")
_ELSEWHERE: Final = "the bucket is not at this endpoint or in this region"

#: What an error code means for a caller, and what people can do about it.
_MEANINGS: Final[dict[str, tuple[type[L2Error], str]]] = {
    "AccessDenied": (AuthError, "access denied; check the policy of user and bucket (the README lists what is needed)"),
    "AllAccessDisabled": (AuthError, "all access to this bucket is disabled"),
    "AccountProblem": (AuthError, "there is a problem with the account"),
    "InvalidAccessKeyId": (AuthError, f"the store does not know the access key; {_KEYS}"),
    "SignatureDoesNotMatch": (AuthError, f"the secret key does not fit the access key; {_KEYS}"),
    "ExpiredToken": _OLD_TOKEN,
    "TokenRefreshRequired": _OLD_TOKEN,
    "InvalidToken": (AuthError, f"the session token is not valid; {_KEYS}"),
    "RequestTimeTooSkewed": (AuthError, "the clock of this machine is wrong; set it, for example with NTP"),
    "RequestExpired": (AuthError, "the request had expired on arrival; is the clock of this machine right?"),
    "NoSuchBucket": (BackendError, "there is no such bucket; create it, or correct the bucket in the URL"),
    "ContainerNotFound": (BackendError, "there is no such container; create it, or correct the container in the URL"),
    "InvalidBucketName": (BackendError, "no bucket can have this name; correct the bucket in the URL"),
    "PermanentRedirect": (BackendError, f"{_ELSEWHERE}; correct endpoint or region"),
    "TemporaryRedirect": (TransientBackendError, f"{_ELSEWHERE} yet; a new bucket needs some minutes"),
    "AuthorizationHeaderMalformed": (BackendError, f"{_ELSEWHERE}; correct region"),
    "AuthorizationQueryParametersError": (BackendError, f"{_ELSEWHERE}, or the clock is wrong; correct region"),
    "IllegalLocationConstraintException": (BackendError, f"{_ELSEWHERE}; correct region"),
    "SlowDown": (BackendBusyError, "the store asks for fewer requests; lower max_concurrency if it goes on"),
    "ServiceUnavailable": (BackendBusyError, "the store is overloaded"),
    "TooManyRequests": (BackendBusyError, "the store asks for fewer requests; lower max_concurrency if it goes on"),
    "InternalError": (TransientBackendError, "the store failed"),
    "RequestTimeout": (TransientBackendError, "the store did not get the whole request in time"),
    "OperationAborted": (TransientBackendError, "another operation on the same object is in progress"),
    "ConditionalRequestConflict": (TransientBackendError, "another write of the same object is in progress"),
    "EntityTooLarge": (CapacityError, "the object is too large for one PUT; set multipart_bytes"),
    "QuotaExceeded": (CapacityError, "the bucket's quota is used up"),
    "XMinioStorageFull": (CapacityError, "the store is full"),
    "BadRequest": (BackendError, "refused without a reason; has a token expired, or is region wrong?"),
    "NotImplemented": (BackendError, "the store does not know this operation; try if_absent=false or multipart=false"),
    "InvalidObjectState": (BackendError, "the object was moved to an archive tier; exempt this prefix from that rule"),
}

#: For answers without a code, as to HEAD.
_STATUSES: Final[dict[int, str]] = {
    400: "BadRequest",
    401: "AccessDenied",
    403: "AccessDenied",
    408: "RequestTimeout",
    409: "OperationAborted",
    413: "EntityTooLarge",
    429: "TooManyRequests",
    501: "NotImplemented",
    503: "ServiceUnavailable",
    507: "QuotaExceeded",
}
#: In the addresses that credentials come from.
_CREDENTIAL_SOURCES: Final = (
    "169.254.",
    "/latest/api/token",
    "/latest/meta-data",
    "/computeMetadata/",
    "/oauth2/token",
)
_STALE: Final = {"ExpiredToken", "TokenRefreshRequired", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
_AGAIN: Final = {"OperationAborted", "ConditionalRequestConflict", "RequestTimeout", "SlowDown"}


class RefusalError(Exception):
    """A complete answer that says no.

    Attributes:
        status: of HTTP.
        code: the store's word for it, or ours where it gave none.
        region: where it says the bucket is; None where it does not say.
        skew_s: how far the clock of this machine is ahead of the store's; None where unknown.
        again: whether another attempt may succeed.
        stale: whether other credentials might.
    """

    def __init__(self, status: int, code: str | None, region: str | None = None, skew_s: float | None = None) -> None:
        self.status: Final = status
        redirect = "PermanentRedirect" if 300 <= status < 400 else None
        fallback = redirect or _STATUSES.get(status, "InternalError" if status >= 500 else "")
        self.code: Final = code if code in _MEANINGS else fallback or code or "unknown"
        self.said: Final = code
        self.region: Final = region if region is not None and _REGION_NAME.match(region) else None
        self.skew_s: Final = skew_s
        self.again: Final = (status >= 500 and status != 501) or status in (408, 429) or self.code in _AGAIN
        unexplained = code is None and status in (400, 401, 403)  # as an answer to HEAD always is
        self.stale: Final = self.code in _STALE or unexplained
        super().__init__(f"HTTP {status}{f', {code}' if code else ''}")

    @classmethod
    def of(cls, answer: Answer) -> RefusalError:
        """Read an answer."""
        code, region = _CODE.search(answer.text), _REGION.search(answer.text)
        where = answer.headers.get("x-amz-bucket-region") or (region[1].decode() if region else None)
        return cls(answer.status, code[1].decode() if code else None, where, _skew_s(answer.headers.get("date")))

    @property
    def clock_is_wrong(self) -> bool:
        """Whether the clocks differ by so much that no signature is accepted."""
        return self.skew_s is not None and abs(self.skew_s) > MAX_SKEW_S


def _skew_s(date: str | None) -> float | None:
    try:
        return None if date is None else time.time() - parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None


def translate(error: Exception, where: str) -> L2Error:
    """Turn any exception of this package's clients into the error tree.

    Args:
        error: what happened.
        where: tier and place, put in front of every message.
    """
    if isinstance(error, L2Error):
        return error
    if isinstance(error, RefusalError):
        return _refused(error, where)
    if isinstance(error, ProtocolError):
        return BackendError(f"{where}: {error}; check endpoint: is it an object store, and is it http or https?")
    if isinstance(error, PermissionError):
        return AuthError(f"{where}: permission denied ({_plain(error)})")
    if isinstance(error, TimeoutError):
        return BackendTimeoutError(f"{where}: {_plain(error)}; check endpoint, and whether the store is alive")
    if isinstance(error, ssl.SSLCertVerificationError):
        return BackendError(f"{where}: the certificate is not accepted ({error.verify_message}); check ca_file")
    if isinstance(error, ssl.SSLError):
        reason = error.reason or "TLS failure"
        return TransientBackendError(f"{where}: TLS failed ({reason}); check endpoint: does it speak https?")
    if isinstance(error, socket.gaierror):
        return TransientBackendError(f"{where}: the host name cannot be resolved ({error.strerror}); check endpoint")
    if isinstance(error, ConnectionRefusedError):
        return TransientBackendError(f"{where}: nothing listens there; start the store or correct endpoint")
    if isinstance(error, ConnectionError):
        return TransientBackendError(f"{where}: the connection broke ({_plain(error)})")
    if isinstance(error, OSError):
        return TransientBackendError(f"{where}: cannot be reached ({_plain(error)}); check endpoint")
    if type(error).__module__.startswith("obstore"):
        return _from_obstore(error, where)
    return BackendError(f"{where}: unexpected {type(error).__name__}")


def _refused(error: RefusalError, where: str) -> L2Error:
    kind, explanation = _MEANINGS.get(error.code, (BackendError, "the store refused the request"))
    if error.region is not None and error.status in (301, 307, 400, 403):
        return BackendError(f"{where}: the bucket is in region {error.region}; set region={error.region} ({error})")
    if issubclass(kind, AuthError) and error.clock_is_wrong:
        assert error.skew_s is not None
        direction = "ahead of" if error.skew_s > 0 else "behind"
        skew = f"the clock of this machine is {abs(error.skew_s):.0f} s {direction} the store's"
        return AuthError(f"{where}: {skew}, so it accepts no signature; set the clock, for example with NTP ({error})")
    return kind(f"{where}: {explanation} ({error})")


def refusal_of(error: Exception) -> RefusalError | None:
    """What the store answered to a request of obstore's; None when it did not answer."""
    text = str(error)
    status, code = _STATUS.search(text), _TEXT_CODE.search(text)
    return RefusalError(int(status[1]), code[1] if code else None) if status else None


def _from_obstore(error: Exception, where: str) -> L2Error:
    refusal = refusal_of(error)
    name = type(error).__name__
    text = str(error)
    if any(source in text.partition("\n")[0] for source in _CREDENTIAL_SOURCES):
        return AuthError(
            f"{where}: no credentials: none in options, environment or profile, and no role of this machine; "
            "set access_key_id and secret_access_key, a profile, or anonymous=true"
        )
    if refusal is not None:
        return _refused(refusal, where)
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return AuthError(f"{where}: access denied; check the credentials")
    if name in ("UnknownConfigurationKeyError", "InvalidPathError"):
        return ConfigError(f"{where}: the client does not take an option or a path ({name})")
    if "timed out" in text or "TimedOut" in text:
        return BackendTimeoutError(f"{where}: no answer in time; check endpoint, and whether the store is alive")
    if "Connect" in text or "error sending request" in text or "decoding response body" in text:
        return TransientBackendError(f"{where}: no connection, or it broke; check endpoint")
    return BackendError(f"{where}: the client failed ({name})")


def _plain(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
