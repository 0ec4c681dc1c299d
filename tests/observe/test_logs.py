"""Log lines, in both forms, from a real pipeline and a real server."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re

import httpx2
import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from tectum.demo.encoder_process import EncoderProcess
from tectum.errors import BadRequestError, UnavailableError
from tectum.observe import logs
from tests.pipeline.harness import inline, request, scenario
from tests.serving.test_native import jpeg


@pytest.fixture
def lines(capsys):
    """`lines(form)` has everything logged in that form from now on; the call that it returns gives the lines so far."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level, logging.getLogger("tectum").level)

    def configured(form, level="info"):
        logs.configure(level, form)
        return lambda: capsys.readouterr().err.splitlines()

    yield configured
    root.handlers[:], level, own = before
    root.setLevel(level)
    logging.getLogger("tectum").setLevel(own)


def walks():
    """One request that is delivered, one whose picture is broken."""

    async def test(pipeline, work):
        pipeline._observers = (logs.RequestLog(),)
        await inline(pipeline, request("good"))
        gate = work.gate("prepare", "bad")
        gate.outcome = BadRequestError("media_decode_failed", "The JPEG picture is truncated", item=0)
        gate.open.set()
        await asyncio.gather(inline(pipeline, request("bad")), return_exceptions=True)

    scenario(test)


def test_one_json_line_a_request(lines):
    written = lines("json")
    walks()
    good, bad = (json.loads(line) for line in written())
    assert (good["req_id"], good["reason"], good["status"], good["rows"]) == ("good", "delivered", "ok", 4)
    assert (good["level"], good["logger"], good["message"]) == ("info", "tectum.request", "request ended")
    assert good["forward_ms"] >= 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", good["time"])
    assert (bad["req_id"], bad["status"], bad["code"]) == ("bad", 400, "media_decode_failed")


def test_one_text_line_a_request(lines):
    written = lines("text")
    walks()
    good, bad = written()
    assert re.search(r" INFO tectum.request request ended req_id=good modality=image reason=delivered status=ok ", good)
    assert " req_id=bad " in bad
    assert " code=media_decode_failed" in bad


def test_an_exception_stays_on_one_json_line(lines):
    written = lines("json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("tectum.x").exception("it broke")
    (line,) = written()
    assert json.loads(line)["exception"].endswith("ValueError: two lines")


def test_nothing_is_written_below_the_level(lines):
    written = lines("json", "warning")
    walks()
    assert written() == []


def test_a_line_while_a_bar_is_drawn_stands_on_a_line_of_its_own(lines):
    written = lines("text")
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60)
    with Progress(TextColumn("{task.description}"), console=console, auto_refresh=False) as bar:
        bar.add_task("reading weights")
        bar.refresh()
        with logs.above_the_bar():
            logging.getLogger("tectum.workers").info("lane 0 is up")
    logging.getLogger("tectum.workers").info("afterwards")
    assert [line.split(" ", 2)[2] for line in written()] == ["INFO tectum.workers afterwards"]
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).replace("\r", "\n").splitlines()
    assert re.fullmatch(r"[-0-9]+ [:,0-9]+ INFO tectum.workers lane 0 is up *", next(x for x in drawn if "lane" in x))


def test_a_server_logs_json_with_the_callers_id(tiny):
    with EncoderProcess(tiny, "--forward-threads", "1", "--log-format", "json") as server:
        form = {"request": '{"items":[{"type":"image","file":"f"}],"req_id":"mine"}'}
        answer = httpx2.post(f"{server.url}/v1/encode", data=form, files={"f": jpeg()})
        assert answer.status_code == 200
        server.stop()
        written = [json.loads(line) for line in server.lines]  # a collector that expects JSON gets nothing else
    said = [line["message"].split(" ")[0] for line in written if line["logger"] == "tectum.server"]
    assert said == ["loading", "loaded", "ready", "draining:", "drained"]
    (line,) = (line for line in written if line["message"] == "request ended")
    assert (line["req_id"], line["status"], line["rows"]) == ("mine", "ok", 64)


def test_a_drain_writes_no_line_for_each_caller_that_it_refuses(lines):
    """Ten callers that come too late leave none at info, and one each for whoever looks for them; others are told as ever."""

    async def late(pipeline, work):
        pipeline._observers = (logs.RequestLog(),)
        await pipeline.drain(1)
        told = await asyncio.gather(
            *(inline(pipeline, request(f"late-{i}")) for i in range(10)), return_exceptions=True
        )
        assert {error.code for error in told} == {"shutting_down"}

    for level, count in (("info", 0), ("debug", 10)):
        written = lines("text", level)
        scenario(late)
        assert len([line for line in written() if "request refused" in line]) == count
    written = lines("text")
    logs.RequestLog().refused(UnavailableError("overloaded", "The encoder is full: 1 live requests (limit 1)"))
    assert " INFO tectum.request request refused status=503 code=overloaded" in written()[0]
