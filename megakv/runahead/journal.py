"""The journal of a search: every measurement at once on disk, so that stopping it loses one at most."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megakv.base.partition import Partition
from megakv.costmodel.records import Record, load_record
from megakv.runahead.search import Trial
from megakv.runahead.table import ChainIdentity


class ContextTrials(BaseModel):
    """What was measured for one length of prompt; a search that goes on must begin with the same seeds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    context: int = Field(ge=1)
    seeds: tuple[Partition, ...] = ()
    trials: tuple[Trial, ...] = ()


class Journal(Record):
    """All measurements of a search that is not finished."""

    format: Literal["megakv partition search"] = "megakv partition search"
    version: Literal[1] = 1
    chain: ChainIdentity
    contexts: tuple[ContextTrials, ...] = ()

    @model_validator(mode="after")
    def _of_this_chain(self) -> Self:
        for entry in self.contexts:
            for partition in (*entry.seeds, *(trial.partition for trial in entry.trials)):
                if len(partition) != self.chain.ranks or min(partition) < 0 or sum(partition) != entry.context:
                    raise ValueError(f"{list(partition)} is no partition of {entry.context} tokens")
        return self


class JournalFile:
    """The file of a journal; it is written anew, whole, after every measurement."""

    def __init__(self, path: str | Path, chain: ChainIdentity):
        self.path = Path(path)
        self._chain = chain
        self._contexts: dict[int, ContextTrials] = {}
        if not self.path.exists():
            return
        setting, remedy = "the journal of a stopped search", "delete it to begin anew"
        journal = load_record(Journal, self.path, setting=setting, remedy=remedy)
        if differences := journal.chain.differences(chain):
            raise ValueError(f"{setting} = {str(self.path)!r} is of another: {'; '.join(differences)}; {remedy}")
        self._contexts = {entry.context: entry for entry in journal.contexts}

    def begin(self, context: int, seeds: tuple[Partition, ...]) -> ContextTrials:
        """What is known of a context; its seeds are those it was begun with, or else these."""
        return self._contexts.setdefault(context, ContextTrials(context=context, seeds=seeds))

    def add(self, context: int, trial: Trial) -> None:
        """Note a measurement, and write it."""
        entry = self._contexts[context]
        self._contexts[context] = entry.model_copy(update={"trials": (*entry.trials, trial)})
        self._save()

    def remove(self, contexts: Iterable[int]) -> None:
        """These lengths are finished, their results are in the table. The file goes with the last."""
        for context in contexts:
            self._contexts.pop(context, None)
        if any(entry.trials for entry in self._contexts.values()):
            self._save()
        else:
            self.path.unlink(missing_ok=True)

    def _save(self) -> None:
        Journal(chain=self._chain, contexts=tuple(self._contexts.values())).save(self.path)
