"""The prompts of one capture: all of them are read before the first is stepped. Any thread."""

from collections.abc import Iterator, Sequence

from embedding.errors import EmbeddingError
from embedding.positions import positions_for
from embedding.tokenizer import END_OF_TEXT, Tokenizer
from engine.errors import EditOutOfReach
from engine.studies.bulk import Prompt
from server.errors import EmptyInput, InvalidRequest, blaming
from server.interventions.plan import FIELD, Planned
from server.studies.bodies import CaptureBody


def prompts_of(body: CaptureBody, tokenizer: Tokenizer, n_ctx: int) -> list[Prompt]:
    """The prompts that a body gives, and their positions.

    Raises:
        Blamed: one of them, which is named by its index, is empty, is too long, holds what is no
            token, or does not have a position that is asked for.
    """
    prompts = []
    for index, token_ids in enumerate(_token_ids(body, tokenizer)):
        place = f"[{index}]"
        with blaming(body.given, (EmbeddingError, EmptyInput), place=place):
            if not token_ids:
                raise EmptyInput("it is empty")
            token_ids = (END_OF_TEXT,) * body.prepend_bos + token_ids
            positions_for(0, len(token_ids), n_ctx)
        with blaming("positions", InvalidRequest, place=f" of {body.given}{place}"):
            prompts.append(Prompt(token_ids=token_ids, positions=_positions(body, len(token_ids))))
    return prompts


def _token_ids(body: CaptureBody, tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    for index, token_ids in enumerate(body.token_ids or ()):
        with blaming("token_ids", place=f"[{index}]"):
            tokenizer.check_ids(token_ids)
        yield tuple(token_ids)
    for index, text in enumerate(body.prompts or ()):
        with blaming("prompts", place=f"[{index}]"):
            token_ids = tokenizer.encode(text, allow_special=body.allow_special)
        yield tuple(token_ids)


def _positions(body: CaptureBody, n_tokens: int) -> tuple[int, ...]:
    if body.positions == "all":
        return tuple(range(n_tokens))
    if body.positions == "last":
        return (n_tokens - 1,)
    positions = tuple(sorted(set(body.positions)))
    if positions[-1] >= n_tokens:
        raise InvalidRequest(f"there is no position {positions[-1]} in {n_tokens} tokens")
    return positions


def check_reach(plan: Sequence[Planned], prompts: Sequence[Prompt]) -> None:
    """See that every prompt has the positions that are to be edited.

    Raises:
        Blamed: one is shorter.
    """
    shortest = min(len(prompt.token_ids) for prompt in prompts)
    for one in plan:
        for first, stop in one.spans or ():
            last = first if stop is None else stop - 1
            if last >= shortest:
                with blaming(FIELD, EditOutOfReach, place=one.place):
                    raise EditOutOfReach(position=last, past_length=0, n_new=shortest)
