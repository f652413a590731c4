"""The template is no plugin and is not installed: tests/unit/test_template.py makes one of it and runs its tests."""

from __future__ import annotations

collect_ignore = ["tests"]
