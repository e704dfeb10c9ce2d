"""Writes the weights of a GGUF file anew in another type: ``gguf_types.py SOURCE TARGET fp32|bf16``.

They are rounded to bfloat16, as in the folder of safetensors that the other rivals read; matrices are then stored in
the type asked for. llama.cpp keeps vectors in float32 whatever the type.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize, quantize

TYPES = {
    "fp32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
}
WRITTEN_BY_ITSELF = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def convert(source: Path, target: Path, dtype: str) -> None:
    """The file appears whole or not at all."""
    kind, file_type = TYPES[dtype]
    reader = GGUFReader(source)
    temporary = target.with_name(f"{target.name}.{os.getpid()}")
    writer = GGUFWriter(temporary, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(WRITTEN_BY_ITSELF):
            inner = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        rounded = dequantize(quantize(values, GGMLQuantizationType.BF16), GGMLQuantizationType.BF16)
        if values.ndim == 1 or kind is GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, rounded)
        else:
            writer.add_tensor(tensor.name, quantize(rounded, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.rename(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
