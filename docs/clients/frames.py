"""Reads a stream of safetensors frames. Needs numpy and safetensors."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from safetensors.numpy import load


def frames(chunks: Iterable[bytes]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each record with its tensors, the last one too. Raises what the server's error says."""
    rest, record = bytearray(), dict[str, Any]()
    for chunk in chunks:
        rest += chunk
        while len(rest) >= 8 and len(rest) >= (end := 8 + int.from_bytes(rest[:8], "little")):
            blob = bytes(rest[8:end])
            header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
            record = json.loads(header["__metadata__"]["record"])
            if "error" in record:
                raise RuntimeError(record["error"]["message"], record)
            yield record, load(blob)
            del rest[:end]
    if rest or record.get("object") != "done":
        raise EOFError("the stream ended too early")
