"""The same GPT-2 small for every engine: saved once by transformers, converted for the others.

Speeds do not depend on what the numbers are, so fresh ones will do.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

SEED = 0
CT2_DTYPES = ("float32", "int8")
END_OF_TEXT = 50256


def token_name(token_id: int) -> str:
    """How a CTranslate2 vocabulary of these weights names an id. Nothing here needs text."""
    return f"t{token_id}"


def prepare(directory: Path, ct2_dtypes: Sequence[str] = CT2_DTYPES) -> None:
    """Write `huggingface/` and `ctranslate2-<dtype>/` into `directory`, where they are missing."""
    saved = directory / "huggingface"
    if not (saved / "config.json").exists():
        _save(saved)
    for dtype in ct2_dtypes:
        converted = directory / f"ctranslate2-{dtype}"
        if not (converted / "model.bin").exists():
            _convert(saved, converted, dtype)


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
