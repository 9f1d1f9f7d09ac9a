import { expect, test, vi } from "vitest";
import type { RankDocument, StepsDocument } from "../src/api/documents";
import { onDeviceClock } from "../src/run/steps";

vi.mock("../src/ui/theme", () => ({ theme: { value: "light" }, token: (name: string) => name }));
const { comparison, comparisonAt, othersWall, rankOnDevice } = await import("../src/panels/rank-others");

type Steps = RankDocument["steps"];

/** `forward` and `comm` times of each rank in each step. */
const RANKS = [
  { forward: [10, 20, 30, 40, 50, 60], comm: [5, 5, 0, 5, 5, 5] },
  { forward: [30, 10, 20, 70, 10, 10], comm: [1, 2, 3, 4, 5, 6] },
  { forward: [90, 10, 10, 10, 10, 10], comm: [0, 0, 0, 0, 0, 9] },
];

const mean = (values: number[]): number => values.reduce((sum, value) => sum + value, 0) / values.length;
const binned = (values: number[], size: number): number[] => values.flatMap((_, at) => (at % size === 0 ? [mean(values.slice(at, at + size))] : []));
const edges = (size: number) => ({ first: [0, 1, 2, 3, 4, 5].filter((at) => at % size === 0), last: [0, 1, 2, 3, 4, 5].filter((at) => at % size === size - 1) });

function own(rank: number, size: number): Steps {
  const { forward, comm } = RANKS[rank] ?? { forward: [], comm: [] };
  const wall = forward.map((ns, at) => ns + (comm[at] ?? 0));
  return { ...edges(size), wall_ns: binned(wall, size), phase_ns: { forward: binned(forward, size), comm: binned(comm, size) }, device_ns: {}, memory_bytes: {}, start_wall_ns: [], flags: [] };
}

function all(ranks: number, size: number): StepsDocument {
  const steps = RANKS.slice(0, ranks);
  const over = (name: "forward" | "comm"): number[] => binned([0, 1, 2, 3, 4, 5].map((at) => mean(steps.map((rank) => rank[name][at] ?? 0))), size);
  const [forward, comm] = [over("forward"), over("comm")];
  const { first, last } = edges(size);
  return { first, last, steps: first.map(() => size), ranks: first.map(() => ranks), quantiles: [], ns: {}, mean_ns: { wall: forward.map((ns, at) => ns + (comm[at] ?? 0)), work: forward, forward, comm }, worst: [], start_wall_ns: [], device_mean_ns: {}, memory_bytes: {} };
}

test("with two ranks, the others are the other one, however the steps are binned", () => {
  for (const [mine, theirs] of [[1, 1], [2, 1], [1, 3], [2, 3], [3, 2]] as const) {
    const rows = new Map(comparison(own(0, mine), all(2, theirs)).map((row) => [row.phase, row]));
    expect(rows.get("forward")?.own).toBeCloseTo(35);
    expect(rows.get("forward")?.others).toBeCloseTo(25);
    expect(rows.get("comm")?.others).toBeCloseTo(3.5);
    expect(rows.get("wall")?.others).toBeCloseTo(28.5);
  }
  const line = othersWall(own(0, 1), all(2, 1));
  expect(line.map((ns) => Math.round(ns ?? -1))).toEqual([31, 12, 23, 74, 15, 16]);
});

test("with more ranks, it is the mean of all others, and the phases add up", () => {
  for (const rank of [0, 1, 2]) {
    const rows = comparison(own(rank, 1), all(3, 1));
    const rest = RANKS.filter((_, at) => at !== rank);
    const [wall, ...phases] = rows;
    expect(rows.find(({ phase }) => phase === "forward")?.others).toBeCloseTo(mean(rest.flatMap(({ forward }) => forward)));
    expect(phases.reduce((sum, { others }) => sum + (others ?? 0), 0)).toBeCloseTo(wall?.others ?? 0);
  }
});

test("only steps known for both are compared; without other ranks there is no comparison", () => {
  const steps = all(2, 1);
  const late: StepsDocument = { ...steps, first: steps.first.slice(3), last: steps.last.slice(3), ranks: [2, 2, 2], mean_ns: Object.fromEntries(Object.entries(steps.mean_ns).map(([name, ns]) => [name, ns.slice(3)])) };
  const [wall] = comparison(own(0, 1), late);
  expect([wall?.own, wall?.others]).toEqual([55, 35]);
  expect(othersWall(own(0, 1), late).slice(0, 4)).toEqual([null, null, null, 74]);
  expect(comparison(own(0, 1), null)[0]).toMatchObject({ phase: "wall", others: null });
  expect(comparison(own(0, 1), all(1, 1))[0]?.others).toBeNull();
});

test("the selected step has its own figures, and the others' if they cover the same steps", () => {
  expect(comparisonAt(own(0, 1), all(2, 1), 3)).toEqual({
    first: 3,
    last: 3,
    rows: [
      { phase: "wall", own: 45, others: 74 },
      { phase: "forward", own: 40, others: 70 },
      { phase: "comm", own: 5, others: 4 },
    ],
  });
  expect(comparisonAt(own(0, 2), all(2, 2), 3)).toMatchObject({ first: 2, last: 3, rows: [{ phase: "wall", own: 37.5, others: 48.5 }, {}, {}] });
  expect(comparisonAt(own(0, 1), all(2, 3), 2)?.rows).toEqual([{ phase: "wall", own: 30, others: null }, { phase: "forward", own: 30, others: null }]);
  expect(comparisonAt(own(0, 1), null, 0)?.rows[0]).toEqual({ phase: "wall", own: 15, others: null });
  expect(comparisonAt(own(0, 1), all(2, 1), 6)).toBeNull();
});

test("on the device only the timed steps count, and the step is the sum of its phases", () => {
  const rank = { ...own(0, 1), device_ns: { forward: [null, 8, null, null, 10, null], comm: [null, 2, null, null, 0, null] } };
  const timed = rankOnDevice(rank);
  expect([timed.first, timed.wall_ns, timed.phase_ns]).toEqual([[1, 4], [10, 10], { forward: [8, 10], comm: [2, 0] }]);
  const ranks = onDeviceClock({ ...all(2, 1), device_mean_ns: { forward: [null, 6, null, null, 9, null], comm: [null, 4, null, null, 1, null] } });
  expect(comparison(timed, ranks)).toEqual([
    { phase: "wall", own: 10, others: 10 },
    { phase: "forward", own: 9, others: 6 },
    { phase: "comm", own: 1, others: 4 },
  ]);
});
