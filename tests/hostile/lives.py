"""Situations of a request's life, and of a server's: load, hang-ups, receivers that fail, health. See `cases.py`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import torch

from tectum.delivery import wire
from tests import zoo
from tests.hostile.cases import case
from tests.hostile.servers import GOOD, LIVE, TOKEN, Door, Servers, described, has_mooncake, said, saved, until
from tests.media.test_video import video
from tests.sglang.language_server import LanguageServer
from tests.sglang.receiver import Receiver
from tests.sglang.test_discovery import bootstrap, free_port, listed

CLIP = video(zoo.frames(4, 64, 64), fps=2)
LARGE = saved(zoo.picture(448, 448), "JPEG")
#: a request whose forward takes about a second on a slow core
LONG = [LARGE] * 32


def at_once(door: Door, bodies: list[dict]) -> list[httpx2.Response]:
    """The answers to requests that are sent together, in their order."""
    many = httpx2.Limits(max_connections=len(bodies))
    with (
        httpx2.Client(base_url=door.url, timeout=120, limits=many, trust_env=False) as own,
        ThreadPoolExecutor(len(bodies)) as threads,
    ):
        return list(threads.map(lambda body: own.post("/v1/encode", json=body), bodies))


def state(door: Door, req_id: str) -> str:
    return str(door.http.get(f"/v1/requests/{req_id}").json().get("state", ""))


def reason(door: Door, req_id: str) -> str:
    """Why a request ended; empty while it lives."""
    return str(door.http.get(f"/v1/requests/{req_id}").json().get("reason", ""))


def nothing_held(door: Door, seconds: float = 20.0) -> bool:
    names = ("live_requests", "staged_bytes", "queued_patches", "body_bytes")
    return until(lambda: not any(door.gauges()[f"encoder_{name}"] for name in names), seconds)


@contextlib.contextmanager
def begun(door: Door, body: dict, small_buffer: bool = False) -> Iterator[socket.socket]:
    """A request that was sent and whose answer is not read; leaving the block hangs up."""
    sent = json.dumps(body).encode()
    with socket.socket() as connection:
        if small_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(door.address)
        head = f"POST /v1/encode HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n\r\n"
        connection.sendall(head.encode() + sent)
        yield connection


@case(
    "L1", "200 requests at once (sglang #23082)", "each is answered or 503 with Retry-After, a send in their midst too"
)
def _(servers: Servers) -> str:
    door = servers.sending
    with LanguageServer(door.url) as asking, Receiver() as receiver, ThreadPoolExecutor(1) as thread:
        encoded = asking.encode("L1", [GOOD])
        until(lambda: state(door, "L1_local_part_0") == "staged")
        burst = thread.submit(at_once, door, [described(LARGE, LARGE) for _ in range(200)])
        until(lambda: door.gauges()["encoder_live_requests"] > 2)
        answer = asking.post("/send", send_to(receiver, "L1"))
        in_time = not burst.done() and answer.status_code == 200 and receiver.message()[1] is not None
        until(lambda: burst.done() or door.gauges()["encoder_live_requests"] > LIVE, 120)
        if not burst.done():
            return f"more than {LIVE} live requests, or no end of them"
        answers = burst.result()
        encoded[0].result(30)
    refused = [each for each in answers if each.status_code == 503]
    served = [each for each in answers if each.status_code == 200]
    if len(refused) + len(served) != 200 or not served or not all(each.headers.get("retry-after") for each in refused):
        return f"{len(served)} served, {len(refused)} refused: {[said(each) for each in answers][:3]}"
    if not nothing_held(door):
        return "something is held"
    late = "too" if in_time else f"late: {said(answer)}"
    return f"each is answered or 503 with Retry-After, a send in their midst {late}"


def send_to(receiver: Receiver, rid: str) -> dict:
    return {"req_id": f"{rid}_local_part_0", "prefill_host": "127.0.0.1", "embedding_port": receiver.port}


@case(
    "L2",
    "one more than may live, pictures and clips mixed; one id twice (sglang #37280)",
    "one 503 overloaded, 409 request_conflict, the first one's rows",
)
def _(servers: Servers) -> str:
    door = servers.sending
    media = [(CLIP, "video") if number % 2 else (GOOD, "image") for number in range(LIVE + 1)]
    bodies = [
        described(data, kind=kind, req_id=f"L2-{number}", delivery={"mode": "hold"})
        for number, (data, kind) in enumerate(media)
    ]
    answers = at_once(door, bodies)
    refused = [said(answer) for answer in answers if answer.status_code != 200]
    held = [number for number, answer in enumerate(answers) if answer.status_code == 200]
    first = next(number for number in held if media[number][1] == "image")
    second = door.encode(LARGE, req_id=f"L2-{first}", delivery={"mode": "hold"})
    rows = door.http.get(f"/v1/requests/L2-{first}/embedding")
    same = rows.status_code == 200 and torch.equal(wire.unpack(rows.content).rows, servers.plain.rows(GOOD).rows)
    for number in held:
        door.http.delete(f"/v1/requests/L2-{number}")
    if not nothing_held(door):
        return "something is held"
    words = "one 503 overloaded" if refused == ["503 overloaded"] else str(refused)
    return f"{words}, {said(second)}, the first one's {'rows' if same else 'no rows: ' + said(rows)}"


@case(
    "L4",
    "a caller hangs up while its media is fetched, while it waits, in its forward, while it is sent (sglang #37025)",
    "accepted, encoding, prepared, staged: all noticed, nothing is held",
)
def _(servers: Servers) -> str:
    door = servers.fetching
    with begun(door, described(*LONG, *LONG, req_id="L4-sent"), small_buffer=True):
        until(lambda: state(door, "L4-sent") == "staged", 60)
        left = {"L4-sent": state(door, "L4-sent")}
    with begun(door, described(f"{slow_url(servers)}?L4", req_id="L4-fetching")):
        until(lambda: "/never.png?L4" in servers.site.asked)
        left["L4-fetching"] = state(door, "L4-fetching")
    with contextlib.ExitStack() as stack:
        # which of them is encoded first is the machine's choice
        names = [f"L4-{number}" for number in range(5)]
        for name in names:
            stack.enter_context(begun(door, described(*LONG, req_id=name)))
        seen: dict[str, str] = {}

        def both() -> bool:
            seen.update({name: state(door, name) for name in names})
            return {"prepared", "encoding"} <= {*seen.values()}

        until(both, 30)
    left |= {name: known for name, known in seen.items() if known in ("prepared", "encoding")}
    noticed = until(lambda: all(reason(door, name) == "client_abort" for name in left))
    empty = nothing_held(door, 60)
    words = ", ".join(sorted({*left.values()}))
    return f"{words}: all {'noticed' if noticed else 'missed'}, {'nothing' if empty else 'something'} is held"


def slow_url(servers: Servers) -> str:
    """A picture that never comes: the fetch would last until its deadline."""
    import asyncio

    async def never(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    servers.site.answers["/never.png"] = never
    return servers.site.url("/never.png")


@case(
    "L5", "two receivers, and the first registers again (sglang #36971)", "a copy each, no second one, nothing is held"
)
def _(servers: Servers) -> str:
    door = servers.sending
    with LanguageServer(door.url) as asking, Receiver() as one, Receiver() as two:
        encoded = asking.encode("L5", [GOOD])
        until(lambda: state(door, "L5_local_part_0") == "staged")
        asking.post_later("/scheduler_receive_url", asking.registration("L5", one, count=2))
        copies = [one.message()[1]]
        # it is known to be there before the second comes: otherwise that one might end the request first
        again = asking.post("/scheduler_receive_url", asking.registration("L5", one, count=2)).status_code
        asking.post_later("/scheduler_receive_url", asking.registration("L5", two, count=2))
        copies.append(two.message()[1])
        meant = servers.plain.rows(GOOD).rows
        right = all(copy is not None and torch.equal(copy, meant) for copy in copies)
        statuses = [again, encoded[0].result(30).status_code]
        empty = nothing_held(door)  # whatever was on its way has arrived
        once = one.is_silent() and two.is_silent()
    if not right or statuses != [200, 200]:
        return f"statuses {statuses}, right copies: {right}"
    return f"a copy each, {'no' if once else 'and a'} second one, {'nothing' if empty else 'something'} is held"


@case("L6", "a receiver closed its socket (sglang #37001)", "504 send_timeout, nothing is held")
def _(servers: Servers) -> str:
    door = servers.sending
    with Receiver() as gone:
        port = gone.port
    with LanguageServer(door.url) as asking:
        (encoded,) = asking.encode("L6", [GOOD], embedding_port=port)
        answer = encoded.result(20)
    return (
        f"{answer.status_code} {answer.json().get('code')}, {'nothing' if nothing_held(door) else 'something'} is held"
    )


@case("L8", "a receiver accepts connections and never answers (sglang #36965)", "504 send_timeout, others in between")
def _(servers: Servers) -> str:
    door = servers.sending
    with socket.create_server(("127.0.0.1", 0)) as silent, LanguageServer(door.url) as asking:
        (encoded,) = asking.encode("L8", [GOOD], embedding_port=silent.getsockname()[1])
        until(lambda: state(door, "L8_local_part_0") == "staged")  # and on its way
        between = 0
        while not encoded.done():
            if said(door.encode(GOOD)) != "200":
                return "another was not served"
            between += not encoded.done()
        answer = encoded.result()
    # one that had to wait for the delivery would have come after it
    others = "others in between" if between >= 3 else f"{between} others in between"
    return f"{answer.status_code} {answer.json().get('code')}, {others}"


@case(
    "L9",
    "equal ids at once, other and equal content (sglang #19035)",
    "200 and 409 with its own rows, 200 and 200 with one forward",
)
def _(servers: Servers) -> str:
    door = servers.plain
    pictures = [saved(zoo.picture(448, 448, seed)) for seed in (1, 2)]
    meant = [door.rows(picture).rows for picture in pictures]
    held = {"delivery": {"mode": "hold"}}  # so that they meet, however far apart they are begun
    found = at_once(door, [described(picture, req_id="L9-other", **held) for picture in pictures])
    statuses = sorted(answer.status_code for answer in found)
    served = next(number for number, answer in enumerate(found) if answer.status_code == 200)
    own = has_rows(door.http.get("/v1/requests/L9-other/embedding"), meant[served])
    forwards = door.gauges()[FORWARDS]
    equal = {"req_id": "L9-equal", **held}
    joined = at_once(door, [described(pictures[0], **equal), described(pictures[0], **equal)])
    joined_once = door.gauges()[FORWARDS] == forwards + 1
    same = has_rows(door.http.get("/v1/requests/L9-equal/embedding"), meant[0])
    words = f"{statuses[0]} and {statuses[1]} with {'its own' if own else 'other'} rows"
    both = " and ".join(said(answer) for answer in joined)
    return f"{words}, {both} with {'one forward' if same and joined_once else 'other rows, or two forwards'}"


FORWARDS = 'encoder_batch_requests_count{modality="image"}'


def has_rows(answer: httpx2.Response, meant: torch.Tensor) -> bool:
    return answer.status_code == 200 and torch.equal(wire.unpack(answer.content).rows, meant)


@case("L10", "pulls from the moment an id was announced (vllm #42998)", "409 embedding_not_ready, then all rows")
def _(servers: Servers) -> str:
    door = servers.plain
    meant = door.rows(*LONG).rows
    seen: list[httpx2.Response] = []
    with begun(door, described(*LONG, req_id="L10", delivery={"mode": "hold"})):
        until(lambda: state(door, "L10") != "")
        pulled = until(lambda: seen.append(door.http.get("/v1/requests/L10/embedding")) or seen[-1].is_success, 60)
    *early, answer = seen
    whole = pulled and torch.equal(wire.unpack(answer.content).rows, meant)
    return f"{', '.join(sorted({said(each) for each in early}))}, then {'all rows' if whole else said(answer)}"


@case(
    "L14",
    "memory for rows is full; the process is killed and started again on the same socket (vllm #44049)",
    "4 held, 503 overloaded naming staged bytes, then 200, no process left",
)
def _(servers: Servers) -> str:
    path = servers.folder / "again.sock"
    room = 4 * servers.plain.rows(LARGE).rows.nbytes
    flags = ("--max-staged-bytes", str(room), "--local-socket", str(path))
    with servers.one(*flags) as door:
        for number in range(8):
            answer = door.encode(LARGE, req_id=f"L14-{number}", delivery={"mode": "hold"})
            if answer.status_code != 200:
                break
        named = "staged bytes" if f"{room} staged bytes" in answer.text else answer.text
        words = f"{number} held, {said(answer)} naming {named}"
        pids = door.pids()
        os.kill(door.process.pid, signal.SIGKILL)
        left = not until(lambda: not any(runs(pid) for pid in pids))
    with servers.one(*flags) as door:
        again = said(door.encode(LARGE, delivery={"mode": "hold"}))
    return f"{words}, then {again}, {'a' if left else 'no'} process left"


def runs(pid: int) -> bool:
    """Whether a process is there, and is no zombie that waits for its parent."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


