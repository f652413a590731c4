"""Keys for the client: those from the options, and those of a profile in the file that AWS's tools share."""

from __future__ import annotations

import configparser
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from l2kit.config import Secret
from l2kit.errors import AuthError

#: How long the client may use keys of a profile before it asks again.
_TRUSTED: Final = timedelta(seconds=60)


class GivenCredentials:
    """Keys from the options; its ``repr`` shows none. What the environment says is not mixed with them."""

    def __init__(self, access_key_id: str, secret_access_key: Secret, session_token: Secret | None) -> None:
        """Keep them."""
        self._access_key_id: Final = access_key_id
        self._secret: Final = secret_access_key
        self._token: Final = session_token

    def __call__(self) -> dict[str, Any]:
        """The keys as the client wants them."""
        return {
            "access_key_id": self._access_key_id,
            "secret_access_key": self._secret.reveal(),
            "token": None if self._token is None else self._token.reveal(),
            "expires_at": None,
        }


class ProfileCredentials:
    """The provider that the client calls for keys; its ``repr`` shows none.

    Any thread: each call reads for itself.
    """

    def __init__(self, file: Path, profile: str) -> None:
        """Keys of ``profile`` in ``file``; does no I/O."""
        self._file: Final = file
        self._profile: Final = profile

    @classmethod
    def find(cls, file: str | None, profile: str | None) -> ProfileCredentials | None:
        """The profile to use: what is given, or what the environment says, or ``default`` in the file at home.

        None when nothing is given and there is no such file or section with keys: then there are other sources.
        """
        path = file or os.environ.get("AWS_SHARED_CREDENTIALS_FILE")
        name = profile or os.environ.get("AWS_PROFILE")
        found = cls(Path(path).expanduser() if path else Path.home() / ".aws/credentials", name or "default")
        if profile is None and file is None:
            if os.environ.get("AWS_ACCESS_KEY_ID"):
                return None
            try:
                found()
            except AuthError:
                return None
        return found

    def __call__(self) -> dict[str, Any]:
        """The keys as the client wants them.

        Raises:
            AuthError: there is no such file or profile, or it has no keys.
        """
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read_string(self._file.read_text(encoding="utf-8"))
            section = parser[self._profile]
            return {
                "access_key_id": section["aws_access_key_id"],
                "secret_access_key": section["aws_secret_access_key"],
                "token": section.get("aws_session_token"),
                "expires_at": datetime.now(UTC) + _TRUSTED,
            }
        except OSError as error:
            raise AuthError(f"credentials_file: {self._file} cannot be read ({error.strerror})") from None
        except (configparser.Error, UnicodeDecodeError):
            raise AuthError(f"credentials_file: {self._file} is no file of profiles") from None
        except KeyError as error:
            missing = f"profile {self._profile!r}" if error.args == (self._profile,) else f"{error.args[0]} in it"
            raise AuthError(f"credentials_file: {self._file} has no {missing}") from None
