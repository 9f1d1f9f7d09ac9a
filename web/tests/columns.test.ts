import { expect, test } from "vitest";
import { ceiling, closed, edges, rested, stacked, stepRange, viewOf } from "../src/charts/columns";

test("bins cover the axis from half a step before their first to half a step after their last", () => {
  expect(edges([0, 4, 8], [3, 7, 9])).toEqual([-0.5, 3.5, 7.5, 9.5]);
  expect(closed([5, 6, 7])).toEqual([5, 6, 7, 7]);
  expect([edges([], []), closed([])]).toEqual([[], []]);
  expect(stepRange({ first: 10, last: 19 })).toEqual([9.5, 19.5]);
  expect(stepRange(null)).toBeNull();
});

test("an axis range maps to its visible steps and back to the same view", () => {
  const whole = { first: 0, last: 999 };
  for (const view of [{ first: 0, last: 0 }, { first: 10, last: 19 }, { first: 998, last: 999 }, whole]) {
    const [from, to] = stepRange(view) ?? [0, 0];
    expect(viewOf(from, to, whole)).toEqual(view);
  }
  expect(viewOf(12.1, 12.2, whole)).toEqual({ first: 12, last: 12 });
  expect(viewOf(-50, 5000, whole)).toEqual(whole);
  expect(viewOf(5000, 6000, whole)).toEqual({ first: 999, last: 999 });
  for (const by of [-3.2, -0.5, 0, 0.3, 0.5, 0.9]) {
    const [from, to] = rested([99.5 + by, 199.5 + by]);
    const moved = viewOf(from, to, whole);
    expect([moved.last - moved.first + 1, moved.first]).toEqual([100, 100 + Math.round(by)]); // nothing creeps
  }
});

test("a stack adds up, and missing values count as zero", () => {
  expect(stacked([[1, 2], [10, null], [100]], 2)).toEqual([
    [1, 2],
    [11, 2],
    [111, 2],
  ]);
  expect(stacked([], 3)).toEqual([]);
});

test("a single outlier is cut off, counted and reported", () => {
  const calm = Array.from({ length: 100 }, () => 40);
  expect(ceiling(calm, [], false)).toEqual({ top: 42, beyond: 0, most: 40 });
  const wild = [3000, ...calm];
  expect(ceiling(wild, wild, false)).toEqual({ top: 60, beyond: 1, most: 3000 });
  expect(ceiling(wild, wild, true)).toEqual({ top: 3150, beyond: 0, most: 3000 });
  expect(ceiling([40, 3000], [], false).beyond).toBe(0);
  expect(ceiling([], [], false)).toEqual({ top: 1, beyond: 0, most: 0 });
});

test("one warm-up step does not flatten a short run", () => {
  const steps = Array.from({ length: 40 }, (_, at) => (at === 0 ? 600 : 30));
  expect(ceiling(steps, steps, false)).toEqual({ top: 45, beyond: 1, most: 600 });
  expect(ceiling(steps, steps, true)).toEqual({ top: 630, beyond: 0, most: 600 });
});