if has_mooncake():

    @case(
        "L7",
        "a late part of an old id, on a port that is another's now, and a frame of garbage (sglang #37020)",
        "the right rows, 2 dropped",
    )
    def _(servers: Servers) -> str:
        import numpy
        import zmq
        from mooncake.engine import TransferEngine

        from tectum.engines.receiver import MooncakeReceiver, Part

        door = servers.mooncake
        old_rows = servers.plain.rows(LARGE).rows
        with LanguageServer(door.url) as asking, MooncakeReceiver() as receiver, zmq.Context() as context:
            old_engine, old_memory = TransferEngine(), numpy.zeros(old_rows.numel() * 4, numpy.uint8)
            old_engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
            old_engine.register_memory(old_memory.ctypes.data, old_memory.nbytes)
            old = asking.encode("L7-old", [LARGE])
            target = {"prefill_host": "127.0.0.1", "embedding_port": receiver.port, "req_id": "L7-old_local_part_0"}
            where = {
                "session_id": f"127.0.0.1:{old_engine.get_rpc_port()}",
                "buffer_address": int(old_memory.ctypes.data),
            }
            until(lambda: state(door, "L7-old_local_part_0") == "staged")
            answers = [asking.post("/send", {**target, **where}), old[0].result(20)]
            with context.socket(zmq.PUSH) as stranger:
                stranger.connect(f"tcp://127.0.0.1:{receiver.port}")
                stranger.send(b"garbage")
                new = asking.encode("L7", [GOOD])
                until(lambda: state(door, "L7_local_part_0") == "staged")
                found = receiver.receive([Part(door.url, "L7_local_part_0")])
                answers.append(new[0].result(20))
        if {answer.status_code for answer in answers} != {200}:
            return str([answer.text[:80] for answer in answers])
        same = torch.equal(torch.from_numpy(found.array()), servers.plain.rows(GOOD).rows)
        return f"the {'right' if same else 'wrong'} rows, {receiver.strays} dropped"


