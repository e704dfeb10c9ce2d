"""Kinds of bad input, each with the one message that it ends in."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MambaConfig, PreTrainedConfig, XLNetConfig

from tests.distributed.models import prose, save_model, word_tokenizer

LACKING = "a type that the device lacks"


# A rank that knows something rank 0 does not leaves it the first word for so long.
PATIENCE = 10.0


class Inputs:
    """Good input, from which every kind of bad input departs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.model = save_model(folder / "model")
        self.config = self.json("good.json", section())
        self.prompt = self.text("prompt.txt", prose(151).encode())

    def text(self, name: str, content: bytes) -> Path:
        """A file."""
        path = self.folder / name
        path.write_bytes(content)
        return path

    def json(self, name: str, value: Any) -> Path:
        """A JSON file."""
        return self.text(name, json.dumps(value).encode())

    def damaged(self, name: str, damage: Callable[[Path], object]) -> Path:
        """A copy of the model with something done to it."""
        copy = self.folder / name
        if not copy.exists():
            shutil.copytree(self.model, copy)
            damage(copy)
        return copy

    def other(self, name: str, config: PreTrainedConfig) -> Path:
        """A tiny model of another family, whole and with a tokenizer."""
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(self.folder / name)
        word_tokenizer().save_pretrained(self.folder / name)
        return self.folder / name

    def command(self, **changes: object) -> list[str]:
        """Arguments of launcher/run.py; a change to None leaves an argument out."""
        given = {
            "--model": self.model,
            "--config": self.config,
            "--prompt-file": self.prompt,
            "--max-new-tokens": 3,
            **{f"--{name.replace('_', '-')}": value for name, value in changes.items()},
        }
        return [str(part) for name, value in given.items() if value is not None for part in (name, value)]


def section(cp: int = 2, tp: int = 1, **more: Any) -> dict[str, Any]:
    """A run's JSON."""
    return {
        "dtype": "fp32",
        "tensor_parallel": {"tp_size": tp},
        "megakv": {"context_parallel": {"size": cp, **more}},
    }


def lose(model: Path) -> None:
    """Remove one checkpoint file of several."""
    sorted(model.glob("*.safetensors"))[1].unlink()


def cut(model: Path) -> None:
    """End one checkpoint file in its middle."""
    path = sorted(model.glob("*.safetensors"))[1]
    os.truncate(path, path.stat().st_size // 2)


@dataclass(frozen=True)
class Kind:
    """One kind of bad input.

    Parameters
    ----------
    message : str
        Pattern of the one message.
    change : callable
        From inputs to the arguments that differ from good ones.
    only : int, optional
        The one rank whose input is bad.
    patience : float
        Seconds that a rank waits for rank 0 to speak first.
    quick : bool
        Whether it goes through the deepspeed launcher in the quick set, too.
    """

    message: str
    change: Callable[[Inputs], dict[str, object]]
    only: int | None = None
    patience: float = 0.0
    quick: bool = False


def offload(**settings: Any) -> dict[str, Any]:
    """A run's JSON with keys and values off the accelerator."""
    run = section()
    run["megakv"]["offload"] = {"enabled": True, "method": "stream", "host_gb": 0.1, **settings}
    return run


def three_heads(inputs: Inputs) -> Path:
    """A model that two tensor-parallel ranks cannot share."""
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16, "hidden_size": 48}
    return save_model(inputs.folder / "odd", **sizes)


def with_config(name: str, value: Any) -> Callable[[Inputs], dict[str, object]]:
    """The change to another JSON."""
    return lambda inputs: {"config": inputs.json(name, value)}


