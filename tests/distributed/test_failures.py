"""An error on one rank ends the call on all of them, as that error and soon, and the next call works."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.families import llama

SCRIPT = Path(__file__).parent / "ranks" / "failures.py"
# Nobody waits for `timeout_s`, which is ten minutes.
SECONDS = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's config."""
    llama(dtype="float32").save_pretrained(tmp_path)
    return tmp_path


def launch(folder: Path, mesh: str, method: str, kind: str) -> list[dict[str, Any]]:
    cp, tp = (int(part) for part in mesh.split("x"))
    out = folder / "out.json"
    run_ranks(SCRIPT, out, folder, mesh, method, kind, ranks=cp * tp, timeout=300).check()
    return json.loads(out.read_text())


def judge(said: list[str], own: str, failing: int, *, same: str = "") -> None:
    """The failing rank has its own error, all others one that tells of it."""
    for rank, text in enumerate(said):
        if rank == failing:
            assert re.fullmatch(own + same, text), said
        else:
            # That of a user's own type is not theirs to raise.
            assert re.match(rf"MegaKVError: rank {failing} failed: {own}", text), said


@pytest.mark.parametrize(
    ("mesh", "method"),
    [
        *(pytest.param("2x1", method, marks=pytest.mark.drawn(1)) for method in ("auto", "runahead")),
        *(
            pytest.param(mesh, method, marks=pytest.mark.full)
            for mesh, method in (("1x2", "auto"), ("3x1", "runahead"), ("2x2", "auto"), ("3x1", "pass_kv"))
        ),
    ],
)
def test_a_failing_rank_ends_the_call_on_all_and_the_next_one_works(folder: Path, mesh: str, method: str) -> None:
    ranks = launch(folder, mesh, method, "all")

    def said(name: str) -> list[str]:
        return [found[name]["said"] for found in ranks]

    for found in ranks:
        for name, ended in found.items():
            if isinstance(ended, dict):
                assert ended.get("after", True), (name, ended)
                assert ended.get("seconds", 0.0) < SECONDS, (name, ended)
        assert found["under way"] and found["session goes on"]
        assert len(found["second"]) == 2
        assert all("another thread's call of this engine is under way" in text for text in found["second"])
        assert found["lives"] == 0
        assert found.get("layers", True) and found.get("partitions", True) and found.get("chosen", True), found
    for name in ("first", "last", "end"):
        judge(said(f"streamer, {name}"), f"KeyError: '{name}'", 0, same=", the same")
    judge(said("streamer, third"), "Interrupted: third", 0, same=", the same")
    assert all("cannot be used with beam search" in text for text in said("streamer with beams"))
    for beams in (1, 2):
        judge(said(f"criterion, {beams}"), "OSError: in a criterion", 0, same=", the same")
    judge(said("session"), "KeyError: 'in a session'", 0)
    assert len({*said("wrong on all")}) == 1 and said("wrong on all")[0].startswith("ValueError: ")
    assert len({*said("wrong input on all")}) == 1 and "labels is not supported" in said("wrong input on all")[0]
    for rank in range(len(ranks)):
        judge(said(f"wrong option, {rank}"), r"ValueError: generate\(dola_layers='low'\) is not supported.*", rank)
        for name in ("num_return_sequences", "max_new_tokens", "eos_token_id", "repetition_penalty", "attention_mask"):
            assert all(f"called with {name} = " in text for text in said(f"{name}, {rank}")), said(f"{name}, {rank}")
        assert all("called with min_new_tokens = " in text for text in said(f"generation_config, {rank}"))
        judge(said(f"wrong turn, {rank}"), r"ValueError: .*num_return_sequences.*", rank)
        judge(said(f"wrong shape, {rank}"), r"ValueError: input_ids must be .*", rank)
        judge(said(f"wrong input, {rank}"), r"ValueError: labels is not supported.*", rank)
        judge(said(f"processor, {rank}, True"), "ZeroDivisionError: in a processor", rank)
        for call in ("generate", "forward", "session", "logits", "late"):
            judge(said(f"memory, {rank}, {call}"), "OutOfMemoryError: no memory left", rank)
        assert all("chose other tokens than rank 0" in text for text in said(f"processor, {rank}, False"))
        assert all("chose other tokens than rank 0" in text for text in said(f"last token, {rank}"))
        assert all("called with input_ids = [1, 77] with checksum" in text for text in said(f"other prompt, {rank}"))


def test_a_rank_that_waits_in_shared_memory_ends_with_the_error_of_another(folder: Path) -> None:
    arguments = (folder / "out.json", folder, "1x2", "auto", "deaf")
    result = run_ranks(SCRIPT, *arguments, ranks=2, timeout=300, env={"LOCAL_SIZE": "2"})
    assert all(code not in (0, None) for code in result.codes) and result.leftovers == [], result
    # On a busy machine rank 0 may hear of it before it waits there, and raises.
    said = r"(megakv: rank 0 ends because|MegaKVError:) rank 1 failed: OutOfMemoryError: no memory left\n"
    assert re.search(said, result.stderr), result
    # By then rank 1 has raised its error, or tells of it when the launcher ends it.
    assert result.stderr.count("OutOfMemoryError: no memory left") == 2 and "was lost" not in result.stderr, result
    assert result.seconds < SECONDS


def test_threads_of_one_rank_take_turns(folder: Path) -> None:
    (found,) = launch(folder, "1x1", "auto", "alone")
    assert found["results"] == [True] * 3
    assert "cannot be destroyed while a call of it is under way" in found["destroyed"]["said"]
    assert found["destroyed"]["after"]