# --- health, discovery ---


@case(
    "H1",
    "work for longer than the stall timeout; then an encoder that is stopped with work pending (sglang #6624)",
    "healthy all along; 503 encoder_stalled in time, 503 worker_lost, then 200",
)
def _(servers: Servers) -> str:
    bound = 5.0  # unhealthy at three quarters of it
    with servers.one("--stall-timeout", f"{bound:g}") as door, ThreadPoolExecutor(2) as threads:
        until_then = time.monotonic() + 1.3 * bound
        working = threads.submit(keep_busy, door, until_then)
        probes = set()
        while not working.done():
            probes.add(said(door.http.get("/health/progress")))
        if working.result() != {200} or probes != {"200"}:
            return f"work {working.result()}, health {probes}"
        for pid in door.pids()[1:]:
            os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        pending = threads.submit(door.encode, GOOD)
        unhealthy = until(lambda: door.http.get("/health/progress").status_code == 503, 2 * bound)
        taken, verdict = time.monotonic() - started, said(door.http.get("/health/progress"))
        lost = said(pending.result(60))
        served = until(lambda: said(door.encode(GOOD)) == "200", 60)
    in_time = "in time" if unhealthy and taken < bound else f"after {taken:.1f} s"
    return f"healthy all along; {verdict} {in_time}, {lost}, then {'200' if served else 'nothing'}"


