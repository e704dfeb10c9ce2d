"""``megakv run`` refuses what cannot work before it starts anything; turns are what a chat template makes of them."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from megakv.engine.config import load_config
from megakv.engine.generation import LengthLimits
from megakv.launcher.command import main
from megakv.launcher.conversation import Turns
from megakv.launcher.job import check_conversation
from megakv.launcher.ranks import read_hostfile
from tests.distributed.models import CHAT_TEMPLATE, word_tokenizer
from tests.families import llama

MESH = {"megakv": {"context_parallel": {"size": 2}}, "dtype": "fp32"}
CHATML = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'].strip() }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
ASK = ["--question", "aa"]


@pytest.mark.parametrize(
    ("settings", "words", "message"),
    [
        (MESH, ["--cp", "3"], "--cp 3 contradicts megakv.context_parallel.size = 2 of .*: give --cp 2, or leave one"),
        (MESH, ["--tp", "2", "--dtype", "bf16"], "--dtype bf16 contradicts dtype = fp32 of .*: give --dtype fp32"),
        ({"tp": {"tp_size": 2}}, ["--tp", "4"], "--tp 4 contradicts tensor_parallel.tp_size = 2 of"),
        (
            {"megakv": {"context_parallel": {"prefill": "pass_kv"}}},
            ["--prefill", "pass_q"],
            "--prefill pass_q contradicts megakv.context_parallel.prefill = pass_kv of .*: give --prefill pass_kv",
        ),
        (
            {"megakv": {"tracking": {"wandb": {"project": "ours"}}}},
            ["--wandb", "mine"],
            "--wandb mine contradicts megakv.tracking.wandb.project = ours of .*: give --wandb ours",
        ),
        (None, ["--wandb", "our/project"], r"--wandb our/project: allowed: 1 to 128 characters, none of / \\ # \? % :"),
        (None, ["--prefill-chunk-size", "0"], "--prefill-chunk-size 0: allowed: 1 or more"),
        (None, ["--prompt-lookup", "0"], "--prompt-lookup 0: allowed: 1 or more"),
        ({"nonsense": 1}, [], "nonsense = 1: unknown key"),
        (None, ["--cp", "0"], "--cp 0: allowed: 1 or more"),
        (None, ["--threads", "0"], "--threads 0: allowed: 1 or more"),
        (None, ["--max-new-tokens", "0"], "--max-new-tokens 0: allowed: 1 or more"),
        (None, ["--prompt-file", "/none"], "--prompt-file /none cannot be read: No such file"),
        (None, ["--json", "/proc/none/out.json"], "--json /proc/none/out.json: cannot be written"),
        (None, ["--json", ""], "--json '' is empty: leave it out, or give it a value"),
        (None, ["--prefill", "nothing"], "megakv.context_parallel.prefill = 'nothing': allowed: 'auto', 'pass_kv'"),
        (None, ["--question", " "], "--question ' ' is empty"),
    ],
)
def test_refusals(
    settings: object, words: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if settings is not None:
        (tmp_path / "run.json").write_text(json.dumps(settings))
        words = ["--config", str(tmp_path / "run.json"), *words]
    assert main(["run", "no-model", *ASK, *words]) == 1
    said = capfd.readouterr()
    assert "ranks on" not in said.out
    assert re.search(message, said.err) and said.err.startswith("megakv: error: "), said.err


def test_nothing_to_ask(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no-model"]) == 1
    assert "the prompt is empty: give --prompt-file, --question or both" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host1 slots=2\nhost1 slots=2\n", "the line 'host1 slots=2'"),
        ("host1\n", "the line 'host1': allowed: NAME slots=RANKS"),
        ("# none\n\n", "names no host"),
    ],
)
def test_hostfiles(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pdsh").write_text("#!/bin/sh\n")
    (tmp_path / "pdsh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_hostfile(str(path))
    path.write_text("# ours\nhost1 slots=2\n\n host2   slots=1 # small\n")
    assert read_hostfile(str(path)) == {"host1": 2, "host2": 1}
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="needs pdsh on this host"):
        read_hostfile(str(path))


@pytest.mark.parametrize("template", [CHATML, CHAT_TEMPLATE])
def test_turns_join_to_the_whole_conversation(template: str) -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    turns = Turns(tokenizer, chat=True)
    messages = [("user", "aa ab"), ("assistant", "ba"), ("user", "ca cb"), ("assistant", "da"), ("user", "ea")]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in messages], add_generation_prompt=True, return_dict=False
    )
    parts = [turns.first("aa ab"), ids(tokenizer, "ba"), turns.next("ca cb"), ids(tokenizer, "da"), turns.next("ea")]
    assert [token for part in parts for token in part[0].tolist()] == whole


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> Tensor:
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids


def test_a_template_without_answers_is_refused() -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ValueError, match="leaves answers out: give --no-chat-template, or one question"):
        Turns(tokenizer, chat=True).next("aa")
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match="chat template fails: no system role"):
        Turns(tokenizer, chat=True).first("aa")


def test_a_conversation_that_cannot_end_is_not_begun() -> None:
    model = LlamaForCausalLM(llama(max_position_embeddings=100))
    limits, turns = LengthLimits(model, load_config({})), [torch.ones(1, 60), torch.ones(1, 20)]
    check_conversation(turns, {"max_new_tokens": 20}, limits)
    with pytest.raises(ValueError, match="2 questions, with answers of up to 21 tokens each: .* 101 tokens"):
        check_conversation(turns, {"max_new_tokens": 21}, limits)
