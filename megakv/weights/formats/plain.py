"""Weights of a floating-point type, multiplied as they are."""

from __future__ import annotations

from megakv.weights.formats.format import WeightFormat


class PlainFormat(WeightFormat):
    """What most folders of safetensors hold."""

    name = "plain"