def keep_busy(door: Door, until_then: float) -> set[int]:
    """Requests one after another; the statuses of their answers."""
    body, found = described(*LONG[:4]), set()
    with httpx2.Client(base_url=door.url, timeout=60, trust_env=False) as own:
        while time.monotonic() < until_then:
            found.add(own.post("/v1/encode", json=body).status_code)
    return found


@case(
    "H2", "a long encode runs; /send for rows that are ready (sglang #26576)", "sent while the other is in its forward"
)
def _(servers: Servers) -> str:
    door = servers.sending
    with LanguageServer(door.url) as asking, Receiver() as receiver:
        encoded = asking.encode("H2", [GOOD])
        until(lambda: state(door, "H2_local_part_0") == "staged")
        with begun(door, described(*LONG, *LONG, req_id="H2-long")):
            until(lambda: state(door, "H2-long") == "encoding", 30)
            answer = asking.post("/send", send_to(receiver, "H2"))
            other = state(door, "H2-long")
            came = receiver.message()[1] is not None
        encoded[0].result(30)
    if answer.status_code != 200 or not came or other != "encoding":
        return f"{said(answer)}, the other is {other}"
    return "sent while the other is in its forward"


@case("H3", "IPv6: bound to ::, called by [::1] and by 127.0.0.1 (sglang #21493)", "200 and 200")
def _(servers: Servers) -> str:
    flags = ("--host", "::", "--token-file", str(servers.folder / "token"))
    with servers.one(*flags) as door:
        port = door.address[1]
        answers = [
            httpx2.post(
                f"http://{host}:{port}/v1/encode",
                json=described(GOOD),
                headers={"authorization": f"Bearer {TOKEN}"},
                trust_env=False,
            )
            for host in ("[::1]", "127.0.0.1")
        ]
    return " and ".join(said(answer) for answer in answers)


