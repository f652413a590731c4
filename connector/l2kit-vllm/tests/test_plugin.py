"""Registration with vLLM, which calls it in every process and may meet a name that is taken."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import pytest

from l2kit_vllm import plugin


class Factory:
    """Stands for vLLM's ``KVConnectorFactory``."""

    registered: dict[str, tuple[str, str]]

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls.registered:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls.registered[name] = (module_path, class_name)


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> type[Factory]:
    Factory.registered = {}
    name = "vllm.distributed.kv_transfer.kv_connector.factory"
    module: Any = ModuleType(name)
    module.KVConnectorFactory = Factory
    for depth in range(1, name.count(".") + 1):
        parent = ".".join(name.split(".")[:depth])
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    return Factory


def test_registers_by_name_and_lazily(factory: type[Factory]) -> None:
    plugin.register()
    assert factory.registered == {"L2KitConnector": ("l2kit_vllm.connector", "L2KitConnector")}


def test_registers_once(factory: type[Factory]) -> None:
    plugin.register()
    plugin.register()
    assert len(factory.registered) == 1


def test_vllm_finds_the_plugin() -> None:
    (point,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "l2kit"]
    assert point.load() is plugin.register
