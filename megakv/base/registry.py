"""Registries of what the JSON asks for by name, which packages of others may add to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Entries of one kind by name.

    An entry that is given as the text ``module:name``, or ``module:``, is imported when it is first asked for, and made
    by `make` of what has that name: a feature that nobody uses is not loaded.
    """

    def __init__(self, kind: str, entries: Mapping[str, T | str], make: Callable[[Any], T] = lambda found: found):
        self.kind = kind
        self._entries: dict[str, T | str] = dict(entries)
        self._make = make

    def __getitem__(self, name: str) -> T:
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            found = import_module(module)
            entry = self._entries[name] = self._make(getattr(found, attribute) if attribute else found)
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, name: str, entry: T) -> None:
        """Add an entry.

        Raises
        ------
        ValueError
            If the name is no identifier, or is another entry's.
        """
        if not name.isidentifier() or name == "auto":
            raise ValueError(f"{self.kind} {name!r}: a name has letters, digits and underscores, and is not 'auto'")
        if name in self._entries and self._entries[name] is not entry:
            raise ValueError(f"{self.kind} {name!r} is registered already; take another name")
        self._entries[name] = entry
