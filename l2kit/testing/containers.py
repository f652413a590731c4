"""`Containerised`: what tests do to a server in a Docker container, through ``testcontainers``."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from l2kit.testing.waiting import wait_until

_START_TIMEOUT_S = 60.0


class Containerised:
    """A server whose process is a container: mixed into a class that says how one talks to it.

    The container has a port that was chosen here, not by Docker, so it is the same after a restart.
    """

    _container: Any
    _started = False

    @abstractmethod
    def _answers(self) -> bool:
        """Whether it answers."""

    def start(self) -> None:
        """Create the container, or start it again, and wait until it answers."""
        if self._started:
            self._container.get_wrapped_container().start()
        else:
            self._container.start()
            self._started = True
        wait_until(self._answers, f"the start of {self!r}", _START_TIMEOUT_S)

    def stop(self) -> None:
        """``docker stop``."""
        self._container.get_wrapped_container().stop()

    def kill(self) -> None:
        """``docker kill``."""
        self._container.get_wrapped_container().kill()

    def pause(self) -> None:
        """``docker pause``."""
        self._container.get_wrapped_container().pause()

    def resume(self) -> None:
        """``docker unpause``."""
        self._container.get_wrapped_container().unpause()

    def remove(self) -> None:
        """Remove the container."""
        self._container.stop()
