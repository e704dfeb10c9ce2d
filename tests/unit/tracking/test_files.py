"""Files that a command writes at its end: those that cannot be written are refused at its start, by the user's path."""

import os
import re
import resource
from pathlib import Path

import pytest

import megakv
from megakv.launcher.command import main
from megakv.tracking.files import check_outputs, write_whole
from tests.families import llama

RUN = ["--model", "/no/such"]
COMMANDS = [
    (["run", "/no/such", "--question", "a"], "--json"),
    (["run", "/no/such", "--question", "a"], "--report"),
    (["run", "/no/such", "--question", "a"], "--timeline"),
    (["serve", "/no/such"], "--json"),
    (["serve", "/no/such"], "--report"),
    (["report", "/no/such"], "--html"),
    (["report", "/no/such"], "--json"),
    (["timeline", "/no/such"], "PNG"),
    (["timeline", "/no/such", "a.png"], "--trace"),
    (["timeline", "/no/such", "a.png"], "--json"),
    (["check", "/no/such"], "--json"),
    (["info"], "--json"),
    (["dry-run", *RUN, "--config", "/no/such"], "--json"),
    *((["simulate", *RUN, "--context", "9", "--method", "tp", "--hardware", "h100-tcp"], f"--{name}") for name in
      ("png", "trace", "json")),
    *((["plan", *RUN, "--context", "9", "--gpus", "1", "--hardware", "h100-tcp"], f"--{name}") for name in
      ("config", "json")),
    (["plan", *RUN, "--context", "9", "--gpus", "1", "--hardware", "h100-tcp", "--allow-lossy", "--budgets", "b"],
     "--mapping"),
    (["profile", *RUN], "--json"),
    (["fit-policy", *RUN], "--json"),
    (["fairkv", "map", "--profile", "/no/such", "--tp", "2"], "--json"),
    (["fairkv", "map", "--profile", "/no/such", "--tp", "2", "--json", "a.json"], "--png"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "option"), COMMANDS)
def test_every_command_looks_first(
    words: list[str], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    path = "file/out.png"
    given = [path] if option == "PNG" else [option, path]
    assert main([*words, *given]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"megakv: error: {option} {path}: cannot be written: Not a directory; name a file")
    assert said.out == "" and [each.name for each in tmp_path.iterdir()] == ["file"]


def test_an_engine_looks_before_weights_load(alone: None, tmp_path: Path) -> None:
    # There are none to load.
    llama().save_pretrained(tmp_path)
    for section, setting in (
        ({"json": str(tmp_path)}, f"json {tmp_path}"),
        ({"timeline": "/proc/none/t.png"}, "timeline /proc/none/t.png"),
        ({"csv": {"enabled": True, "output_path": "/proc/none"}}, "csv.output_path /proc/none/megakv/ttft_s.csv"),
    ):
        with pytest.raises(ValueError, match=f"megakv.tracking.{setting}: cannot be written: "):
            megakv.init_inference(tmp_path, {"megakv": {"tracking": section}})


def test_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("kept").write_text("kept")
    os.mkfifo("pipe")
    for path, reason in (
        ("folder", "Is a directory"), ("folder/", "Is a directory"), ("new/", "Is a directory"), ("", "Is a directory"),
        ("kept/x", "Not a directory"), ("pipe", "there is something that is no file"),
        ("/proc/none/x", "No such file or directory"), ("x" * 250, "File name too long"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"--json {path or repr(path)}: cannot be written: {reason}; name a file"):
            check_outputs({"--json": path})
    with pytest.raises(ValueError, match="--json new/x: cannot be written: No such file"):
        check_outputs({"--json": "new/x"}, make_folders=False)
    for outputs, inputs, words in (
        ({"--json": "a", "--report": "folder/../a"}, {}, "--report folder/../a is the file of --json"),
        ({"--json": "kept"}, {"--config": "kept"}, "--json kept is the file of --config: name another one"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            check_outputs(outputs, inputs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "kept", "pipe"]
    check_outputs({"--json": "new/x", "--png": "kept", "--none": None}, {"--config": None})
    assert Path("kept").read_text() == "kept" and list(Path("new").iterdir()) == []


def test_a_full_disk_names_the_path(tmp_path: Path) -> None:
    path, limits = tmp_path / "out.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_text("before")
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{path}'"):
            write_whole(path, b"x" * 11)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        with pytest.raises(ValueError, match=f"--json {path}: cannot be written: File too large"):
            check_outputs({"--json": path})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_links_stay(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "folder" / "target"
    target.parent.mkdir()
    link.symlink_to("folder/target")
    for content in (b"new", b"over what is there"):
        check_outputs({"--json": link})
        write_whole(link, content)
        assert link.is_symlink() and target.read_bytes() == content
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "link", "target"]
