"""All cases against live servers: `python -m tests.hostile [--json] [--only NAME…]`; exits 1 when one does not hold."""

from __future__ import annotations

import argparse
import json
import sys
import time

from tests.hostile.cases import Case
from tests.hostile.servers import GOOD, Servers, running, said
from tests.hostile.situations import CASES, ELSEWHERE, SITUATIONS, cases_of


def run_one(case: Case, servers: Servers) -> dict[str, object]:
    started = time.monotonic()
    try:
        got = case.run(servers)
    except Exception as error:
        got = f"{type(error).__name__}: {str(error)[:150]}"
    after = said(servers.plain.encode(GOOD))  # whatever it was, the next request is served
    taken = round(time.monotonic() - started, 3)
    holds = got == case.expected and after == "200"
    return {
        "case": case.name,
        "what": case.what,
        "expected": case.expected,
        "got": got,
        "holds": holds,
        "seconds": taken,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object with every case, instead of lines")
    parser.add_argument("--only", nargs="*", help="names, or beginnings of names, of the cases to run")
    given = parser.parse_args()
    chosen = [case for case in CASES if not given.only or any(case.name.startswith(name) for name in given.only)]
    results = []
    with running() as servers:
        for case in chosen:
            results.append(run_one(case, servers))
            if not given.json:
                mark = "ok  " if results[-1]["holds"] else "FAIL"
                print(f"{mark} {case.name:14} {case.what[:90]}", flush=True)
                if not results[-1]["holds"]:
                    print(f"     expected {case.expected}\n     got      {results[-1]['got']}", flush=True)
    failed = sum(not result["holds"] for result in results)
    if given.json:
        elsewhere = [{"situation": name, "test": test, "why": why} for name, (test, why) in ELSEWHERE.items()]
        live = sum(bool(cases_of(name)) for name in SITUATIONS)
        counts = {"total": len(results), "failed": failed, "situations": len(SITUATIONS), "situations_live": live}
        print(json.dumps({"cases": results, **counts, "elsewhere": elsewhere}, indent=1))
    else:
        print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
