"""Features that a JSON switches on: a module is imported with the first engine that needs it."""

from __future__ import annotations

from types import ModuleType

from megakv.base.registry import Registry

FEATURES: Registry[ModuleType] = Registry(
    "feature", {"offload": "megakv.engine.offloading:", "placement": "megakv.engine.head_placement:"}
)
