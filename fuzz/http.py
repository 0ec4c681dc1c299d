"""The door without a socket and without a model: the real connection, guard, bodies and problems around one small route."""

from __future__ import annotations

import asyncio
import functools
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse
from uvicorn.server import ServerState

from fuzz.targets import SETTINGS
from tectum.serving import problems
from tectum.serving.bodies import read_encode_request
from tectum.serving.connection import Connection, ConnectionLimits
from tectum.serving.guard import BodyBudget, Guard

BUDGET = BodyBudget(1 << 20, lambda error: None)


@functools.cache
def config() -> uvicorn.Config:
    app = FastAPI(docs_url=None, redoc_url=None)
    problems.install(app)

    @app.post("/v1/encode")
    async def encode(request: Request) -> JSONResponse:
        read = await read_encode_request(request, SETTINGS)
        return JSONResponse({"items": len(read.items)})

    @app.get("/requests/{req_id}")
    async def status(req_id: str) -> JSONResponse:
        return JSONResponse({"length": len(req_id)})

    app.add_middleware(Guard, settings=SETTINGS, tokens=None, budget=BUDGET, hung_up=lambda: None)
    made = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", proxy_headers=False)
    made.load()
    return made


class Recorder(asyncio.Transport):
    """A transport whose peer reads everything at once."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.closed = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is ever buffered here."""

    def write(self, data: Any) -> None:
        if not self.closed:
            self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def exchange(sent: bytes, step: int) -> bytes:
    """What is answered to these bytes, which come in pieces, until the peer hangs up. Raises what a task raised."""
    limits = ConnectionLimits(max_connections=8, max_head_bytes=4096, head_timeout=5.0, stall_timeout=5.0)
    state, transport = ServerState(), Recorder()
    connection = Connection(
        config=config(), server_state=state, app_state={}, limits=limits, refused=lambda error: None
    )
    connection.connection_made(cast(asyncio.Transport, transport))
    size = max(step * step, 1)
    for at in range(0, len(sent), size):
        if transport.closed:
            break
        connection.data_received(sent[at : at + size])
        await asyncio.sleep(0)
    for _ in range(8):
        await asyncio.sleep(0)
    transport.closed = True
    connection.connection_lost(None)
    if state.tasks:
        await asyncio.wait_for(asyncio.gather(*state.tasks), 5)
    assert BUDGET.held == 0, "a body was not given back"
    return transport.written
