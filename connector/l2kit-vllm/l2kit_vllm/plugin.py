"""vLLM's plugin hook: makes ``kv_connector="L2KitConnector"`` known in every process of vLLM."""

from __future__ import annotations

NAME = "L2KitConnector"


def register() -> None:
    """Register the connector by name. Idempotent; vLLM calls it once in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, "l2kit_vllm.connector", NAME)
    except ValueError:  # registered before: the host imported us by hand
        return
