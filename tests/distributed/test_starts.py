"""An engine gives everything back when it is destroyed, and when it cannot be made."""

import json
import re
from pathlib import Path

from tests.distributed.launch import run_ranks

SCRIPT = Path(__file__).parent / "ranks" / "starts.py"
MESSAGES = {
    "mapping": "megakv.fairkv.mapping",
    "no checkpoint": "nothing",
    "broken checkpoint": "model.safetensors",
    "one rank alone": "rank 1|model.safetensors",
    "another kind of model": "rwkv|Rwkv",
    "profile": "megakv.context_parallel.profile",
    "disk": "megakv.offload.disk_path = .* cannot be written to",
    "pages": "megakv.offload.host_gb",
    "tracking": "megakv.tracking",
    "other weights": "the model's model.layers.1.self_attn.v_proj.weight on rank 1 is another than on rank 0: give",
    "other norms": "the model's model.layers.0.post_attention_layernorm.weight on rank 1 is another than on rank 0",
    "other files": "the model's model.safetensors on rank 1 is another than on rank 0: give every rank the same",
    "quantised": "tensor_parallel.tp_size = 2 is not supported for the model given, whose weights are quantised",
    "other config": "the model's config.rms_norm_eps is 0.01 on rank 0 but 0.02 on rank 1: give every rank the same",
    "other rotation": "rope_parameters.rope_theta is 100 on rank 0 but 200 on rank 1",
    "unfamiliar": "MixLayer is unknown to DeepSpeed's AutoTP .*: name its row-parallel .* injection_policy=",
    "another's policy": "injection_policy is for MixLayer, but the model's decoder layers are LlamaDecoderLayer",
    "given module": "rwkv|Rwkv",
}


def test_what_engines_leave_behind(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run_ranks(SCRIPT, out, tmp_path, ranks=2, timeout=420).check()
    assert "is deprecated" not in result.stderr
    for rank, results in enumerate(json.loads(out.read_text())):
        for name, pattern in MESSAGES.items():
            assert re.search(pattern, results["messages"][name]), (rank, name, results["messages"][name])
        assert results["after"] == results["before"] == results["ended"], rank
        assert results["good"], rank
        assert results["policy"] == {"given": True, "by names": True}, rank
        assert results["quantised"] == {"subclass": True, "unpacked": True}, rank
        for name in ("llama", "phi3", "bloom"):
            shared = results[f"shared {name}"]
            assert re.search("belongs to another engine: call destroy", shared.pop("busy")), (rank, name)
            assert "this engine was destroyed" in shared.pop("closed"), (rank, name)
            if "spent" in shared:
                assert "an earlier engine with tensor_parallel.tp_size = 2: load it again" in shared.pop("spent")
            assert len(shared) >= 6 and all(shared.values()), (rank, name, shared)
        assert all(results["handlers"].values()), (rank, results["handlers"])
        assert all(all(equal) and len(equal) == 4 for equal in results["modes"].values()), (rank, results["modes"])
