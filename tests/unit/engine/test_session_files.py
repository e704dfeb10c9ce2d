"""Saved sessions: what is refused before writing, what a full disk leaves, and what others put into them."""

import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import megakv
from megakv.base.errors import MegaKVError
from megakv.base.tensor_files import StreamedTensor, write_tensors
from megakv.cache.cache import ShardedCache
from megakv.cache.saved import SavedLayer
from megakv.cache.saved_tokens import FORMAT, SavedTokens
from megakv.cache.shares import PERIOD, TokenShares
from megakv.distributed.layouts import balanced
from megakv.distributed.sharding import TokenBlock
from megakv.engine.session_files import write_shard
from megakv.engine.session_folder import PendingSave, shard_file
from megakv.serving.prefix_folder import PrefixFolder
from tests.families import llama

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


def small_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama(**changes), dtype=torch.float32).eval()


@pytest.fixture
def engine(alone: None) -> Iterator[Any]:
    made = megakv.init_inference(small_model(), {"dtype": "fp32"})
    yield made
    made.destroy()


def some_ids(length: int, batch: int = 1) -> Tensor:
    return torch.from_numpy(np.random.randint(3, 120, (batch, length)))


def talk(engine: Any, length: int) -> Any:
    session = engine.session()
    session.generate(some_ids(length, 2), max_new_tokens=2, **GREEDY)
    return session


def goes_on(engine: Any, folder: Path, like: Any) -> bool:
    """Whether what was saved to a folder is a session, to the last bit of its next tokens."""
    restored, ids = engine.restore_session(folder), some_ids(3, 2)
    answers = [each.generate(ids, max_new_tokens=4, **GREEDY) for each in (restored, like.fork())]
    return torch.equal(*answers)


def contents(folder: Path) -> set[str]:
    """What a folder holds that says nothing of a random name."""
    return {path.name.split("-")[0] for path in folder.iterdir()}


def test_folders_that_are_taken(engine: Any, tmp_path: Path) -> None:
    session = talk(engine, 20)
    present = {"file": tmp_path / "file", "other": tmp_path / "other", "dangling": tmp_path / "dangling"}
    present["file"].write_text("mine")
    present["other"].mkdir()
    (present["other"] / "session.json").write_text(json.dumps({"format": 1, "theme": "dark"}))
    present["dangling"].symlink_to(tmp_path / "nowhere")
    for name, path, why in (
        ("a file", present["file"], "it is a file"),
        ("settings of something else", present["other"], "is no saved session"),
        ("a link to nothing", present["dangling"], "is a link to .*, which is missing"),
        ("below a file", present["file"] / "session", "Not a directory"),
    ):
        with pytest.raises(ValueError, match=why):
            session.save(path)
        assert contents(tmp_path) == {"file", "other", "dangling"}, name
    (present["other"] / "session.json").unlink()
    (present["other"] / "save-it.txt").write_text("mine")
    with pytest.raises(ValueError, match="it holds 'save-it.txt'"):
        session.save(present["other"])
    assert contents(present["other"]) == {"save"} and present["file"].read_text() == "mine"


def test_links_are_followed_and_neighbours_left_alone(engine: Any, tmp_path: Path) -> None:
    neighbour, target, link = tmp_path / "X.partial", tmp_path / "real", tmp_path / "X"
    for folder in (neighbour, target):
        folder.mkdir()
    (neighbour / "thesis.txt").write_text("mine")
    link.symlink_to(target)
    first, second = talk(engine, 20), talk(engine, 33)
    for session in (first, second):
        session.save(str(link))
        assert link.is_symlink() and goes_on(engine, link, session)
    assert contents(target) == {"save", "session.json"} and len(list(target.iterdir())) == 2
    assert (neighbour / "thesis.txt").read_text() == "mine" and len(list(tmp_path.iterdir())) == 3
    first.save(tmp_path / "new" / "folder")
    assert goes_on(engine, tmp_path / "new" / "folder", first)


