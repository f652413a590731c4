"""l2kit for vLLM: the torch GPU connector and the KV connector ``L2KitConnector``.

``kv_connector="L2KitConnector"`` is enough in vLLM's ``--kv-transfer-config``; this package registers it as a plugin.
"""

__version__ = "0.1.0"
