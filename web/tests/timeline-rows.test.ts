import { expect, test } from "vitest";
import type { TimelineDocument } from "../src/api/report-document";
import { layoutOf, nearest, placeAt, ticksOf, visible } from "../src/charts/timeline-rows";

const TIMELINE: TimelineDocument = {
  form: "timeline",
  title: "Timeline",
  about: "step 1",
  note: "",
  length_ns: 100,
  looks: [["op", "operator"], ["compute", "kernel"]],
  names: ["step", "mm", "gemm"],
  marks: [],
  lanes: [
    { rank: 0, name: "main", kind: "host", start: [0, 10, 30], dur: [100, 20, 5], label: [0, 1, -1], look: [0, 0, 0], level: [0, 1, 1], count: [1, 1, 7] },
    { rank: 3, name: "stream 7", kind: "compute", start: [-5, 65], dur: [10, 20], label: [2, 2], look: [1, 1], level: [0, 0], count: [1, 1] },
  ],
};

test("starts are sums of differences, and each level is a row", () => {
  const { rows, headings } = layoutOf(TIMELINE);
  expect(rows.map((row) => [row.lane, row.level, [...row.start], [...row.end]])).toEqual([
    [0, 0, [0], [100]],
    [0, 1, [10, 40], [30, 45]],
    [1, 0, [-5, 60], [5, 80]],
  ]);
  expect(headings.map((heading) => heading.text)).toEqual(["Rank 0", "main", "Rank 3", "stream 7"]);
  expect(rows.every((row, at) => at === 0 || row.top >= (rows[at - 1]?.top ?? 0) + (rows[at - 1]?.height ?? 0))).toBe(true);
});

test("only events in the span are visible", () => {
  const [, calls, stream] = layoutOf(TIMELINE).rows;
  if (calls === undefined || stream === undefined) throw new Error("rows are missing");
  expect(visible(calls, [0, 100])).toEqual([0, 2]);
  expect(visible(calls, [31, 39])).toEqual([1, 1]);
  expect(visible(calls, [25, 40])).toEqual([0, 2]);
  expect(visible(stream, [0, 1])).toEqual([0, 1]);
  expect(visible(stream, [90, 100])).toEqual([2, 2]);
});

test("the event under the pointer, or next to it", () => {
  const layout = layoutOf(TIMELINE);
  const y = (row: number): number => (layout.rows[row]?.top ?? 0) + 3;
  expect(placeAt(layout, y(1), 15, 0)).toEqual({ row: 1, event: 0 });
  expect(placeAt(layout, y(1), 35, 2)).toBeNull();
  expect(placeAt(layout, y(1), 38, 2)).toEqual({ row: 1, event: 1 });
  expect(placeAt(layout, 0, 15, 2)).toBeNull();
  expect(nearest(layout.rows[2], 40, Infinity)).toBe(1);
  expect(nearest(layout.rows[2], 20, Infinity)).toBe(0);
  expect(nearest(undefined, 20, Infinity)).toBeNull();
});

test.each([
  [[0, 100], 5, [0, 20, 40, 60, 80, 100]],
  [[3, 7], 4, [3, 4, 5, 6, 7]],
  [[0, 1e9], 2, [0, 5e8, 1e9]],
] as [[number, number], number, number[]][])("ticks of %j", (span, most, ticks) => {
  expect(ticksOf(span, most)).toEqual(ticks);
});
