import { expect, test } from "vitest";
import { matched, type Shortcut } from "../src/ui/key-sequence";
import { began, elapsed, roughly } from "../src/ui/when";

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

test("ages and start times", () => {
  expect([-5, 400, 89_000, 95_000, 3_600_000, 7_200_000, 400_000_000].map(roughly)).toEqual(["0 s", "0 s", "89 s", "2 min", "60 min", "2 h", "5 days"]);
  expect([-1, 21_999, 184_000, 7_500_000, 273_600_000].map(elapsed)).toEqual(["0 s", "21 s", "3 min 4 s", "2 h 5 min", "3 d 4 h"]);
  const now = new Date(2026, 10, 15, 18, 0).getTime();
  const at = (...when: [number, number, number, number, number]): string => began(new Date(...when).getTime() * 1e6, now);
  expect(at(2026, 10, 15, 7, 5)).toBe("today, 07:05");
  expect(at(2026, 10, 14, 23, 59)).toBe("yesterday, 23:59");
  expect(at(2026, 1, 3, 4, 5)).toBe("3 Feb, 04:05");
  expect(at(2025, 1, 3, 4, 5)).toBe("3 Feb 2025, 04:05");
});