@case(
    "H4",
    "the bootstrap server is restarted; a registration without its token (sglang 0.5.23)",
    "listed, listed again, 401",
)
def _(servers: Servers) -> str:
    port, token = free_port(), servers.folder / "token"
    auth = {"authorization": f"Bearer {TOKEN}"}
    flags = ("--encoder-register-urls", f"http://127.0.0.1:{port}", "--encoder-register-token-file", str(token))
    words = []
    with servers.one("--transfer-backend", "zmq_to_scheduler", *flags, "--register-interval", "0.5") as door:
        for again in ("listed", "listed again"):
            with bootstrap(port, "--token-file", str(token)) as url:
                found = until(lambda url=url: listed(url, headers=auth) == [door.url], 20)
                words.append(again if found else "not listed")
                unsigned = httpx2.post(f"{url}/register_encoder_url", json={"url": "http://127.0.0.1:1"})
    return ", ".join([*words, str(unsigned.status_code)])


@case("H5", "a transfer backend that there is none of (sglang #16552)", "refused at start-up, naming those there are")
def _(servers: Servers) -> str:
    command = [sys.executable, "-m", "tectum", "serve", str(servers.tiny), "--transfer-backend", "pigeon"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    named = "transfer_backend" in ended.stderr.replace("-", "_") and "zmq_to_scheduler" in ended.stderr
    return "refused at start-up, naming those there are" if ended.returncode and named else ended.stderr[:150]


@case("H8", "the encoder is used (Dynamo #13966)", "one more request, one more forward, 4 more rows")
def _(servers: Servers) -> str:
    def counts() -> list[int]:
        now = servers.plain.gauges()
        names = ("requests_received_total", "batch_requests_count", "rows_total")
        return [int(now.get(f'encoder_{name}{{modality="image"}}', 0)) for name in names]

    nothing_held(servers.plain)  # what came before is counted
    before = counts()
    rows = len(servers.plain.rows(GOOD).rows)
    until(lambda: counts()[-1] != before[-1])  # rows are counted last, when the answer has gone
    grown = [now - then for now, then in zip(counts(), before, strict=True)]
    return f"one more request, one more forward, {rows} more rows" if grown == [1, 1, rows] else str(grown)
