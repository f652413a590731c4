"""``template://``: a storage adapter of l2kit."""

from __future__ import annotations

from l2kit_template.adapter import TemplateAdapter
from l2kit_template.config import TemplateConfig

__all__ = ["TemplateAdapter", "TemplateConfig"]
