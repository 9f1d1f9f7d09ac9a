import { expect, test } from "vitest";
import type { CaptureRecord, CapturesDocument, CaptureState } from "../src/api/capture-documents";
import type { Look } from "../src/api/text-documents";
import { ranksIn, stepsIn } from "../src/panels/capture-form";
import { severityWord } from "../src/ui/severity";
import { baselineOf, newer } from "../src/words/captures";

const record = (requested: number, state: CaptureState = "done", figures: Record<string, unknown> = {}): CaptureRecord => ({
  order: { id: `step-${requested}`, ranks: [0], at_step: requested, steps: 6, warmup: 2, memory: false, stacks: true, shapes: false },
  state,
  requested_wall_ns: requested,
  done_wall_ns: 0,
  reason: "request",
  finding: "",
  by: "",
  problem: "",
  reports: [],
  files: [],
  size_bytes: 0,
  verdict: "",
  severity: "",
  differences: [],
  figures,
});
const answer = (...captures: CaptureRecord[]): CapturesDocument => ({ captures });

test("a number of steps is limited when it is sent, not while it is typed", () => {
  expect(["12", "1", "612", "0", "-3", "", " ", "x", "6.4", "1e9"].map(stepsIn)).toEqual([12, 1, 100, 1, 1, 6, 6, 6, 6, 100]);
});

test("ranks are numbers and spans", () => {
  expect([ranksIn("0, 3 4-6"), ranksIn("two"), ranksIn("")]).toEqual([[0, 3, 4, 5, 6], null, null]);
});

test("of two lists the one with the newest capture counts, also if both are full", () => {
  const followed = answer(record(3), record(2));
  const usual = answer(record(4, "ordered"), record(3));
  expect(newer(usual, followed)).toBe(usual);
  expect(newer(followed, usual)).toBe(usual);
});

test("of two lists with the same newest capture the one with more that are over counts", () => {
  const before = answer(record(4, "profiling"), record(3));
  const after = answer(record(4), record(3));
  expect(newer(before, after)).toBe(after);
  expect(newer(after, before)).toBe(after);
  expect(newer(null, after)).toBe(after);
  expect(newer(after, null)).toBe(after);
});

test("a baseline of a foreign run folder is shown only if it is one", () => {
  expect(baselineOf(record(1, "done", { baseline: { id: "step-20", steps: [20, 29] } }))).toEqual({ id: "step-20", steps: [20, 29] });
  for (const baseline of [undefined, null, 7, "step-20", {}, { id: 3, steps: [1, 2] }, { id: "a" }, { id: "a", steps: [1] }, { id: "a", steps: ["1", "2"] }]) {
    expect(baselineOf(record(1, "done", { baseline }))).toBeNull();
  }
});

test("an unknown severity is marked as information", () => {
  expect(["critical", "fatal", "constructor", ""].map((look) => severityWord(look as Look))).toEqual(["critical", "info", "info", "info"]);
});
