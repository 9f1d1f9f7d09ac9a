import { expect, test } from "vitest";
import { matched, type Shortcut } from "../src/ui/key-sequence";
import { duration } from "../src/ui/format";
import { began } from "../src/ui/when";
import DURATIONS from "../../tests/records/durations.json";

const keys: Shortcut[] = ["g l", "g r", "l", "/", "Escape"].map((name) => ({ keys: name, words: name, act: () => undefined }));

function typed(...all: string[]): string[] {
  let before = "";
  const found: string[] = [];
  for (const key of all) {
    const step = matched(keys, before, key);
    before = step.rest;
    if (step.found !== null) found.push(step.found.keys);
  }
  return found;
}

test("one key, two keys, and a wrong one in between", () => {
  expect(typed("g", "l")).toEqual(["g l"]);
  expect(typed("l")).toEqual(["l"]);
  expect(typed("g", "/", "l")).toEqual(["/", "l"]);
  expect(typed("g", "g", "r")).toEqual(["g r"]);
  expect(typed("x", "Escape")).toEqual(["Escape"]);
});

test("durations have exactly the text that Python gives them", () => {
  expect(DURATIONS.precise.map(([ns]) => [ns, duration(ns as number)])).toEqual(DURATIONS.precise);
  expect(DURATIONS.whole.map(([ns]) => [ns, duration(ns as number, true)])).toEqual(DURATIONS.whole);
});

test("start times", () => {
  const now = new Date(2026, 10, 15, 18, 0).getTime();
  const at = (...when: [number, number, number, number, number]): string => began(new Date(...when).getTime() * 1e6, now);
  expect(at(2026, 10, 15, 7, 5)).toBe("today, 07:05");
  expect(at(2026, 10, 14, 23, 59)).toBe("yesterday, 23:59");
  expect(at(2026, 1, 3, 4, 5)).toBe("3 Feb, 04:05");
  expect(at(2025, 1, 3, 4, 5)).toBe("3 Feb 2025, 04:05");
});
