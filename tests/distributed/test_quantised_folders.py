"""Folders of quantised weights on every mesh give what docs/formats.json says: transformers' tokens, or a reason."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.format_table import MESHES, RESULTS, everything, outcomes

CUT = (("fp8 blocks", "deepseek_v3"), ("mxfp4", "gpt_oss"), ("awq", "qwen3"))
ONE_OF_EACH = (
    *CUT,
    ("compressed-tensors w4a16", "qwen3"),
    ("compressed-tensors w8a8 int8", "llama"),
    ("bitsandbytes nf4", "llama"),
)
"""Each way of loading, once."""
PACKAGES = {"compressed-tensors": "compressed_tensors", "bitsandbytes": "bitsandbytes", "torchao": "torchao"}


def check(kinds: list[tuple[str, str]], meshes: tuple[str, ...], work: Path) -> None:
    """The table's rows are what comes of them now, where their packages are installed."""
    here = [(kind, family) for kind, family in kinds if find_spec(PACKAGES.get(kind.split()[0], "torch"))]
    expected = json.loads(RESULTS.read_text())
    for kind, families in outcomes(here, meshes, work).items():
        for family, found in families.items():
            assert found == {mesh: expected[kind][family][mesh] for mesh in meshes}, (kind, family)


def test_one_of_each_shares_tokens(tmp_path: Path) -> None:
    check(list(ONE_OF_EACH), ("2x1",), tmp_path)


def test_weights_are_cut(tmp_path: Path) -> None:
    check(list(CUT), ("1x2",), tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mesh", MESHES)
def test_all_on_every_mesh(mesh: str, tmp_path: Path) -> None:
    check(everything(), (mesh,), tmp_path)


def test_the_table_has_all_and_nothing_differs() -> None:
    table = json.loads(RESULTS.read_text())
    assert [(kind, family) for kind in table for family in table[kind]] == everything()
    for kind, families in table.items():
        for family, found in families.items():
            assert set(found) == set(MESHES), (kind, family)
            assert all(word == "equal" or word.startswith("refused: ") for word in found.values()), (kind, family)
