"""What the probes say while the model loads, is stuck, or cannot be loaded."""

import asyncio

import httpx
import pytest

from server.app import create_app
from server.errors import Loading
from server.host import Host
from server.loading import Loaded, LoadingProgress, load
from server.settings import Settings
from tests.server.gating import gated
from tests.server.hand import until
from tests.server.serving import until_loaded


def test_k07_a_stuck_model_thread_is_not_ready_but_alive() -> None:
    async def main() -> None:
        async with gated(stall_seconds=0.5) as (server, model):
            session_id = await server.open(token_ids=[1])
            model.close()
            stuck = asyncio.create_task(
                server.post(f"/v1/sessions/{session_id}/append", token_ids=[2])
            )
            await until(lambda: server.service.engine.heartbeat_age() > 0.6)
            told = await server.client.get("/ready")
            assert (told.status_code, told.json()["error"]["code"]) == (503, "stalled")
            assert (await server.client.get("/health")).status_code == 200
            model.open()
            assert (await stuck).status_code == 200
            assert (await server.client.get("/ready")).status_code == 200

    asyncio.run(main())


def test_k07_while_loading_only_the_probes_answer() -> None:
    async def main() -> None:
        may_load = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(settings: Settings, progress: LoadingProgress) -> Loaded:
            progress("reading", 0.5)
            asyncio.run_coroutine_threadsafe(may_load.wait(), loop).result()
            return load(settings, progress)

        settings = Settings(model="random:tiny", threads=1, kv_budget=2**26)
        host = Host(settings, loader=slow)
        app = create_app(settings, host)
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/metrics")).status_code == 200
            for verb, path in (("GET", "/ready"), ("GET", "/v1/models"), ("POST", "/v1/sessions")):
                answer = await client.request(verb, path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
                assert answer.headers["retry-after"]
            may_load.set()
            await until_loaded(host)
            assert (await client.get("/ready")).status_code == 200

    asyncio.run(main())


def test_a_service_that_cannot_begin_is_a_failed_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the server would say "loading" for ever."""

    def broken(**_parts: object) -> None:
        raise RuntimeError("no engine")

    async def main() -> None:
        monkeypatch.setattr("server.host.Engine", broken)
        host = Host(Settings(model="random:tiny", threads=1, kv_budget=2**26))
        host.start()
        await until(lambda: host.failure is not None)

    asyncio.run(main())


def test_a_failed_load_is_kept_for_the_server_to_see() -> None:
    async def main() -> None:
        host = Host(Settings(model="random:nothing"))
        host.start()
        await until(lambda: host.failure is not None)
        with pytest.raises(Loading):
            host.check_ready()

    asyncio.run(main())
