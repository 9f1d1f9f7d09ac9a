import { expect, test, vi } from "vitest";

vi.mock("../src/ui/theme", () => ({ theme: { value: "light" }, token: (name: string) => name }));
const { devicePairs, deviceShares, median, pairs, pairsOfSummary, pairTable, shares } = await import("../src/panels/rank-bars");
const { windowWords } = await import("../src/panels/last-steps");

const ranks = {
  rank: [0, 1, 2, 3],
  mean_ns: {
    wall: [100, 100, 100, 0],
    work: [20, 22, 90, 0],
    forward: [10, 12, 80, 0],
    comm: [80, 78, 10, 0],
    input: [10, 10, 10, 0],
    eval: [0, 0, 0, 0],
  },
};

test("whole step and work first, then phases by how far the worst is from the median", () => {
  const found = pairs(ranks);
  expect(found.map(({ name }) => name)).toEqual(["wall", "work", "forward", "comm", "input"]);
  expect(found[2]).toEqual({ name: "forward", median: 12, worst: 80, worstRank: 2, least: null, leastRank: null });
  // The rank that waits least is the one the others wait for.
  expect(found[3]).toMatchObject({ worstRank: 0, least: 10, leastRank: 2 });
});

test("ranks without steps are ignored", () => {
  expect(pairs({ rank: [0], mean_ns: { wall: [0] } })).toEqual([]);
  expect(pairs({ rank: [], mean_ns: {} })).toEqual([]);
});

test("one rank: shares of its step", () => {
  expect(shares({ rank: [0], mean_ns: { wall: [100], work: [70], forward: [60], comm: [30], input: [10], eval: [0] } })).toEqual([
    { name: "forward", ns: 60, share: 0.6 },
    { name: "comm", ns: 30, share: 0.3 },
    { name: "input", ns: 10, share: 0.1 },
  ]);
});

test("a summary gives the same for very many ranks, and invalid entries are ignored", () => {
  const summary = { phases: { forward: { median_ms: 1, worst_ms: 3, worst_rank: 7 }, comm: { median_ms: 5, worst_ms: 9, worst_rank: 1 }, odd: { median_ms: null } } };
  expect(pairsOfSummary(summary).map(({ name, worst, worstRank }) => [name, worst, worstRank])).toEqual([
    ["comm", 9e6, 1],
    ["forward", 3e6, 7],
  ]);
  expect(pairsOfSummary({})).toEqual([]);
});

test("timed devices, with host times; empty unless all phases were timed", () => {
  const row = (median_ms: number, worst_ms: number, share: number) => ({ median_ms, worst_ms, worst_rank: 1, share });
  const phases = { forward: { ...row(1, 2, 0.1), device: row(8, 15, 0.7) }, h2d: { ...row(3, 3, 0.9), device: row(0.5, 0.5, 0.3) } };
  const found = devicePairs({ phases });
  expect(found.map(({ name, median, worst, host }) => [name, median, worst, host])).toEqual([["forward", 8e6, 15e6, 1e6], ["h2d", 0.5e6, 0.5e6, 3e6]]);
  expect(deviceShares({ phases }).map(({ name, share, ns, host }) => [name, share, ns, host])).toEqual([["forward", 0.7, 8e6, 1e6], ["h2d", 0.3, 0.5e6, 3e6]]);
  expect(devicePairs({ phases: { ...phases, eval: { ...row(1, 1, 1), device: null } } })).toEqual([]);
  expect(pairTable([...pairs(ranks).slice(0, 1), ...found.slice(0, 1)])).toEqual({
    columns: ["name", "clock", "median_ns", "worst_ns", "worst_rank", "host_median_ns"],
    rows: [["wall", "host", 100, 100, 0, 100], ["forward", "device", 8e6, 15e6, 1, 1e6]],
  });
  expect(pairTable(pairs(ranks).slice(0, 1))).toEqual({ columns: ["name", "median_ns", "worst_ns", "worst_rank"], rows: [["wall", 100, 100, 0]] });
});

test("median", () => {
  expect([median([3, 1, 2]), median([4, 1, 2, 3])]).toEqual([2, 2.5]);
  expect(median([])).toBeNaN();
});

test("means name their steps", () => {
  expect(windowWords({ steps: 256, stride: 1 }, 99)).toBe("mean of all steps");
  expect(windowWords({ steps: 256, stride: 1 }, 5000)).toBe("mean of the last 256 steps");
  expect(windowWords({ steps: 256, stride: 4 }, 5000)).toBe("mean of one in 4 of the last 1,024 steps");
  expect(windowWords(undefined, 5)).toBe("mean of the last steps");
});
