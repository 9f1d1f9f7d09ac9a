import { expect, test } from "vitest";
import type { Status, StepsDocument } from "../src/api/documents";
import { lastStepEndNs, newestStep, paceNow, stalledMs, stepsPerSecond } from "../src/run/pace";

const SECOND = 1e9;

/** One step per second, starting at the first second of the clock. */
function steps(many: number): StepsDocument {
  const numbers = Array.from({ length: many }, (_, at) => at);
  const of = <T>(value: T): T[] => numbers.map(() => value);
  return {
    first: numbers,
    last: numbers,
    steps: of(1),
    ranks: of(1),
    quantiles: [0.5, 1],
    ns: { wall: of([0.5 * SECOND, SECOND]) },
    mean_ns: { wall: of(SECOND) },
    worst: of([]),
    start_wall_ns: numbers.map((at) => (at + 1) * SECOND),
    device_mean_ns: {},
    memory_bytes: {},
  };
}

test("progress and speed", () => {
  expect([stepsPerSecond(null), stepsPerSecond(steps(0)), stepsPerSecond(steps(1)), stepsPerSecond(steps(100))]).toEqual([null, null, null, 1]);
  expect([newestStep(null, null), newestStep({ newest_step: 7 } as Status, steps(3)), newestStep({ newest_step: 1 } as Status, steps(3))]).toEqual([-1, 7, 2]);
  expect(lastStepEndNs(steps(3))).toBe(4 * SECOND);
});

test("a stalled run differs from a slow one, and arriving steps override any clock", () => {
  const run = steps(9); // the last ended at ten seconds
  expect(stalledMs(run, null, 15_000, null)).toBeNull();
  expect(stalledMs(run, null, 21_000, null)).toBe(11_000);
  expect(stalledMs(run, 200, 99_000_000, null)).toBeNull();
  expect(stalledMs(run, 60_000, 0, null)).toBe(60_000);
  expect(stalledMs(run, null, 5000, null)).toBeNull();
  expect(stalledMs(run, null, 1_000_000, 995 * SECOND)).toBeNull();
  const slow = { ...run, start_wall_ns: run.start_wall_ns.map((at) => at * 60) };
  expect(stalledMs(slow, 500_000, 0, null)).toBeNull();
  expect(stalledMs(slow, 601_000, 0, null)).toBe(601_000);
  expect(stalledMs(null, null, 0, null)).toBeNull();
});

test("there is no pace once steps stop arriving", () => {
  expect([paceNow(null, null), paceNow(steps(9), null), paceNow(steps(9), 5000), paceNow(steps(9), 5001)]).toEqual([null, 1, 1, null]);
});
