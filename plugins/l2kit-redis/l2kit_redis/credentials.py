"""`Credentials`: who we are, and where the password is kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from l2kit.config import Secret
from l2kit.errors import ConfigError

_MAX_PASSWORD_BYTES: Final = 64 << 10


class Credentials(NamedTuple):
    """One set of the options ``username``, ``password``, ``password_env`` and ``password_file``.

    Attributes:
        prefix: what stands before these names in the configuration.
        username: ACL user, or None.
        password: the password itself, or None.
        password_env: name of an environment variable that holds it, or None.
        password_file: file that holds it, or None.
    """

    prefix: str
    username: str | None
    password: Secret | None
    password_env: str | None
    password_file: str | None

    def check(self) -> None:
        """Check that the options agree.

        Raises:
            ConfigError: names the one that does not.
        """
        names = ("password", "password_env", "password_file")
        sources = [self.prefix + name for name in names if getattr(self, name) is not None]
        if len(sources) > 1:
            raise ConfigError(f"{sources[0]}: given together with {sources[1]}; choose one of them")
        if self.username is not None and not sources:
            either = ", ".join(self.prefix + name for name in names[:2])
            raise ConfigError(f"{self.prefix}username: needs {either} or {self.prefix}{names[2]}")

    def read_password(self) -> Secret | None:
        """Return the password from where it is kept, or None when none is configured. May read a file.

        Raises:
            ConfigError: its source is missing or unreadable.
        """
        if self.password_env is not None:
            value = os.environ.get(self.password_env)
            if value is None:
                option = f"{self.prefix}password_env"
                raise ConfigError(f"{option}: the environment variable {self.password_env!r} is not set")
            return Secret(value)
        if self.password_file is not None:
            option = f"{self.prefix}password_file"
            try:
                with Path(self.password_file).open("rb") as file:
                    content = file.read(_MAX_PASSWORD_BYTES + 1)
                text = content.decode()
            except OSError as error:
                raise ConfigError(f"{option}: cannot read {self.password_file}: {error.strerror}") from error
            except UnicodeDecodeError:  # not chained: the exception holds the file's content
                raise ConfigError(f"{option}: {self.password_file} is not UTF-8 text") from None
            if len(content) > _MAX_PASSWORD_BYTES:
                raise ConfigError(f"{option}: {self.password_file} is longer than any password")
            return Secret(text.rstrip("\r\n"))
        return self.password
