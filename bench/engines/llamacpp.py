"""llama.cpp through the low-level functions of llama-cpp-python: a batch of sequences per call.

Flash attention is on and the cache is in float16, as by default. Every sequence has a part of the
cache of its own: in a unified one copies of a prompt would share it, as independent sessions do
not.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import llama_cpp as lib
import numpy as np

from bench.cases import Decode, EngineSpec, Prefill
from bench.engines.base import Engine, token_ids
from bench.samples import Sample, repeat
from bench.weights import file_name

SPARE = 16  # positions of a sequence beyond what it holds
_QUIET = lib.llama_log_callback(lambda *_: None)  # a hundred lines per context otherwise


class LlamaCpp(Engine):
    """One converted model; a context per measurement."""

    def __init__(self, path: Path, n_threads: int, *, repacked: bool) -> None:
        lib.llama_log_set(_QUIET, None)
        params = lib.llama_model_default_params()
        params.use_extra_bufts = repacked
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, f"{path} cannot be loaded"
        self._n_threads = n_threads

    def decode(self, case: Decode) -> list[Sample]:
        with self._context(case.batch, case.context) as context:
            with batch_of(token_ids(case.context)) as prompt:
                context.step(prompt)
            context.copy_first(case.batch)
            with batch_of_sequences(token_ids(case.batch, seed=1), case.context) as batch:
                return repeat(
                    lambda: context.step(batch),
                    case.steps,
                    between=lambda: context.forget(case.batch, case.context),
                )

    def prefill(self, case: Prefill) -> list[Sample]:
        with (
            self._context(1, case.n_tokens) as context,
            batch_of(token_ids(case.n_tokens)) as prompt,
        ):
            return repeat(
                lambda: context.step(prompt), case.steps, between=lambda: context.forget(1, 0)
            )

    def next_id(self, token_ids: Sequence[int]) -> int:
        with self._context(1, len(token_ids)) as context, batch_of(token_ids) as prompt:
            return context.step(prompt)[0]

    @contextmanager
    def _context(self, n_sequences: int, length: int) -> Iterator["Context"]:
        params = lib.llama_context_default_params()
        params.n_ctx = n_sequences * (length + SPARE)
        params.n_seq_max = n_sequences
        params.n_threads = params.n_threads_batch = self._n_threads
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        handle = lib.llama_init_from_model(self._model, params)
        assert handle, "no context"
        try:
            yield Context(handle)
        finally:
            lib.llama_free(handle)


class Context:
    """Sequences 0.. and their cache."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._memory = lib.llama_get_memory(handle)
        vocabulary = lib.llama_model_get_vocab(lib.llama_get_model(handle))
        self._n_vocab = lib.llama_vocab_n_tokens(vocabulary)

    def step(self, batch: lib.llama_batch) -> list[int]:
        """The greedy ids after the tokens of `batch` whose logits it asks for."""
        code = lib.llama_decode(self._handle, batch)
        assert code == 0, f"llama_decode: {code}"
        n = sum(batch.logits[: batch.n_tokens])
        logits = np.ctypeslib.as_array(lib.llama_get_logits(self._handle), (n, self._n_vocab))
        best: list[int] = logits.argmax(axis=1).tolist()
        return best

    def copy_first(self, n_sequences: int) -> None:
        """Make sequences 1.. copies of sequence 0."""
        for i in range(1, n_sequences):
            lib.llama_memory_seq_cp(self._memory, 0, i, -1, -1)

    def forget(self, n_sequences: int, length: int) -> None:
        """Roll all sequences back to their first `length` tokens."""
        for i in range(n_sequences):
            lib.llama_memory_seq_rm(self._memory, i, length, -1)


@contextmanager
def batch_of(token_ids: Sequence[int]) -> Iterator[lib.llama_batch]:
    """A prompt of sequence 0, with the logits of its last token."""
    with _allocated(len(token_ids)) as batch:
        for i, token_id in enumerate(token_ids):
            _put(batch, i, token_id, position=i, sequence=0, has_logits=i == len(token_ids) - 1)
        yield batch


@contextmanager
def batch_of_sequences(token_ids: Sequence[int], position: int) -> Iterator[lib.llama_batch]:
    """One token of each sequence, all with logits."""
    with _allocated(len(token_ids)) as batch:
        for i, token_id in enumerate(token_ids):
            _put(batch, i, token_id, position=position, sequence=i, has_logits=True)
        yield batch


@contextmanager
def _allocated(n_tokens: int) -> Iterator[lib.llama_batch]:
    batch = lib.llama_batch_init(n_tokens, 0, 1)
    batch.n_tokens = n_tokens
    try:
        yield batch
    finally:
        lib.llama_batch_free(batch)


def _put(
    batch: lib.llama_batch, i: int, token_id: int, *, position: int, sequence: int, has_logits: bool
) -> None:
    batch.token[i] = token_id
    batch.pos[i] = position
    batch.n_seq_id[i] = 1
    batch.seq_id[i][0] = sequence
    batch.logits[i] = has_logits


def build(spec: EngineSpec, directory: Path, n_threads: int) -> LlamaCpp:
    # With repacked q8_0 weights it crashes on the machine of the results.
    return LlamaCpp(directory / file_name(spec), n_threads, repacked=spec.dtype != "q8_0")