def test_what_others_put_into_a_session(engine: Any, tmp_path: Path) -> None:
    target = tmp_path / "session"
    session = talk(engine, 20)
    session.save(target)
    (target / "notes.txt").write_text("mine")
    left = target / "save-0123456789abcdef"
    left.mkdir()
    (left / "cp00000_tp00000.safetensors").write_text("half")
    killed = target / "save-fedcba9876543210"
    killed.mkdir()
    (killed / "lock").touch()
    mixed = target / "save-00000000000000ff"
    mixed.mkdir()
    (mixed / "thesis.txt").write_text("mine")
    session.save(target)
    assert (mixed / "thesis.txt").read_text() == (target / "notes.txt").read_text() == "mine"
    assert not left.exists() and not killed.exists() and not list(target.rglob("lock"))
    assert goes_on(engine, target, session)


def test_a_save_that_is_under_way_is_left_alone(engine: Any, tmp_path: Path) -> None:
    first, second, target = talk(engine, 20), talk(engine, 33), tmp_path / "session"
    first.save(target)
    meta = json.loads((target / "session.json").read_text())
    under_way = PendingSave(target)
    for file in (target / meta["data"]).iterdir():
        if file.name != "session.json":
            shutil.copy(file, under_way.data)
    second.save(target)
    assert goes_on(engine, target, second)
    under_way.commit(meta)
    assert goes_on(engine, target, first)
    under_way.close()
    assert goes_on(engine, target, first) and len(list(target.iterdir())) == 2
    given_up = PendingSave(target)
    given_up.close()
    assert goes_on(engine, target, first) and len(list(target.iterdir())) == 2


