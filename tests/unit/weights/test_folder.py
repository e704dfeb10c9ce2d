"""The folder of a model is found here or on the hub, or a message says at once what is missing."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from megakv.base.errors import MegaKVError
from megakv.costmodel.shape import ModelShape
from megakv.engine.loading import build_model
from megakv.planner.dry_run import dry_run
from megakv.weights.folder import local_directory, read_config, read_generation_config
from tests.families import llama


def test_no_directory(tmp_path: Path) -> None:
    for name in (tmp_path / "none", "./none", "a/b/c"):
        with pytest.raises(MegaKVError, match="is no directory; give a directory with config.json, or a hub id"):
            local_directory(name)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(MegaKVError, match="is a file; give the folder in which its config.json and weights lie"):
        local_directory(tmp_path / "model.safetensors")


@pytest.mark.parametrize("weights", [True, False])
def test_hub_ids_are_fetched_without_pickles(weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[str]] = {}

    def download(name: str, allow_patterns: list[str], local_files_only: bool) -> str:
        asked[name] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("megakv.weights.folder.snapshot_download", download)
    assert local_directory("someone/model", weights=weights) == tmp_path
    assert ("model*.safetensors" in asked["someone/model"]) == weights
    assert "*.json" in asked["someone/model"] and not any(".bin" in pattern for pattern in asked["someone/model"])


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Of a server that takes connections and answers none."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_hub_that_does_not_answer_is_not_waited_for(silent_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("megakv.weights.folder.ANSWER_S", 0.2)
    for port in (silent_port, 9):
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", f"http://127.0.0.1:{port}")
        with pytest.raises(MegaKVError, match=r"^model 'someone/model' is no directory here, .*cannot be reached .*$"):
            local_directory("someone/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MegaKVError, match="HF_HUB_OFFLINE forbids to ask the hub; give a directory, or unset it$"):
        local_directory("someone/model")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json, so it is no Hugging Face model$"),
        ("{", "config.json is not valid JSON: column 2"),
        ('{"model_type": "llama", "model_type": "opt"}', "'model_type' is given twice"),
        ("[]", "it has no 'model_type'"),
        ("{}", "it has no 'model_type'"),
        ('{"model_type": "lama"}', "'lama' is none that .*; did you mean 'llama'"),
        ('{"model_type": "xyzzyx9"}', "'xyzzyx9' is none .*; code beside a model"),
        (
            '{"model_type": "llama", "num_hidden_layers": "two"}',
            "describes no model .*num_hidden_layers",
        ),
    ],
)
def test_folders_without_a_model(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises((MegaKVError, ValueError), match=message):
        read_config(tmp_path)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_config_without_a_type_has_that_of_the_weights(sharded: bool, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(llama(), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="100KB" if sharded else "1GB")
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({name: value for name, value in json.loads(path.read_text()).items() if "dtype" not in name})
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert read_config(tmp_path).dtype == ModelShape.from_path(tmp_path).dtype == torch.bfloat16
    assert build_model(tmp_path, dtype=None, all_reduce=lambda tensor: tensor).module.dtype == torch.bfloat16
    ran = dry_run(tmp_path, {}, context=16)
    assert ran == dry_run(tmp_path, {"dtype": "bf16"}, context=16) != dry_run(tmp_path, {"dtype": "fp32"}, context=16)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert read_config(tmp_path).dtype is None


def test_a_folder_around_the_model_names_it(tmp_path: Path) -> None:
    inner = tmp_path / "snapshots" / "0123"
    inner.mkdir(parents=True)
    (inner / "config.json").write_text("{}")
    with pytest.raises(MegaKVError, match="did you mean .*snapshots/0123"):
        read_config(tmp_path)


def test_defaults_of_generate_come_from_the_file_that_has_them(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 1.5}))
    assert read_generation_config(tmp_path).repetition_penalty == 1.5
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}')
    found = read_generation_config(tmp_path)
    assert found.top_k == 7 and found.repetition_penalty is None
    for broken in ("{", '{"compile_config": {}}', "[]"):
        (tmp_path / "generation_config.json").write_text(broken)
        with pytest.raises(MegaKVError, match=r"generation_config.json holds no defaults .*; correct or remove it$"):
            read_generation_config(tmp_path)
