"""`/v1/sessions/{id}/append` and `/generate`: steps. The event loop."""

import secrets
from dataclasses import replace

from fastapi import APIRouter, Request, Response

from engine.commands import Append, Generate, ReplyLimit
from engine.reply import Reply
from model.sampling import Sampling
from server.answers import Steps, documented
from server.desk import Route, SessionId, TheService, form_of
from server.errors import blaming
from server.fields import MAX_INT
from server.host import Service
from server.inputs import Report, check_token_ids, report_of, token_ids_of
from server.interventions.plan import check_masks, plan_of
from server.interventions.values import resolve
from server.replies import answer_steps
from server.schemas import AppendBody, GenerateBody, Reporting
from sessions.session import Session

router = APIRouter(prefix="/v1/sessions", tags=["steps"], route_class=Route)

_NOTHING_SAID = GenerateBody()


@router.post("/{session_id}/append", **documented(Steps, streams=True))
async def append(
    service: TheService, request: Request, session_id: SessionId, body: AppendBody
) -> Response:
    """Step tokens that the client gives."""
    engine = service.engine
    report = _report(service, request, body)
    check_token_ids(body, engine.tokenizer)
    plan = await plan_of(body.interventions, service.facts.config)
    engine.admission.free(session_id, past_length=body.past_length)  # before a text costs anything
    with engine.using(session_id):
        command = Append(
            session_id=session_id,
            token_ids=await token_ids_of(body, engine.tokenizer),
            past_length=body.past_length,
            prepend_bos=body.prepend_bos,
            interventions=tuple(one.made() for one in plan),
            capture=report.capture,
            atomic=not report.form.streams,
        )
        n_new = len(command.all_ids)
        with blaming(body.given or "prompt"):
            session = engine.admission.append(command, n_new)
        check_masks(plan, _next(session, n_new))
        interventions = await resolve(service, plan)

    def begin(limit: ReplyLimit | None) -> Reply:
        with blaming(body.given or "prompt"):
            return engine.append(replace(command, interventions=interventions, reply_limit=limit))

    return answer_steps(service, session_id, report.with_edits(plan), begin)


@router.post("/{session_id}/generate", **documented(Steps, streams=True))
async def generate(
    service: TheService,
    request: Request,
    session_id: SessionId,
    body: GenerateBody = _NOTHING_SAID,
) -> Response:
    """Step tokens that the server samples."""
    engine = service.engine
    report = _report(service, request, body)
    with blaming("stop_token_ids"):
        engine.tokenizer.check_ids(body.stop_token_ids)
    plan = await plan_of(body.interventions, service.facts.config)
    command = Generate(
        session_id=session_id,
        past_length=body.past_length,
        max_tokens=body.max_tokens,
        sampling=_sampling(body),
        stop=tuple(body.stop),
        stop_token_ids=frozenset(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        interventions=tuple(one.made() for one in plan),
        capture=report.capture,
        atomic=not report.form.streams,
    )
    with blaming("max_tokens"):
        session, n_new = engine.admission.generate(command)
    check_masks(plan, _next(session, n_new))
    with engine.using(session_id):
        interventions = await resolve(service, plan)

    def begin(limit: ReplyLimit | None) -> Reply:
        with blaming("max_tokens"):
            return engine.generate(replace(command, interventions=interventions, reply_limit=limit))

    return answer_steps(service, session_id, report.with_edits(plan), begin)


def _next(session: Session, n: int) -> range:
    """The positions of its next `n` steps."""
    return range(session.past_length, session.past_length + n)


def _report(service: Service, request: Request, body: Reporting) -> Report:
    return report_of(body, form_of(request, stream=body.stream), service.facts.config)


def _sampling(body: GenerateBody) -> Sampling:
    """The body's choice, with a seed drawn where it gives none."""
    return Sampling(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        seed=secrets.randbelow(MAX_INT) if body.seed is None else body.seed,
        logit_bias=body.logit_bias,
    )
