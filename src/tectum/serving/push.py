"""Pushing rows, for every door that offers it: whom they may be pushed to, and a push that its caller waits for.

Owns how receivers' addresses are read and which are allowed. Bodies and answers are the doors'; when a request ends is the
ledger's to say.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from contextlib import ExitStack

from tectum.config import Settings
from tectum.delivery.base import Deliveries, split_address, zmq_destination
from tectum.errors import BadRequestError, StartupError
from tectum.lifecycle.events import Milestone
from tectum.pipeline.pipeline import Pipeline
from tectum.types import Destination

#: seconds that the names of all receivers of one call may take
RESOLVING = 5.0


class Receivers:
    """Which receivers rows may be pushed to, and how their addresses are read."""

    def __init__(self, settings: Settings) -> None:
        """Raises StartupError `invalid_settings` for a network that is none."""
        names = [name.strip() for name in settings.receiver_networks.split(",") if name.strip()]
        try:
            self._networks = [ipaddress.ip_network(name, strict=False) for name in names]
        except ValueError as error:
            raise StartupError("invalid_settings", f"receiver_networks: {error}") from None

    async def destination(self, address: str, backend: str = "zmq") -> Destination:
        """The destination behind `host:port`, its name resolved, so that it counts as one whatever it is called (R9).

        Raises BadRequestError `invalid_request` when it cannot be read or resolved, or lies in no allowed network.
        """
        host, port = split_address(address)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port)
        except (OSError, UnicodeError):
            raise BadRequestError("invalid_request", "The receiver's host cannot be resolved") from None
        resolved = str(found[0][4][0])
        known = ipaddress.ip_address(resolved.partition("%")[0])
        if isinstance(known, ipaddress.IPv6Address) and known.ipv4_mapped is not None:  # IPv4 by another name
            known = known.ipv4_mapped
            resolved = str(known)
        if self._networks and not any(known in net for net in self._networks):
            raise BadRequestError("invalid_request", "The receiver lies in none of --receiver-networks")
        return zmq_destination(resolved, port, backend)


class Pushes:
    """Pushes of one pipeline's rows."""

    def __init__(self, pipeline: Pipeline, deliveries: Deliveries, settings: Settings) -> None:
        """Raises StartupError `invalid_settings` for receiver networks that are none."""
        self.receivers = Receivers(settings)
        self._pipeline = pipeline
        self._deliveries = deliveries
        # a request ends within its own bounds, of which the delivery's is the last: what it ended with is the answer
        self._patience = settings.encode_timeout + settings.request_ttl + settings.send_timeout
        self._open = settings.transfer_backend != "none"

    async def documents_to(self, addresses: Sequence[str]) -> list[Destination]:
        """Receivers of one's own at `host:port`, which get whole documents. Raises BadRequestError `invalid_request`."""
        if not self._open:
            raise BadRequestError(
                "invalid_request", "This server pushes no rows: it was started without --transfer-backend"
            )
        try:
            async with asyncio.timeout(RESOLVING):
                return [await self.receivers.destination(address, "documents") for address in dict.fromkeys(addresses)]
        except TimeoutError:
            text = f"The receivers' hosts cannot be resolved within {RESOLVING:g} s"
            raise BadRequestError("invalid_request", text) from None

    async def send(self, req_id: str, destinations: Sequence[Destination], receive_count: int) -> None:
        """Deliver `req_id` to `destinations`, of `receive_count` receivers in all (0: not said); returns when they have it.

        A receiver that was served before and asks again is answered when all are. Raises LifecycleError
        (`request_released` with its reason, `request_not_found`), DeliveryError, or what the encode failed with.
        """
        with ExitStack() as stack:
            receipts = [stack.enter_context(self._deliveries.receipt(req_id, each)) for each in destinations]
            await self._pipeline.register_destinations(req_id, destinations, receive_count)
            ended = asyncio.ensure_future(self._pipeline.wait(req_id, Milestone.ENDED, self._patience))
            served = asyncio.gather(*receipts)
            try:
                await asyncio.wait((served, ended), return_when=asyncio.FIRST_COMPLETED)
                (served if served.done() else ended).result()
            finally:
                for waiting in (served, ended):
                    waiting.cancel()
                await asyncio.gather(served, ended, return_exceptions=True)
