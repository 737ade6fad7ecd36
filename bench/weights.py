"""The same GPT-2 small for every engine: saved once by transformers, converted for the others.

Speeds do not depend on what the numbers are, so fresh ones will do.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from bench.cases import EngineSpec

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from torch import Tensor

    from model.config import GPT2Config

SEED = 0
END_OF_TEXT = 50256

_GGUF_NAMES = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def token_name(token_id: int) -> str:
    """How a CTranslate2 vocabulary of these weights names an id. Nothing here needs text."""
    return f"t{token_id}"


def prepare(directory: Path, specs: Iterable[EngineSpec]) -> None:
    """Write what `specs` read into `directory`, where it is missing."""
    saved = directory / "huggingface"
    if not (saved / "config.json").exists():
        _save(saved)
    for spec in specs:
        converted = directory / file_name(spec)
        if spec.library == "ctranslate2" and not (converted / "model.bin").exists():
            _convert(saved, converted, spec.dtype)
        if spec.library == "llamacpp" and not converted.exists():
            _write_gguf(saved, converted, spec.dtype)


def file_name(spec: EngineSpec) -> str:
    """Where a converted model lies in the folder of weights."""
    return f"llamacpp-{spec.dtype}.gguf" if spec.library == "llamacpp" else spec.name


def _save(directory: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(SEED)
    GPT2LMHeadModel(GPT2Config()).save_pretrained(directory)


def _convert(saved: Path, converted: Path, dtype: str) -> None:
    from ctranslate2.converters import TransformersConverter

    converter = TransformersConverter(str(saved))
    converter.load_tokenizer = lambda *_, **__: _tokenizer()  # there is none beside the weights
    converter.convert(str(converted), quantization=dtype, force=True)


def _tokenizer() -> SimpleNamespace:
    """What the converter asks of a tokenizer: a name for each id."""
    names = {token_name(token_id): token_id for token_id in range(END_OF_TEXT + 1)}
    end = token_name(END_OF_TEXT)
    return SimpleNamespace(
        get_vocab=lambda: names,
        bos_token=end,
        eos_token=end,
        unk_token=end,
        bos_token_id=END_OF_TEXT,
    )


def _write_gguf(saved: Path, path: Path, dtype: str) -> None:
    """Write what llama.cpp's own converter and quantizer would, without a vocabulary.

    One-dimensional tensors and positions stay in float32.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    from model.weights.source import load_checkpoint

    checkpoint = load_checkpoint(str(saved), cache_dir=saved)
    writer = GGUFWriter(path, "gpt2")
    _write_head(writer, checkpoint.config)
    for name, tensor in gguf_tensors(checkpoint.tensors):
        array = tensor.contiguous().numpy()
        if dtype == "q8_0" and array.ndim == 2 and not name.startswith("position"):
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_head(writer: "GGUFWriter", config: "GPT2Config") -> None:
    writer.add_context_length(config.n_ctx)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_vocab_size(config.n_vocab)
    writer.add_tokenizer_model("none")


def gguf_tensors(tensors: Mapping[str, "Tensor"]) -> Iterator[tuple[str, "Tensor"]]:
    """Our tensors under GGUF's names, dense ones as it has them: [out, in]. The head is tied."""
    for name, tensor in tensors.items():
        match name.split("."):
            case ["wte", "weight"]:
                yield "token_embd.weight", tensor
            case ["wpe", "weight"]:
                yield "position_embd.weight", tensor
            case ["ln_f", kind]:
                yield f"output_norm.{kind}", tensor
            case ["h", layer, *parts, kind]:
                dense = tensor.t() if tensor.dim() == 2 else tensor
                yield f"blk.{layer}.{_GGUF_NAMES['.'.join(parts)]}.{kind}", dense
