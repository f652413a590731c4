"""The ``l2kit`` command line."""

from __future__ import annotations

from l2kit.cli.command import main

__all__ = ["main"]
