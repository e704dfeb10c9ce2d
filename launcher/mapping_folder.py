"""The folder that ``megakv fairkv`` writes: profile, mapping, the run's JSON, reports, their page and the result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megakv.fairkv.figures import draw_mapping, draw_profile
from megakv.fairkv.mapping import HeadMapping
from megakv.fairkv.profile import BudgetProfile
from megakv.launcher.commands.fairkv import RESULT
from megakv.tracking.files import write_whole
from megakv.tracking.page import Picture, page
from megakv.tracking.report import RunReport, report_to_json


class MappingFolder:
    """Writes on rank 0; `written` are the files by kind."""

    def __init__(self, path: str):
        self._path = Path(path).resolve()
        self.written: dict[str, Path] = {}

    @property
    def mapping(self) -> Path:
        """Where the mapping goes, for all ranks to read."""
        return self._path / "mapping.json"

    def write_profile(self, profile: BudgetProfile) -> None:
        """A profile that was measured now."""
        profile.save(self._at("profile", "budgets.json"))

    def write_mapping(self, profile: BudgetProfile, mapping: HeadMapping) -> None:
        """A mapping, and pictures of it and of the profile that it was made of."""
        mapping.save(self._at("mapping", self.mapping.name))
        draw_profile(profile, self._at("kept tokens", "budgets.png"))
        draw_mapping(mapping, self._at("loads of ranks", "mapping.png"))

    def write_runs(
        self, runs: Sequence[tuple[str, RunReport]], sentence: str, profile: BudgetProfile, mapping: HeadMapping
    ) -> None:
        """Reports, and one page about all: first the result in a sentence, and the pictures."""
        for name, report in runs:
            write_whole(self._at(f"report, {name}", f"{name}.json"), report_to_json(report).encode())
        parts: list[str | Picture] = [
            sentence,
            Picture.of(partial(draw_mapping, mapping), "loads of ranks, contiguous and mapped"),
            Picture.of(partial(draw_profile, profile), "tokens kept by KV heads"),
        ]
        write_whole(self._at("page", "page.html"), page(runs, parts).encode())

    def write_config(self, values: dict[str, Any]) -> None:
        """The JSON of the run to start."""
        write_whole(self._at("run's JSON", "config.json"), (json.dumps(values, indent=2) + "\n").encode())

    def write_result(self, values: dict[str, Any], path: str | None) -> None:
        """What was found, here or at a path."""
        self.written["result"] = self._path / RESULT if path is None else Path(path).resolve()
        files = {kind: str(file) for kind, file in self.written.items()}
        write_whole(self.written["result"], (json.dumps({**values, "files": files}, indent=1) + "\n").encode())

    def _at(self, kind: str, name: str) -> Path:
        self.written[kind] = self._path / name
        return self.written[kind]
