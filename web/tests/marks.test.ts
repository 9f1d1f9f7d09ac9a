import { expect, test } from "vitest";
import { placed, type Mark } from "../src/charts/marks";

const mark = (key: string, first: number, last: number): Mark => ({ key, first, last, tone: "warning", title: key });

test("overlapping marks are in different rows, others share one", () => {
  const { marks, left } = placed([mark("a", 0, 99), mark("b", 0, 49), mark("c", 50, 99)], [-0.5, 99.5], 0, 4);
  expect(marks.map(({ mark: { key }, row, from, to }) => [key, row, from, to])).toEqual([
    ["a", 0, 0, 1],
    ["b", 1, 0, 0.5],
    ["c", 1, 0.5, 1],
  ]);
  expect(left).toBe(0);
});

test("marks outside are hidden, cut marks are flagged, tiny marks have a minimum width", () => {
  const { marks } = placed([mark("before", 0, 9), mark("cut", 5, 15), mark("dot", 19, 19)], [9.5, 19.5], 0.2, 4);
  expect(marks.map(({ mark: { key }, cutFrom, cutTo }) => [key, cutFrom, cutTo])).toEqual([
    ["cut", true, false],
    ["dot", false, false],
  ]);
  const dot = marks[1];
  expect(dot?.to).toBe(1);
  expect((dot?.to ?? 0) - (dot?.from ?? 0)).toBeCloseTo(0.2);
});

test("marks that do not fit are counted, and marks never overlap", () => {
  let seed = 7;
  const random = (most: number): number => (seed = (seed * 16_807) % 2_147_483_647) % most;
  const many = Array.from({ length: 60 }, (_, at) => {
    const first = random(1000);
    return mark(String(at), first, first + random(200));
  });
  const { marks, left } = placed(many, [0, 1000], 0.02, 3);
  expect(marks.length + left).toBe(60);
  for (const one of marks) {
    for (const other of marks) {
      if (one !== other && one.row === other.row) expect(one.to <= other.from || other.to <= one.from).toBe(true);
    }
  }
  expect(placed(many, [5, 5], 0.1, 3).marks).toEqual([]);
});
