"""What all sections of the JSON that are MegaKV's own have in common."""

from __future__ import annotations

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ConfigDict


class Section(DeepSpeedConfigModel):
    """A section of the JSON: unknown keys are refused, and numbers are finite."""

    model_config = ConfigDict(allow_inf_nan=False)
