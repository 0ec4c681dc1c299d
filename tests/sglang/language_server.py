"""What SGLang's language-only server does with its encoders, after the published protocol: split, ask, register, receive."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2

from tests.sglang.receiver import Receiver


def data_uri(picture: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(picture).decode()


class LanguageServer:
    """Sends the pictures of one request to the encoders at `urls`. A context manager."""

    def __init__(self, *urls: str, headers: dict[str, str] | None = None) -> None:
        self._urls = urls
        self._http = httpx2.Client(timeout=60, headers=headers, limits=httpx2.Limits(max_connections=200))
        self._threads = ThreadPoolExecutor(200)

    def post(self, path: str, body: Any, url: str | None = None) -> httpx2.Response:
        return self._http.post(f"{url or self._urls[0]}{path}", json=body)

    def post_later(self, path: str, body: Any, url: str | None = None) -> Future[httpx2.Response]:
        return self._threads.submit(self.post, path, body, url)

    def part(
        self, rid: str, items: Sequence[Any], part_idx: int = 0, num_parts: int = 1, **facts: Any
    ) -> dict[str, Any]:
        """The body of one part, as SGLang 0.5.23 writes it."""
        return {
            "encoder_idx": 0,
            "encoder_url": self._urls[0],
            "mm_items": [data_uri(item) if isinstance(item, bytes) else item for item in items],
            "num_parts": num_parts,
            "part_idx": part_idx,
            "req_id": f"{rid}_local_part_{part_idx}",
            "modality": "IMAGE",
            "prefill_host": "127.0.0.1",
            "embedding_port": None,
            "time_stats_json": None,
            **facts,
        }

    def registration(self, rid: str, receiver: Receiver | str, part_idx: int = 0, count: int = 1) -> dict[str, Any]:
        address = receiver if isinstance(receiver, str) else receiver.address
        return {
            "req_id": f"{rid}_local_part_{part_idx}",
            "receive_count": count,
            "receive_url": address,
            "modality": "IMAGE",
        }

    def encode(self, rid: str, items: Sequence[Any], **facts: Any) -> list[Future[httpx2.Response]]:
        """Spread the items evenly over the encoders and ask each for its part."""
        return [
            self.post_later("/encode", self.part(rid, share, index, len(shares), **facts), url)
            for shares in [self.shares(items)]
            for index, (url, share) in enumerate(shares)
        ]

    def register(
        self, rid: str, items: Sequence[Any], receiver: Receiver, count: int = 1
    ) -> list[Future[httpx2.Response]]:
        """Register one rank for every part."""
        return [
            self.post_later("/scheduler_receive_url", self.registration(rid, receiver, index, count), url)
            for index, (url, _) in enumerate(self.shares(items))
        ]

    def shares(self, items: Sequence[Any]) -> list[tuple[str, list[Any]]]:
        base, more = divmod(len(items), len(self._urls))
        shares, start = [], 0
        for index, url in enumerate(self._urls):
            end = start + base + (index < more)
            if end > start:
                shares.append((url, list(items[start:end])))
            start = end
        return shares

    def __enter__(self) -> LanguageServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._threads.shutdown()
        self._http.close()