KINDS: dict[str, Kind] = {
    "unknown key": Kind(
        r"unknown\.json: megakv\.context_parallel\.prefil = 'pass_kv': unknown key; did you mean 'prefill'",
        with_config("unknown.json", section(prefil="pass_kv")),
    ),
    "impossible value": Kind(
        r"value\.json: megakv\.context_parallel\.prefill = 'fast': allowed: 'auto', 'pass_kv'",
        with_config("value.json", section(prefill="fast")),
    ),
    "CP x TP is not the world size": Kind(
        r"size = 2 times .*tp_size = 2 is 4, but 2 ranks .*--num_accelerators 4,.* can have: 2 x 1, 1 x 2$",
        with_config("mesh.json", section(cp=2, tp=2)),
    ),
    "CP x TP is neither the world size nor what the model allows": Kind(
        r"size = 1 times .*tp_size = 3 is 3, but 2 ranks .*that 2 ranks can have: 2 x 1$",
        lambda inputs: {"config": inputs.json("mesh3.json", section(cp=1, tp=3)), "model": three_heads(inputs)},
    ),
    LACKING: Kind(
        r"dtype = torch\.float16 is not supported on cpu: set dtype to 'fp32' or 'bf16'$",
        with_config("half_type.json", {**section(), "dtype": "fp16"}),
    ),
    "another JSON on one rank": Kind(
        r"megakv\.offload\.enabled is False on rank 0 but True on rank 1: give every rank the same configuration$",
        with_config("other.json", offload()),
        only=1,
    ),
    "another mesh on one rank": Kind(
        r"megakv\.context_parallel\.size is 2 on rank 0 but 1 on rank 1: give every rank the same configuration$",
        with_config("single.json", section(cp=1)),
        only=1,
    ),
    "TP does not divide the heads": Kind(
        r"tensor_parallel\.tp_size = 2 cannot split 3 query heads over 3 KV heads; sizes that can: 1, 3$",
        lambda inputs: {
            "config": inputs.json("tp.json", section(cp=1, tp=2)),
            "model": three_heads(inputs),
        },
    ),
    "host memory that the machine lacks": Kind(
        r"megakv\.offload\.host_gb asks for 100000\.00 GiB of host memory on each of 2 ranks of this host, .* are free",
        with_config("host.json", offload(host_gb=1e5)),
    ),
    "a disk folder that is missing": Kind(
        r"megakv\.offload\.disk_path = '/missing' cannot be written to: No such file or directory$",
        with_config("disk.json", offload(disk_gb=0.01, disk_path="/missing")),
    ),
    "keys and values that outgrow the budget of one rank": Kind(
        # 77 tokens take twenty pages in each of two layers, 76 on the other rank nineteen.
        r"this generation needs 40\.00 KiB .*\(76 tokens so far, up to 1 more.*host_gb holds 39\.00 KiB",
        lambda inputs: {
            "config": inputs.json("room.json", offload(host_gb=39 / (1 << 20), page_kib=1)),
            "max_new_tokens": 2,
        },
    ),
    "XLNet": Kind(
        r"model type 'xlnet' \(XLNetLMHeadModel\) is not supported",
        lambda inputs: {
            "model": inputs.other("xlnet", XLNetConfig(vocab_size=264, d_model=32, n_layer=2, n_head=4, d_inner=64))
        },
    ),
    "Mamba": Kind(
        r"model type 'mamba' .*is not supported",
        lambda inputs: {
            "model": inputs.other("mamba", MambaConfig(vocab_size=264, hidden_size=32, num_hidden_layers=2))
        },
    ),
    "prompt longer than the positions": Kind(
        r"the prompt has 1200 tokens but the model has positions for 512 \(max_position_embeddings\)",
        lambda inputs: {"prompt_file": inputs.text("long.txt", prose(1200).encode())},
    ),
    "empty prompt file": Kind(
        r"--prompt-file \S+empty\.txt is empty: the prompt is empty$",
        lambda inputs: {"prompt_file": inputs.text("empty.txt", b" \n")},
    ),
    "no prompt": Kind(
        r"the prompt is empty: give --prompt-file, --question or both$", lambda inputs: {"prompt_file": None}
    ),
    "prompt file that is not UTF-8": Kind(
        r"--prompt-file \S+latin\.txt is not UTF-8 text: .* at byte 3$",
        lambda inputs: {"prompt_file": inputs.text("latin.txt", "caf\xe9 au lait".encode("latin-1"))},
    ),
    "missing prompt file": Kind(
        r"--prompt-file \S+none\.txt cannot be read: No such file or directory$",
        lambda inputs: {"prompt_file": inputs.folder / "none.txt"},
    ),
    "missing checkpoint file": Kind(
        r"lost lacks model-00002-of-\d+\.safetensors, which model\.safetensors\.index\.json names",
        lambda inputs: {"model": inputs.damaged("lost", lose)},
    ),
    "truncated checkpoint file": Kind(
        r"cut/model-00002-of-\d+\.safetensors is cut short or broken",
        lambda inputs: {"model": inputs.damaged("cut", cut)},
    ),
    "checkpoint missing on one rank": Kind(
        r"rank 1 failed: MegaKVError: \S+lost lacks model-00002-of-\d+\.safetensors",
        lambda inputs: {"model": inputs.damaged("lost", lose)},
        only=1,
        quick=True,
    ),
    "checkpoint truncated on rank 0": Kind(
        r"cut/model-00002-of-\d+\.safetensors is cut short or broken",
        lambda inputs: {"model": inputs.damaged("cut", cut)},
        only=0,
    ),
    "JSON broken on one rank": Kind(
        r"rank 1: config \S+half\.json is not valid JSON",
        lambda inputs: {"config": inputs.text("half.json", b'{"dtype": "fp32",')},
        only=1,
        patience=PATIENCE,
    ),
    "JSON that does not parse": Kind(
        r"config \S+half\.json is not valid JSON: column 18: Expecting property name",
        lambda inputs: {"config": inputs.text("half.json", b'{"dtype": "fp32",')},
    ),
    "missing JSON": Kind(
        r"config \S+none\.json cannot be read: No such file or directory$",
        lambda inputs: {"config": inputs.folder / "none.json"},
    ),
    "missing model directory": Kind(
        r"model '\S+none' is no directory; give a directory with config\.json, or a hub id$",
        lambda inputs: {"model": inputs.folder / "none"},
    ),
    "model without config.json": Kind(
        r"nameless has no config\.json, so it is no Hugging Face model$",
        lambda inputs: {
            "model": inputs.damaged("nameless", lambda copy: [path.unlink() for path in copy.glob("*.json")])
        },
    ),
    "file in place of the model": Kind(
        r"config\.json' is a file; give the folder in which its config\.json and weights lie$",
        lambda inputs: {"model": inputs.model / "config.json"},
    ),
    "picture of another kind": Kind(
        r"--timeline out\.jpg: allowed: a path that ends in \.png$", lambda inputs: {"timeline": "out.jpg"}
    ),
    "outcome that cannot be written": Kind(
        r"--json \S+prompt\.txt/out\.json: cannot be written", lambda inputs: {"json": inputs.prompt / "out.json"}
    ),
    "nucleus of nothing": Kind(r"--top-p 0\.0: allowed: above 0, up to 1$", lambda inputs: {"top_p": 0}),
    "model without a tokenizer": Kind(
        r"--model \S+silent: its tokenizer cannot be read: there is none; copy tokenizer\.json from the original",
        lambda inputs: {
            "model": inputs.damaged("silent", lambda copy: [path.unlink() for path in copy.glob("tokenizer*")])
        },
    ),
    "no new tokens": Kind(r"--max-new-tokens -3: allowed: 1 or more$", lambda inputs: {"max_new_tokens": -3}),
    "new tokens that are no number": Kind(
        r"argument --max-new-tokens: invalid int value: 'many'", lambda inputs: {"max_new_tokens": "many"}
    ),
    "unknown argument": Kind(r"unrecognized arguments: --fast yes", lambda inputs: {"fast": "yes"}),
}