@pytest.mark.parametrize("present", [True, False])
def test_a_full_disk(engine: Any, tmp_path: Path, present: bool) -> None:
    target, before = tmp_path / "session", talk(engine, 20)
    if present:
        before.save(target)
    session = talk(engine, 400)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(MegaKVError, match=f"cannot be saved to {target}: .*; an earlier one there stays whole"):
            session.save(target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert target.exists() == present
    if present:
        assert len(list(target.iterdir())) == 2 and goes_on(engine, target, before)
    session.save(target)
    assert goes_on(engine, target, session)


def test_earlier_formats(engine: Any, tmp_path: Path) -> None:
    """They do not know their weights: none is read, and each is replaced without anything left over."""
    session, target = talk(engine, 20), tmp_path / "session"
    session.save(target)
    meta = json.loads((target / "session.json").read_text())
    assert meta["weights"] == engine.weights_digest
    for ranges in ([[]], [0, 5], [[[0.0, 5.0]], []], [[[0, 5], [3, 9]], []], "no", [[[0, 5], 7], []]):
        (target / "session.json").write_text(json.dumps({**meta, "compressed": ranges}))
        with pytest.raises(MegaKVError, match="compressed must be ascending ranges"):
            engine.restore_session(target)
    for number in (1, 3, FORMAT + 1):
        (target / "session.json").write_text(json.dumps({**meta, "format": number}))
        with pytest.raises(MegaKVError, match=f"has format {number}, this version reads format {FORMAT}: begin"):
            engine.restore_session(target)
    # In the first one everything lay beside session.json.
    data = target / meta.pop("data")
    for file in data.iterdir():
        file.rename(target / file.name)
    data.rmdir()
    (target / "session.json").write_text(json.dumps({**meta, "format": 1}))
    later = talk(engine, 31)
    later.save(target)
    assert goes_on(engine, target, later) and len(list(target.iterdir())) == 2
    (target / "session.json").write_text(json.dumps({**meta, "data": "../elsewhere"}))
    with pytest.raises(MegaKVError, match="data = '../elsewhere' is no subfolder"):
        engine.restore_session(target)


def test_prefixes_of_earlier_formats_are_named_and_removed(
    engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    comm, key = engine.agreement.comm, "0" * 24
    kept = PrefixFolder(tmp_path, "a model", comm)
    kept.describe(key, np.arange(5, dtype=np.int32), None)
    cache = engine.new_cache()
    engine.generate_into(cache, some_ids(20), max_new_tokens=2, **GREEDY)
    kept.write(key, cache.span(0, 5))
    kept.close()
    (record,) = tmp_path.rglob("*.json")
    for number in (FORMAT, 2):
        record.write_text(json.dumps({**json.loads(record.read_text()), "format": number}))
        folder = PrefixFolder(tmp_path, "a model", comm)
        assert [found.key for found in folder.found()] == [key] * (number == FORMAT)
        folder.close()
    assert f"{record} has format 2, this version reads format {FORMAT}" in caplog.text
    assert not list(record.parent.iterdir())


def test_files_written_in_pieces(tmp_path: Path) -> None:
    """The safetensors library reads what was written, and says the same of its own file."""
    tensors = {
        "b": torch.randn(3, 5, 7).to(torch.bfloat16),
        "i": torch.arange(11),
        "empty": torch.empty(2, 0, 4),
        "h": torch.randn(1, 13).half(),
        "turned": torch.randn(4, 6, 2).transpose(0, 1),
        "f": torch.randn(9, dtype=torch.float64),
    }
    write_tensors(tmp_path / "ours", {name: StreamedTensor.of(tensor) for name, tensor in tensors.items()})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    ours, theirs = load_file(tmp_path / "ours"), load_file(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def test_absurd_numbers_and_depths_are_refused_at_once(engine: Any, tmp_path: Path) -> None:
    talk(engine, 20).save(tmp_path / "session")
    path = tmp_path / "session" / "session.json"
    whole = path.read_text()
    for text, message in (
        (json.dumps({**json.loads(whole), "cp": 10**9}), "cp00001_tp00000.safetensors is missing"),
        ("[" * 100_000, "session.json is broken: "),
        ('{"format": ' + "9" * 6000 + "}", "session.json is broken: "),
    ):
        path.write_text(text)
        with pytest.raises(MegaKVError, match=message):
            engine.restore_session(tmp_path / "session")
    path.write_text(whole)
    (file,) = (tmp_path / "session").glob("save-*/cp*.safetensors")
    tensors = load_file(file)
    save_file({**tensors, "input_ids": tensors["input_ids"] + 10**6}, file)
    with pytest.raises(MegaKVError, match="holds tokens that are not among the model's"):
        engine.restore_session(tmp_path / "session")


def test_replicas_divide_what_whole_copies_have_kept(tmp_path: Path) -> None:
    """Both ranks that saved had both heads; of two that read, one shares its second head with the other."""
    heads, length = [[[0, 1], [0, 1]]], 600
    slots, rows = np.arange(length), (torch.randn(2, length, 4), torch.randn(2, length, 4))
    keep = torch.rand(2, length) < 0.7
    for rank in range(2):
        cache = ShardedCache(1, size=1, rank=0, compresses=True)
        cache.begin(balanced(TokenBlock(np.zeros_like(slots), slots, slots, 1), 1), 1)
        cache.store(0).append(0, *rows)
        cache.store(0).compress(0, keep)
        cache.commit(length, compressed=(0,))
        write_shard(tmp_path, cache, rank, 1)
    tokens = SavedTokens([slots], slots, [[0, length]])
    files = [[tmp_path / shard_file(0, rank)] for rank in range(2)]
    pattern = np.arange(PERIOD) % 2 == 0
    found = []
    for own, alone, mine in (([0, 1], 1, pattern), ([1], 0, ~pattern)):
        layer = SavedLayer(files, "0.0.", tokens, torch.device("cpu"), heads[0], own, None, TokenShares(alone, (mine,)))
        kept = layer.kept()
        assert kept is not None
        found.append(kept)
    assert found[0].slot[found[0].head == 0].tolist() == keep[0].nonzero()[:, 0].tolist()
    parts = [found[0].slot[found[0].head == 1].tolist(), found[1].slot.tolist()]
    assert all(parts) and sorted(parts[0] + parts[1]) == keep[1].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(("name", "other"), [("0.1.k", torch.float16), ("tokens", torch.float32)])
def test_rows_and_coordinates_of_another_type_are_refused(
    engine: Any, tmp_path: Path, name: str, other: torch.dtype
) -> None:
    talk(engine, 20).save(tmp_path / "session")
    (file,) = (tmp_path / "session").glob("save-*/cp*.safetensors")
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].to(other)}, file)
    with pytest.raises(MegaKVError, match=f"broken: {name} is F"):
        engine.restore_session(tmp_path / "session")
