// The page's reader of rows against documents that Python wrote: every element type, to the last bit.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { norms, read, similarities } from "../../src/tectum/serving/static/rows.js";
import { PYTHON, ROOT, temporary } from "./server.mjs";

const PROGRAM = `
import json, sys, torch
from tectum.delivery import wire
rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-6, 1e-3, 1.0, 30.0, 1e4])
rows[0, 0], rows[1, 1] = 0.0, -6e-8  # zero, and a subnormal of float16
expected = {}
for dtype in ("float32", "bfloat16", "float16"):
    typed = rows.to(getattr(torch, dtype))
    packed = wire.pack(rows=typed, item_rows=(6,), grid_thw=((1, 4, 6),), deepstack=(), dtype=dtype, req_id="r")
    open(f"{sys.argv[1]}/{dtype}", "wb").write(packed)
    wide = typed.double()
    expected[dtype] = {
        "values": typed.float().flatten().tolist(),
        "norms": wide.norm(dim=1).tolist(),
        "cosines": (wide @ wide[2] / wide.norm(dim=1) / wide[2].norm()).tolist(),
    }
print(json.dumps(expected))`;

test("float32, bfloat16 and float16 rows are read to the bit", { timeout: 60_000 }, (context) => {
  const { folder, remove } = temporary();
  context.after(remove);
  const expected = JSON.parse(execFileSync(PYTHON, ["-c", PROGRAM, folder], { cwd: ROOT }));
  for (const [dtype, wanted] of Object.entries(expected)) {
    const file = readFileSync(join(folder, dtype));
    const found = read(file.buffer.slice(file.byteOffset, file.byteOffset + file.length));
    assert.deepEqual([found.count, found.width, found.grid], [6, 5, [[1, 4, 6]]]);
    assert.deepEqual([...found.rows].map((value) => value + 0), wanted.values, dtype);
    const near = (one, other) => one.every((value, index) => Math.abs(value - other[index]) <= 1e-5 * Math.abs(other[index]) + 1e-9);
    assert.ok(near(norms(found), wanted.norms), `${dtype} norms`);
    assert.ok(near(similarities(found, 2), wanted.cosines), `${dtype} similarities`);
  }
});
