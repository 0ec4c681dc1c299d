"""An OpenAI-like engine for the gateway's tests: it records what it was sent, and answers as a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn


class Engine:
    """seen: (method, path, headers, body) of each request. left: how many callers hung up before their answer."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.left = threading.Semaphore(0)
        self.began = threading.Semaphore(0)
        self.status = 200
        self.silent = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        query = scope["query_string"].decode()
        self.seen.append((scope["method"], scope["path"] + (f"?{query}" if query else ""), headers, body))
        self.began.release()
        if self.silent:
            await receive()
            self.left.release()
            return
        if body and b'"stream":true' in body.replace(b" ", b""):
            await self._stream(send)
            return
        answer = json.dumps({"id": "1", "echo": len(body)}).encode()
        head = [(b"content-type", b"application/json"), (b"x-engine", b"yes")]
        await send({"type": "http.response.start", "status": self.status, "headers": head})
        await send({"type": "http.response.body", "body": answer})

    async def _stream(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for number in range(3):
            await send({"type": "http.response.body", "body": b"data: %d\n\n" % number, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def chat(self) -> dict[str, Any]:
        """The body of the last chat request."""
        return dict(json.loads(self.seen[-1][3]))


@contextlib.contextmanager
def running(app: Any, **tls: Any) -> Iterator[str]:
    """`app` on a free loopback port, in a thread; its URL inside the block. tls: uvicorn's settings that begin with ssl_."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1, **tls))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield f"http{'s' * bool(tls)}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
