"""Models of images and text on two ranks answer text as the plain model does."""

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.wrappers import WRAPPERS, saved

SCRIPT = Path(__file__).parent / "ranks" / "tokens.py"
DECODED = 6
MESHES = ((2, 1), (1, 2))


@pytest.mark.parametrize(
    "name", [name if name == "gemma3" else pytest.param(name, marks=pytest.mark.full) for name in WRAPPERS]
)
def test_two_ranks_give_the_plain_model_s_tokens(name: str, tmp_path: Path) -> None:
    plain = saved(WRAPPERS[name](), tmp_path / name)
    prompt = torch.randint(3, 90, (1, 70))
    wanted = plain.generate(prompt, do_sample=False, max_new_tokens=DECODED, pad_token_id=0)[0, 70:].tolist()
    sections = [{"tensor_parallel": {"tp_size": tp}, "megakv": {"context_parallel": {"size": cp}}} for cp, tp in MESHES]
    run = {"model": str(tmp_path / name), "prompt": prompt[0].tolist(), "decoded": DECODED}
    plan = [{**run, "config": {"dtype": "fp32", **section}} for section in sections]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    run_ranks(SCRIPT, tmp_path / "plan.json", tmp_path / "out.json", ranks=2, timeout=120).check()
    assert json.loads((tmp_path / "out.json").read_text()) == [wanted] * len(MESHES)
