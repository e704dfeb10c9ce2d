"""Digests of files: all bytes count, and are read once; what is kept of them may be anything."""

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megakv.base.errors import MegaKVError
from megakv.weights import file_digests
from megakv.weights.file_digests import KEPT, WINDOW, FileDigests, KeptDigests, _check, file_digest, state_of

OTHER = "0" * 32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(100_000))
    settle(path)
    return path


def settle(path: Path) -> None:
    """Let a file have been written long ago."""
    os.utime(path, (1e9, 1e9))


def kept(cache: Path, files: object, check: str | None = None) -> None:
    """Write a JSON as it is kept, or as nobody would."""
    cache.mkdir(exist_ok=True)
    (cache / KEPT).write_text(json.dumps({"check": check or _check(files), "files": files}))


def test_every_byte_counts(tmp_path: Path) -> None:
    path, found = tmp_path / "sparse", set()
    size = WINDOW + 5000
    for place in (0, 4095, WINDOW - 1, WINDOW, size - 1, None):
        with path.open("wb") as file:
            file.truncate(size)
            if place is not None:
                file.seek(place)
                file.write(b"x")
        found.add(file_digest(path))
    path.write_bytes(b"")
    found.add(file_digest(path))
    assert len(found) == 7


def test_a_file_is_read_once(file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "new" / "cache"
    link = tmp_path / "link"
    link.symlink_to(file)
    found = KeptDigests(cache).of([file])
    assert found == {state_of(link): file_digest(file)}
    assert [path.name for path in cache.iterdir()] == [KEPT]
    # What is kept is taken at its word: so nothing is read.
    kept(cache, {state_of(file): OTHER})
    assert list(KeptDigests(cache).of([link]).values()) == [OTHER]
    os.utime(file, ns=(1, 1))
    assert KeptDigests(cache).of([file]) == {state_of(file): file_digest(file)}
    # As many bytes, at the same time, in place.
    before, stamp = file_digest(file), file.stat().st_mtime_ns
    with file.open("r+b") as out:
        out.write(os.urandom(10))
    os.utime(file, ns=(stamp, stamp))
    assert list(KeptDigests(cache).of([file]).values()) == [file_digest(file)] != [before]


def test_a_file_that_was_just_written_is_read_again(file: Path, tmp_path: Path) -> None:
    """Another write within the same tick of its file system's clock would not show."""
    os.utime(file)
    KeptDigests(tmp_path / "cache").of([file])
    assert not (tmp_path / "cache").exists()


def test_ranks_that_read_side_by_side_keep_what_each_has_read(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = tmp_path / "cache", tmp_path / "other"
    other.write_bytes(b"other")
    settle(other)

    def reading(path: Path, stop: threading.Event | None = None) -> str:
        if path == file:
            # Another rank begins later and ends earlier.
            KeptDigests(cache).of([other])
        return file_digest(path, stop)

    monkeypatch.setattr(file_digests, "file_digest", reading)
    KeptDigests(cache).of([file])
    assert KeptDigests(cache)._known() == {state_of(path): file_digest(path) for path in (file, other)}


def test_nothing_that_is_kept_does_harm(file: Path, tmp_path: Path) -> None:
    cache, state, right = tmp_path / "cache", state_of(file), file_digest(file)
    for files in ({state: "short"}, {state: 7}, [state], "text", None, {state: OTHER.upper() + "\n"}):
        kept(cache, files)
        assert KeptDigests(cache).of([file]) == {state: right}, files
    kept(cache, {state: OTHER}, check=right)
    assert KeptDigests(cache).of([file]) == {state: right}
    for text in ("", "{", "[" * 100_000, "[]", '{"files": {}}', "\x00"):
        (cache / KEPT).write_text(text)
        assert KeptDigests(cache).of([file]) == {state: right}, text
    (cache / KEPT).write_bytes(b"\xff\xfe")
    assert KeptDigests(cache).of([file]) == {state: right}
    # It cannot be written: its folder is a file, or a folder has its name.
    assert KeptDigests(file).of([file]) == {state: right}
    (cache / KEPT).unlink()
    (cache / KEPT).mkdir()
    assert KeptDigests(cache).of([file]) == {state: right}
    assert [path.name for path in cache.iterdir()] == [KEPT]


def test_what_cannot_be_read(file: Path, tmp_path: Path) -> None:
    with pytest.raises(MegaKVError, match=r"nothing cannot be read: No such file"):
        KeptDigests(tmp_path).of([tmp_path / "nothing"])
    stop = threading.Event()
    stop.set()
    with pytest.raises(MegaKVError, match="the start was given up"):
        KeptDigests(tmp_path).of([file], stop)


@pytest.mark.parametrize("change", ["in place", "by another file", "gone"])
def test_a_file_that_changes_while_it_is_loaded(change: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read before for its digest, which is then not that of what was loaded."""
    monkeypatch.setattr(file_digests, "KeptDigests", lambda: KeptDigests(file.parent / "cache"))
    comm = SimpleNamespace(gather_objects=lambda value: [value], mesh=SimpleNamespace(rank=0))
    agreement: Any = SimpleNamespace(comm=comm, together=lambda action: action())
    digests = FileDigests({"weights": file}, agreement)
    digests._found.result()
    assert digests.gather() == {"weights": file_digest(file)}
    if change == "in place":
        with file.open("r+b") as out:
            out.write(b"other")
        # The clock of files may stand still for milliseconds.
        os.utime(file, ns=(1, 1))
    elif change == "by another file":
        (file.parent / "other").write_bytes(file.read_bytes())
        (file.parent / "other").replace(file)
    else:
        file.unlink()
    with pytest.raises(MegaKVError, match="weights was written to while the model was loaded"):
        digests.gather()
    digests.close()
