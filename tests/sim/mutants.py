"""Planted bugs: each one line of the core, changed in a copy in memory. The simulator must catch every one.

Data first: name, the rule it breaks, the file, the line as it stands and as it is planted.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import tectum.lifecycle.ledger as ledger_module
import tectum.lifecycle.machine as machine_module
from tests.sim.pure import run_seed


class Mutant(NamedTuple):
    name: str
    rule: str
    file: str  # "machine" or "ledger"
    old: str
    new: str


MUTANTS = [
    Mutant("skip the drain", "R1", "machine", "    if not request.used:\n", "    if True:\n"),
    Mutant("sends do not count as use", "R1", "machine", "return self.stage_open or bool(self.active_sends)", "return self.stage_open"),
    Mutant("the last reason wins", "R2", "ledger", "Tombstone(effect.reason, now, error, effect.life)", "Tombstone(Reason.EXPIRED, now, error, effect.life)"),
    Mutant("free again on a second release", "R2", "machine", "        ReleaseAsked: Move(S.DRAINING, _ignore),", "        ReleaseAsked: Move(S.DRAINING, _end_again),"),
    Mutant("a pull before staging is admitted", "R3", "machine", "        SendStarted: Move(S.ENCODING, _refuse_not_ready),", "        SendStarted: Move(S.ENCODING, _begin_send),"),
    Mutant("no reason in the refusal", "R3", "ledger", 'reason=str(stone.reason), age_s=round(age, 3))', 'age_s=round(age, 3))'),
    Mutant("rows of a released request are sent", "R4", "machine", "        Encoded: Move(None, _end_stage),", "        Encoded: Move(None, _stage),"),
    Mutant("a released stage never frees", "R4", "machine", '"""The last stage of a released request ended: what it made is dropped (R4)."""\n    _close_stage(request)\n    _free_if_unused(request, effects)', '"""The last stage of a released request ended: what it made is dropped (R4)."""\n    _close_stage(request)'),
    Mutant("an early release is forgotten", "R5", "ledger", "        if stone is not None and stone.unborn:", "        if False and stone is not None and stone.unborn:"),
    Mutant("a released request may be encoded", "R5", "ledger", "isinstance(event, (PrepareStarted, EncodeStarted))", "isinstance(event, PrepareStarted)"),
    Mutant("metadata waiters are not woken", "R6", "machine", "    _wake(request, Milestone.METADATA, effects)", "    pass"),
    Mutant("the failure's own error is replaced", "R6", "machine", "    _release(request, event.reason, event.error, effects)", "    _release(request, event.reason, None, effects)"),
    Mutant("waiters for rows are not woken", "R6", "machine", "    _wake(request, Milestone.STAGED, effects)", "    pass"),
    Mutant("a tombstone stands for ever", "R7", "ledger", "if self._tombstones[req_id].at + self.limits.tombstone_ttl > now:", "if True:"),
    Mutant("tombstones without bound", "R7", "ledger", "while len(self._tombstones) > self.limits.max_tombstones:", "while False:"),
    Mutant("waits for a released id are held", "R7", "ledger", "        if stone is not None:\n            effects.append(Wake(", "        if False:\n            effects.append(Wake("),
    Mutant("join on other content", "R8", "ledger", "if live.fingerprint != event.fingerprint:", "if False:"),
    Mutant("a retry counts twice", "R9", "machine", "if a not in request.registered or a in lost)", ")"),
    Mutant("count calls instead of addresses", "R9", "machine", "    request.declared = max(request.declared, event.expected)", "    request.declared = request.declared + event.expected"),
    Mutant("the first confirmation releases", "R10", "machine", "receivers >= max(self.declared, len(registered))", "True"),
    Mutant("wait for the sweep after delivery", "R10", "machine", "        _release(request, reason, None, effects)\n    elif", "        pass\n    elif"),
    Mutant("an inline caller's copy is not expected", "R10", "machine", "if delivery is Delivery.INLINE and waiter not in confirmed:", "if False:"),
    Mutant("a pull serves an inline caller", "R10", "machine", "if delivery is Delivery.INLINE and waiter not in confirmed:", "if delivery is Delivery.INLINE and waiter not in confirmed and not self.pulled:"),
    Mutant("held rows are expected by nobody", "R10", "machine", "            if delivery is Delivery.HOLD and not self.pulled:", "            if False:"),
    Mutant("a stranger's pull settles a push", "R10", "machine", "            if delivery is Delivery.PUSH and not registered:", "            if False:"),
    Mutant("an old pull serves a new hold", "R10", "machine", "        if delivery is Delivery.HOLD:\n            self.pulled = False", "        if False:\n            self.pulled = False"),
    Mutant("a joining hold expects a pull of its own", "R10", "machine", "request.pulled |= event.reason is Reason.PULLED", "request.pulled = event.reason is Reason.PULLED and len(request.callers) < 2"),
    Mutant("an inline copy serves the puller too", "R10", "machine", "request.pulled |= event.reason is Reason.PULLED", "request.pulled = True"),
    Mutant("an answer of a released request is given", "R3", "ledger", "if request is not None and request.reason is None:\n            self._step(AnswerTaken", "if request is not None:\n            self._step(AnswerTaken"),
    Mutant("an active send does not hold the sweep off", "R11", "ledger", "idle = None if request.active_sends else request.last_activity", "idle = request.last_activity"),
    Mutant("time to live from acceptance", "R11", "ledger", "request.last_activity + self.limits.request_ttl", "request.accepted_at + self.limits.request_ttl"),
    Mutant("deadlines are forgotten", "R11", "ledger", "return latest if request.deadline is None else request.deadline", "return latest"),
    Mutant("waiters are not told of the end", "R12", "machine", "    for waiter, _ in request.waiters:\n", "    for waiter, _ in ():\n"),
    Mutant("waiting receivers are not told", "R12", "machine", "effects.extend(Notify(request.req_id, at, request.error) for at in request.waiting_destinations)", "pass"),
    Mutant("inputs that are lost are waited for", "R12", "machine", "        InputsLost: Move(None, _lose_inputs),", "        InputsLost: Move(S.PREPARED, _not_needed),"),
    Mutant("a running encode ends twice with its encoder", "R12", "machine", "        InputsLost: Move(S.ENCODING, _not_needed),", "        InputsLost: Move(None, _lose_inputs),"),
    Mutant("staged rows go with their encoder", "R12", "machine", "        InputsLost: Move(S.STAGED, _not_needed),", "        InputsLost: Move(None, _lose_inputs),"),
    Mutant("what is given up before its forward waits for ever", "R12", "machine", "        GivenUp: Move(None, _fail),\n        SendStarted: Move(S.PREPARED", "        GivenUp: Move(S.PREPARED, _stands),\n        SendStarted: Move(S.PREPARED"),
    Mutant("what is given up in its forward waits for ever", "R12", "machine", "        GivenUp: Move(None, _fail),\n        SendStarted: Move(S.ENCODING", "        GivenUp: Move(S.ENCODING, _stands),\n        SendStarted: Move(S.ENCODING"),
    Mutant("staged rows are given up", "R12", "machine", "        GivenUp: Move(S.STAGED, _stands),", "        GivenUp: Move(None, _fail),"),
    Mutant("a released request that is given up is never freed", "R16", "machine", "        GivenUp: Move(None, _end_stage_if_any),", "        GivenUp: Move(S.DRAINING, _ignore),"),
    Mutant("early receivers are dropped", "R12", "ledger", "effects.extend(effect for effect in follow if not isinstance(effect, Admit))", "follow.clear(); request.waiting_destinations = ()"),
    Mutant("one caller takes the others along", "R13", "machine", "    if not request.callers and not request.on_its_way:\n        _release", "    if True:\n        _release"),
    Mutant("who leaves aborts what is on its way", "R13", "machine", "    if not request.callers and not request.on_its_way:\n        _release", "    if not request.callers:\n        _release"),
    Mutant("a receiver to come keeps what nobody waits for", "R13", "machine", "len(registered) >= self.declared and", "True and"),
    Mutant("who left is woken", "R13", "machine", "request.waiters = [entry for entry in request.waiters if entry[0] != event.waiter]", "pass"),
    Mutant("bytes are not given back", "R16", "ledger", "self.staged_bytes -= request.metadata.nbytes", "pass"),
    Mutant("queued patches leak", "R16", "ledger", "self.queued_patches -= request.metadata.patches", "pass"),
    Mutant("no limit on live requests", "R14", "ledger", "if len(self._lives) >= limits.max_live_requests:", "if False:"),
    Mutant("bytes beyond the budget", "R14", "ledger", "if self.staged_bytes + metadata.nbytes > limits.max_staged_bytes:", "if False:"),
    Mutant("a failure ends a neighbour", "R15", "ledger", "        step(request, event, effects)\n", "        step(request, event, effects)\n        _take_along(self, event, now, effects)\n"),
]  # fmt: skip

#: functions that some planted lines call, put at the head of the copies
HELPERS = {
    "machine": "def _end_again(request, event, effects):\n    effects.append(Free(request.life))\n",
    "ledger": (
        "def _take_along(ledger, event, now, effects):\n"
        "    others = [r for r in ledger._lives.values() if r.life != event.life and r.reason is None]\n"
        "    if type(event) is Failed and others:\n"
        "        ledger._step(ReleaseAsked(others[0].life, Reason.WORKER_LOST), now, effects)\n"
    ),
}
FUTURE = "from __future__ import annotations\n"


def source(file: str) -> str:
    module = machine_module if file == "machine" else ledger_module
    return Path(str(module.__file__)).read_text()


def plant(mutant: Mutant) -> ModuleType:
    """A ledger module, around a machine module of its own, with the bug in one of them; the real ones are not touched."""
    texts = {file: source(file).replace(FUTURE, FUTURE + HELPERS[file], 1) for file in ("machine", "ledger")}
    texts[mutant.file] = texts[mutant.file].replace(mutant.old, mutant.new, 1)
    _module("sim_mutant_machine", texts["machine"])
    imports_mutant = texts["ledger"].replace("from tectum.lifecycle.machine import", "from sim_mutant_machine import")
    return _module("sim_mutant_ledger", imports_mutant)


def _module(name: str, text: str) -> ModuleType:
    module = module_from_spec(spec_from_loader(name, loader=None))  # type: ignore[arg-type]
    sys.modules[name] = module
    exec(compile(text, name, "exec"), module.__dict__)
    return module


def hunt(mutant: Mutant, seeds: int) -> dict[str, object]:
    """Run seeds until the bug shows; says by which rule's checker."""
    ledger = plant(mutant)
    for seed in range(seeds):
        result = run_seed(seed, ledger)
        if result.failure:
            return {"name": mutant.name, "rule": mutant.rule, "caught": True, "seed": seed, "by": result.rule}
    return {"name": mutant.name, "rule": mutant.rule, "caught": False, "seed": None, "by": None}
