"""Options of ``template://``."""

from __future__ import annotations

from l2kit.config import AdapterConfig, PositiveInt


class TemplateConfig(AdapterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``template://?option=value``, besides those that every adapter has.

    Fields named ``host``, ``port``, ``path``, ``username`` and ``password`` would be filled from the URL.

    Attributes:
        max_bytes: most bytes of objects, envelopes included, in bytes or as ``10GiB``. By default there is no limit.
            With too small a limit most stores are dropped, which costs recomputation; too large a one fills the
            memory of the host.
    """

    max_bytes: PositiveInt | None = None
