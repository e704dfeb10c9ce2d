"""The files that a JSON names, read without a model: ``megakv check`` refuses those that a start would refuse."""

from __future__ import annotations

from megakv.base.json_files import read_json
from megakv.costmodel.hardware import load_profile
from megakv.engine.config import MegaKVConfig
from megakv.fairkv.placement import read_mapping
from megakv.forward.choice import FIT_SETTING, PROFILE_SETTING
from megakv.forward.policy_fit import load_fit
from megakv.runahead.source import check_size
from megakv.runahead.table import load_table


def check_files(config: MegaKVConfig) -> None:
    """Refuse a setting whose file cannot be read, is something else, or is for another number of ranks."""
    section = config.megakv
    if (path := section.context_parallel.profile) is not None:
        load_profile(path, setting=PROFILE_SETTING)
    if (path := section.context_parallel.fit) is not None:
        load_fit(path, setting=FIT_SETTING)
    if (path := section.runahead.table) is not None:
        check_size(load_table(path), path, config.cp_size)
    if (path := section.fairkv.model_dump().get("importance")) is not None:
        read_json(path, f"megakv.fairkv.importance = {path!r}")
    read_mapping(section.fairkv, config.tp_size)
