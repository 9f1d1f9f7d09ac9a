import { expect, test } from "vitest";
import type { Cell } from "../src/api/report-document";
import { sortedRows } from "../src/panels/report-table";

const ROWS: Cell[][] = [
  ["b", ["12 ms", 12e6]],
  [["a…z", "a long z"], ["", null]],
  ["c", ["900 ns", 900]],
  ["", ["1.00 s", 1e9]],
];
const names = (rows: Cell[][]): string[] => rows.map(([name]) => (typeof name === "string" ? name : (name?.[0] ?? "")));

test.each([
  [1, true, ["", "b", "c", "a…z"]],
  [1, false, ["c", "b", "", "a…z"]],
  [0, false, ["a…z", "b", "c", ""]],
  [0, true, ["c", "b", "a…z", ""]],
] as [number, boolean, string[]][])("column %i, descending: %s; what is unknown comes last", (column, down, expected) => {
  expect(names(sortedRows(ROWS, { column, down }))).toEqual(expected);
  expect(names(ROWS)).toEqual(["b", "a…z", "c", ""]);
});
