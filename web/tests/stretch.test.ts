import { expect, test } from "vitest";
import { completed, extent, question, within } from "../src/run/stretch";
import { single, stepsOf } from "./steps-sample";

const whole = { first: 0, last: 9999 };

test("a following window repeats the same request, up to the newest step", () => {
  const asked = question({ first: 9800, last: 9999 }, whole, 1000);
  expect(asked).toEqual({ first: 9792, last: null, bins: 576 });
  for (let more = 1; more < 20; more += 1) {
    const next = question({ first: 9800 + more, last: 9999 + more }, { first: 0, last: 9999 + more }, 1000);
    expect(next.last).toBeNull();
    expect([9792, 9824]).toContain(next.first);
  }
});

test("the requested range contains the window, at screen resolution", () => {
  for (const [first, last] of [[0, 9999], [5, 5], [123, 456], [4000, 8000]] as const) {
    const { first: from, last: to, bins } = question({ first, last }, whole, 1000);
    expect(from).toBeLessThanOrEqual(first);
    expect(to ?? Infinity).toBeGreaterThanOrEqual(last);
    expect(bins).toBeGreaterThanOrEqual(64);
    expect(bins).toBeLessThanOrEqual(4096);
    const asked = (to ?? whole.last) - from + 1;
    // Either individual steps, or at least one bin per two pixels.
    expect(bins >= asked || (bins * (last - first + 1)) / asked >= 500).toBe(true);
  }
});

test("the newest steps come from the whole run's data", () => {
  const all = stepsOf([{ first: 0, last: 49 }, { first: 50, last: 99 }, { first: 100 }, { first: 101 }]);
  const fine = single(100);
  expect(completed(fine, all).first.slice(-3)).toEqual([99, 100, 101]);
  expect(completed(fine, single(100))).toBe(fine);
  expect(completed(stepsOf([]), all)).toBe(all);
});

test("only the visible bins, plus one at each side", () => {
  const steps = single(100);
  expect(within(steps, { first: 10, last: 12 }).first).toEqual([9, 10, 11, 12, 13]);
  expect(within(steps, { first: 98, last: 200 }).first).toEqual([97, 98, 99]);
  expect(within(steps, { first: 10, last: 12 }).mean_ns["wall"]).toHaveLength(5);
  expect(within(steps, { first: 500, last: 600 }).first).toEqual([99]);
  expect(extent(steps)).toEqual({ first: 0, last: 99 });
  expect([extent(null), extent(stepsOf([]))]).toEqual([null, null]);
});
