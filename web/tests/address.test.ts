import { expect, test } from "vitest";
import { compareLink, encoded, readRoute, runLink, siblingRun, sweepLink, withoutToken, writeRoute, type Route } from "../src/address";

const HOSTILE = [
  "<img src=x onerror=alert(1)>",
  "javascript:alert(1)",
  "\u202Egnp.exe",
  "a/b",
  "../../etc/passwd",
  "..",
  "#/run/x?rank=1",
  "a?b&c=d#e",
  "%2F%00%zz",
  "100%",
  "token=abc",
  "🚀 \u0000 tab\t",
  "x".repeat(500),
  " blanks ",
  "\"'`{{7*7}}",
];

test("every name survives the round trip through its link", () => {
  for (const one of HOSTILE) {
    const link = runLink(one, { rank: 3 });
    expect(link).toMatch(/^#\/run\/[^/?#]+\?rank=3$/);
    expect(readRoute(link)).toEqual({ screen: "run", runs: [one], first: null, last: null, step: null, rank: 3, bare: false });
    expect(withoutToken(link)).toEqual(["", link]);
    expect(readRoute(sweepLink(one))).toMatchObject({ screen: "sweep", runs: [one], bare: false });
    for (const two of HOSTILE) expect(readRoute(compareLink([one, two])).runs).toEqual([one, two]);
  }
});

test("random routes survive the round trip", () => {
  let seed = 1;
  const random = (most: number): number => {
    seed = (seed * 48_271) % 2_147_483_647;
    return seed % most;
  };
  const word = (): string => Array.from({ length: 1 + random(12) }, () => String.fromCodePoint(random(4) ? 33 + random(94) : 160 + random(50_000))).join("");
  const number = (): number | null => (random(3) ? random(1_000_000) : null);
  for (let turn = 0; turn < 500; turn += 1) {
    const name = word().replace(/\p{Surrogate}/gu, "?");
    const route: Route = { screen: "run", runs: [name], first: number(), last: number(), step: number(), rank: number(), bare: false };
    expect(readRoute(writeRoute(route))).toEqual(route);
  }
});

test("invalid parts are ignored", () => {
  expect(readRoute("#/run/a?rank=-1&step=x&first=1e3&last=99999999999999999999")).toMatchObject({ rank: null, step: null, first: null, last: null });
  expect(readRoute("#/run/a?rank=<script>")).toMatchObject({ runs: ["a"], rank: null });
  for (const hash of ["#/run", "#/run/a/b", "#/compare/a", "#/compare/a/b/c/d/e/f/g/h/i", "#/elsewhere", "#/", "nonsense"]) {
    expect(readRoute(hash)).toEqual({ screen: "list", runs: [], first: null, last: null, step: null, rank: null, bare: false });
  }
  expect(readRoute("#/run/%zz").runs).toEqual(["%zz"]);
  expect([readRoute("").bare, readRoute("#").bare, readRoute("#/").bare]).toEqual([true, true, false]);
});

test("the list keeps its filters in the address", () => {
  const route = readRoute("#/?tag=x&sort=name");
  expect(route).toMatchObject({ screen: "list", bare: false, query: "tag=x&sort=name" });
  expect(writeRoute(route)).toBe("#/?tag=x&sort=name");
  expect(readRoute("#/elsewhere?tag=x").query).toBeUndefined();
  expect(withoutToken("#/?tag=x&token=abc")).toEqual(["abc", "#/?tag=x"]);
});

test("a lone surrogate is replaced", () => {
  expect(encoded("a\ud800b")).toBe("a%EF%BF%BDb");
});

test("a token is removed from any position, and the rest stays", () => {
  expect(withoutToken("#token=a%2Bb")).toEqual(["a+b", "#"]);
  expect(withoutToken("#/run/demo?token=abc")).toEqual(["abc", "#/run/demo"]);
  expect(withoutToken("#/run/demo?token=abc&rank=3")).toEqual(["abc", "#/run/demo?rank=3"]);
  expect(withoutToken("#/run/demo?rank=3&token=abc&step=1")).toEqual(["abc", "#/run/demo?rank=3&step=1"]);
  expect(withoutToken("#/run/demo?rank=3&token=")).toEqual(["", "#/run/demo?rank=3"]);
  expect(withoutToken("#/run/token=abc")).toEqual(["", "#/run/token=abc"]);
  expect(withoutToken("#/?token=x")).toEqual(["x", "#/"]);
});

test("another run of the folder has the tag of the folder after its name", () => {
  expect(siblingRun("night~894547610f", "night", "day")).toBe("day~894547610f");
  expect(siblingRun("a~b~894547610f", "a~b", "day")).toBe("day~894547610f");
  expect([siblingRun("night", "night", "day"), siblingRun("a~b", "a~b", "day"), siblingRun("x~1", "other", "day")]).toEqual(["day", "day", "day"]);
});
