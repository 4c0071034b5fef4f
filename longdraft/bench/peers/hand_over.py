"""A loaded model as files that other engines read, with the very weights that we run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from longdraft.checkpoint.gguf import hf_config
from longdraft.checkpoint.gguf_header import read_header
from longdraft.errors import InvalidValueError, UnsupportedModelError

if TYPE_CHECKING:
    from longdraft.llm import LLM

PLAIN_TYPES = {
    torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
}


def as_folder(llm: LLM, folder: Path) -> Path:
    """The model's own Hugging Face folder; that of a GGUF file is made, with its weights in the model's dtype."""
    path = Path(llm.checkpoint.path)
    if path.is_dir():
        return path
    config, weights = hf_config(read_header(path)), llm.checkpoint.weights
    if "rope_freq_factors" in config:
        raise UnsupportedModelError("rope_freqs.weight", "in the file", "a peer cannot be told", "Give a folder.")
    config["architectures"] = [f"{str(config['model_type']).title()}ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: weights.load(name).to(llm.model.dtype).contiguous() for name in weights.shapes()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def as_gguf(llm: LLM, folder: Path) -> Path:
    """The model's own GGUF file."""
    path = Path(llm.checkpoint.path)
    if not path.is_file():
        fix = "Convert it with llama.cpp's convert_hf_to_gguf.py, and give the file to both."
        raise InvalidValueError("--model", str(path), "must be a GGUF file for this peer", fix)
    return path


def as_unpacked_gguf(llm: LLM, folder: Path) -> Path:
    """A copy of the model's GGUF file with matrices in the dtype that we run, bfloat16 or float32."""
    path, dtype = as_gguf(llm, folder), llm.model.dtype
    if dtype not in PLAIN_TYPES:
        raise InvalidValueError("--dtype", str(dtype).removeprefix("torch."), "must be bfloat16 or float32 here")
    kind, file_type = PLAIN_TYPES[dtype]
    reader = gguf.GGUFReader(path)  # our own reader has checked the file
    architecture = reader.get_field("general.architecture").contents()
    target = folder / "unpacked.gguf"
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        items = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=items)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        data, own = tensor.data, tensor.tensor_type
        if data.ndim > 1:  # llama.cpp wants vectors as they are
            data, own = quantize(dequantize(data, own), kind), kind
        writer.add_tensor(tensor.name, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
