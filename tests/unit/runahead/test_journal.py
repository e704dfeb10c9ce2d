"""The journal holds every measurement from the moment it was made, and is of one model and machine."""

import random
from pathlib import Path

import pytest

from megakv.runahead.journal import JournalFile
from megakv.runahead.search import Trial
from tests.unit.runahead.tables import chain, table


def trial(*parts: int, number: int = 0) -> Trial:
    return Trial(partition=parts, seconds=random.random() + 0.1, stride=4, round=number)


def test_what_was_added_is_there_after_a_stop(tmp_path: Path) -> None:
    path = tmp_path / "table.json.journal"
    journal = JournalFile(path, chain())
    assert journal.begin(30, ((10, 10, 10),)).trials == () and not path.exists()
    trials = [trial(10, 10, 10), trial(12, 9, 9), trial(12, 9, 9, number=1)]
    for each in trials:
        journal.add(30, each)
    journal.begin(60, ())
    journal.add(60, trial(20, 20, 20))
    again = JournalFile(path, chain())
    entry = again.begin(30, ((1, 1, 28),))
    assert list(entry.trials) == trials and entry.seeds == ((10, 10, 10),), "the seeds it was begun with"
    assert len(again.begin(60, ()).trials) == 1 and again.begin(90, ((1, 1, 88),)).seeds == ((1, 1, 88),)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    again.remove([30])
    assert again.begin(30, ()).trials == (), "finished"
    assert len(JournalFile(path, chain()).begin(60, ()).trials) == 1, "others are not"
    again.remove([60, 90])
    again.remove([60, 90])
    assert not path.exists()


def test_other_journals_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json.journal"
    journal = JournalFile(path, chain())
    journal.begin(30, ())
    journal.add(30, trial(10, 10, 10))
    with pytest.raises(
        ValueError, match=r"the journal of a stopped search = .* is of another: kv 'sharded', here 'last'"
    ):
        JournalFile(path, chain(kv="last"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="is not valid JSON: .*; delete it to begin anew"):
        JournalFile(path, chain())
    for wrong in ((10, 10, 11), (30,), (31, -1, 0)):
        path.unlink(missing_ok=True)
        journal = JournalFile(path, chain())
        journal.begin(30, ())
        with pytest.raises(ValueError, match=r"is no partition of 30 tokens"):
            journal.add(30, trial(*wrong))
            JournalFile(path, chain())
    table({30: (1, 1, 1)}).save(path)
    with pytest.raises(ValueError, match="is not a megakv partition search; delete it to begin anew"):
        JournalFile(path, chain())
