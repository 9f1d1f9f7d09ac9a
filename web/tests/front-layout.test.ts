import { expect, test } from "vitest";
import type { FrontPoint } from "../src/api/report-document";
import { frontLayout, nextPoint, range, ticks } from "../src/charts/front-layout";

const MIB = 2 ** 20;

function point(name: string, mib: number, ms: number, place: FrontPoint["place"] = "front"): FrontPoint {
  return { name, memory: mib * MIB, ns: ms * 1e6, interval_ns: [ms * 0.9e6, ms * 1.1e6], place, facts: [], run: null };
}

test("ticks are round numbers inside the range", () => {
  expect(ticks([0, 100], 5, 10)).toEqual([0, 20, 40, 60, 80, 100]);
  expect(ticks([13, 47], 4, 10)).toEqual([20, 30, 40]);
  expect(ticks([100 * MIB, 900 * MIB], 4, 2).map((at) => at / MIB)).toEqual([256, 512, 768]);
  expect(range([100])).toEqual([98, 102]);
  expect(range([100, 200])).toEqual([88, 212]);
  expect(range([1, 100])[0]).toBe(0);
});

test("more memory is to the right, a longer time above, and the line is a staircase through the front", () => {
  const layout = frontLayout([point("small", 200, 20), point("bad", 300, 25, "dominated"), point("fast", 800, 10)], 700, 360);
  const [small, bad, fast] = layout.spots;
  expect([small!.x < bad!.x, bad!.x < fast!.x]).toEqual([true, true]);
  expect([bad!.y < small!.y, small!.y < fast!.y]).toEqual([true, true]);
  expect([small!.high < small!.y, small!.y < small!.low]).toEqual([true, true]);
  expect(layout.line).toBe(`${small!.x},${small!.y} ${fast!.x},${small!.y} ${fast!.x},${fast!.y}`);
  expect(layout.spots.every(({ x, low, high }) => x > layout.left && x < layout.right && high >= layout.top && low <= layout.bottom)).toBe(true);
});

test("no name covers another one or leaves the picture", () => {
  const same = Array.from({ length: 12 }, (_, at) => point(`variant-${at}`, 500 + at, 10, at === 11 ? "front" : "near"));
  const { spots } = frontLayout(same, 600, 360);
  const boxes = spots.flatMap(({ name }, at) => {
    if (name === null) return [];
    const long = (same[at]?.name.length ?? 0) * 6.8;
    return [{ left: name.end ? name.x - long : name.x, right: name.end ? name.x : name.x + long, y: name.y }];
  });
  expect(boxes.length).toBeGreaterThan(3);
  expect(spots[11]?.name).not.toBeNull();
  for (const [at, one] of boxes.entries()) {
    expect([one.left >= 0, one.right <= 600]).toEqual([true, true]);
    for (const two of boxes.slice(at + 1)) expect(Math.abs(one.y - two.y) >= 14 || one.right <= two.left || two.right <= one.left).toBe(true);
  }
  const [first] = frontLayout([point("a-name-that-is-far-too-long-for-a-picture-of-this-size", 1, 1)], 200, 360).spots;
  expect(first?.name).toBeNull();
});

test("one variant is drawn in the middle", () => {
  const layout = frontLayout([point("only", 512, 10)], 600, 360);
  expect(layout.spots[0]?.x).toBeCloseTo((layout.left + layout.right) / 2, 0);
  expect(layout.line).toBe(`${layout.spots[0]?.x},${layout.spots[0]?.y}`);
});

test.each([
  ["ArrowRight", null, 0],
  ["ArrowRight", 2, 2],
  ["ArrowLeft", null, 2],
  ["ArrowLeft", 0, 0],
  ["ArrowUp", 0, 1],
  ["ArrowDown", 2, 1],
  ["Home", 2, 0],
  ["End", null, 2],
  ["Escape", 1, null],
  ["Escape", null, undefined],
  ["x", 1, undefined],
] as [string, number | null, number | null | undefined][])("%s at %s", (key, now, next) => {
  expect(nextPoint(key, now, 3)).toBe(next);
});
