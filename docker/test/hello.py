"""A client's first steps, checked: `python hello.py URL`. It runs inside of the container too."""

import base64
import json
import sys

import httpx
import numpy as np


def hello(url: str) -> str:
    """Open a session, stream "Hello world" through it; returns the model's fingerprint."""
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        session = client.post("/v1/sessions", json={}).raise_for_status().json()
        body = {"prompt": "Hello world", "points": ["wte", "wpe", "embedding"], "stream": True}
        path = f"/v1/sessions/{session['id']}/append"
        with client.stream("POST", path, json=body) as answer:
            lines = [line for line in answer.raise_for_status().iter_lines() if line]
        assert lines[-1] == "data: [DONE]", lines[-1]
        *records, done = (json.loads(line.removeprefix("data: ")) for line in lines[:-1])
        assert [record["token"]["id"] for record in records] == [15496, 995]
        assert [record["position"] for record in records] == [0, 1]
        assert all(adds_up(record["points"]) for record in records)
        assert done["session"]["past_length"] == 2, done
    return str(session["fingerprint"])


def adds_up(points: dict[str, dict[str, str]]) -> bool:
    """The embedding is bit-equal to the token's row plus the position's."""
    row = {
        name: np.frombuffer(base64.b64decode(tensor["data"]), "<f4")
        for name, tensor in points.items()
    }
    return bool((row["embedding"] == row["wte"] + row["wpe"]).all())


if __name__ == "__main__":
    hello(sys.argv[1])
