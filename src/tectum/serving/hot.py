"""The doors that carry the load, reached past the framework's router.

Owns the way to a few endpoints of plain requests, and no answer of its own. FastAPI has the same endpoints: it documents
them, and every other method and path is its own. But its router, its solver of dependencies and its exit stacks take a
tenth of all that the service does for a small picture, and these endpoints use none of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from tectum.errors import TectumError

#: reads a request, and gives its response, which may be worked out while it is sent
Endpoint = Callable[[Request], Awaitable[Response]]
#: from a path, an error, and the request's id where it is known, to the answer
Refuse = Callable[[str, TectumError, str | None], Response]


def endpoints(routes: Iterable[BaseRoute], paths: frozenset[str]) -> dict[tuple[str, str], Endpoint]:
    """Method and path → endpoint, of those routes that lead to `paths`. Their endpoints take the request alone."""
    found = [route for route in routes if isinstance(route, APIRoute) and route.path in paths]
    return {(method, route.path): route.endpoint for route in found for method in route.methods or ()}


class HotDoors:
    """Middleware that serves `doors` itself and leaves the rest to `app`.

    refused: hears of each request that its door could not read; whoever answers hears of the others. refuse: makes the answer
    to what a door raises.
    """

    def __init__(
        self,
        app: ASGIApp,
        doors: Mapping[tuple[str, str], Endpoint],
        refused: Callable[[TectumError], None],
        refuse: Refuse,
    ) -> None:
        self.app = app
        self._doors = doors
        self._refused = refused
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._doors.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is None:
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        response = None
        try:
            response = await endpoint(request)
            await response(scope, receive, send)
        except TectumError as error:
            if response is None:
                self._refused(error)
            refusal = self._refuse(scope["path"], error, getattr(request.state, "req_id", None))
            await refusal(scope, receive, send)
