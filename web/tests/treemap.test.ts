import { expect, test } from "vitest";
import { squarify, strips, type Box } from "../src/charts/treemap";

const BOX: Box = { x: 10, y: 20, width: 300, height: 200 };

const area = ({ width, height }: Box): number => width * height;
const right = ({ x, width }: Box): number => x + width;
const bottom = ({ y, height }: Box): number => y + height;
const overlap = (one: Box, two: Box): number =>
  Math.max(0, Math.min(right(one), right(two)) - Math.max(one.x, two.x)) * Math.max(0, Math.min(bottom(one), bottom(two)) - Math.max(one.y, two.y));

/** Numbers without a pattern, always the same. */
function sizesOf(count: number, seed: number): number[] {
  let state = seed;
  return Array.from({ length: count }, () => {
    state = (state * 1_103_515_245 + 12_345) % 2_147_483_648;
    return (state / 2_147_483_648) ** 4 * 1e9;
  });
}

const CASES: [string, number[]][] = [
  ["one", [7]],
  ["equal ones", Array.from({ length: 12 }, () => 28.4)],
  ["a large one and many small ones", [1e9, ...Array.from({ length: 50 }, () => 1)]],
  ["zeros between", [0, 5, 0, 3, 0]],
  ["any", sizesOf(40, 1)],
  ["many", sizesOf(700, 2)],
];

test.each(CASES)("areas are proportional and nothing overlaps: %s", (_, sizes) => {
  const boxes = squarify(sizes, BOX);
  const total = sizes.reduce((sum, size) => sum + size, 0);
  expect(boxes).toHaveLength(sizes.length);
  for (const [at, box] of boxes.entries()) {
    expect(area(box)).toBeCloseTo(((sizes[at] ?? 0) / total) * area(BOX), 3);
    expect(box.x).toBeGreaterThanOrEqual(BOX.x - 1e-6);
    expect(box.y).toBeGreaterThanOrEqual(BOX.y - 1e-6);
    if (area(box) === 0) continue;
    expect(right(box)).toBeLessThanOrEqual(right(BOX) + 1e-6);
    expect(bottom(box)).toBeLessThanOrEqual(bottom(BOX) + 1e-6);
  }
  let common = 0;
  for (const [at, one] of boxes.entries()) for (const two of boxes.slice(at + 1)) common += overlap(one, two);
  expect(common).toBeLessThan(1e-3);
});

test("equal sizes are nearly square", () => {
  for (const { width, height } of squarify(Array.from({ length: 6 }, () => 1), BOX)) expect(Math.max(width / height, height / width)).toBeLessThan(1.6);
});

test("nothing to draw", () => {
  expect(squarify([], BOX)).toEqual([]);
  expect(squarify([0, 0], BOX).map(area)).toEqual([0, 0]);
  expect(squarify([1, 2], { ...BOX, width: 0 }).map(area)).toEqual([0, 0]);
});

test("strips follow each other along the longer side", () => {
  expect(strips([1, 3], BOX)).toEqual([
    { x: 10, y: 20, width: 75, height: 200 },
    { x: 85, y: 20, width: 225, height: 200 },
  ]);
  expect(strips([1, 1], { x: 0, y: 0, width: 10, height: 40 }).map(({ y, height }) => [y, height])).toEqual([
    [0, 20],
    [20, 20],
  ]);
  expect(strips([0, 0], BOX).map(area)).toEqual([0, 0]);
});
