// Reads the RateLimit headers of every dialect with parsers from npm. Arguments: the gateway's address, then the dialects.
import assert from "node:assert/strict";
import { parseList } from "structured-headers";
import { parseRateLimit } from "ratelimit-header-parser";

const [address, ...dialects] = process.argv.slice(2);
const QUOTA = 3;
const WINDOW_S = 900;

// Return the names and the parameters of a structured-field list.
function items(value) {
  for (const [name] of parseList(value)) assert.equal(typeof name, "string", `names are strings: ${value}`);
  return Object.fromEntries(parseList(value).map(([name, parameters]) => [name, Object.fromEntries(parameters)]));
}

function newest(response, number) {
  assert.deepEqual(items(response.headers.get("ratelimit-policy")), {
    narrow: { q: QUOTA, w: WINDOW_S },
    broad: { q: 1000, w: 3600 },
    month: { q: 100000 },
  });
  const standing = items(response.headers.get("ratelimit"));
  if (response.status === 429) {
    assert.deepEqual(Object.keys(standing), ["narrow"]);
    assert.equal(standing.narrow.t, Number(response.headers.get("retry-after")));
  } else {
    assert.deepEqual(Object.keys(standing), ["narrow", "broad", "month"]);
  }
  assert.equal(standing.narrow.r, Math.max(QUOTA - 1 - number, 0));
}

function older(response, number, dialect) {
  const info = parseRateLimit(response, { reset: dialect === "github" ? "unix" : "seconds" });
  assert.equal(info.limit, QUOTA, dialect);
  assert.equal(info.remaining, Math.max(QUOTA - 1 - number, 0), dialect);
  assert.equal(info.used, Math.min(number + 1, QUOTA), dialect);
  // The parser returns a Date, whether the dialect sends seconds from now or seconds since 1970.
  const seconds = (info.reset - Date.now()) / 1000;
  assert.ok(seconds > WINDOW_S - 10 && seconds < WINDOW_S + 2, `${dialect}: reset in ${seconds} s`);
}

for (const dialect of dialects) {
  const isNewest = dialect === "ietf" || dialect === "draft-11";
  for (let number = 0; number < QUOTA + 2; number += 1) {
    const response = await fetch(`${address}/node-${dialect}`);
    assert.equal(response.status, number < QUOTA ? 200 : 429, `${dialect}, request ${number}`);
    if (isNewest) newest(response, number);
    else older(response, number, dialect);
  }
  const parser = isNewest ? "structured-headers" : "ratelimit-header-parser";
  console.log(`${parser}: ${dialect}, 200 and 429`);
}
