import { expect, test, vi } from "vitest";

vi.mock("../src/ui/theme", () => ({ theme: { value: "light" }, token: (name: string) => name }));
const { median, onClock, pairs, pairsOfSummary, pairTable, shares, withHost } = await import("../src/panels/rank-bars");
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

test("of two ranks the worst is compared with the other one, not with their mean", () => {
  const found = pairs({ rank: [4, 7], mean_ns: { wall: [100, 101], work: [20, 90], comm: [80, 11] } });
  expect(found.find(({ name }) => name === "work")).toEqual({ name: "work", median: 20, worst: 90, worstRank: 7, otherRank: 4, least: null, leastRank: null });
  expect(found.find(({ name }) => name === "comm")).toMatchObject({ median: 11, worst: 80, worstRank: 4, otherRank: 7, least: 11, leastRank: 7 });
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

test("on the device, by its means, with host times", () => {
  const timed = { ...ranks, device_mean_ns: { wall: [90, 90, 90, 0], work: [40, 40, 85, 0], forward: [40, 40, 85, 0], comm: [50, 50, 5, 0] } };
  expect(onClock(timed, false)).toBe(timed);
  expect(onClock(ranks, true)).toBe(ranks);
  const found = withHost(pairs(onClock(timed, true)), pairs(timed));
  expect(found.map(({ name, median, worst, worstRank, host }) => [name, median, worst, worstRank, host])).toEqual([["wall", 90, 90, 0, 100], ["work", 40, 85, 2, 22], ["forward", 40, 85, 2, 12], ["comm", 50, 50, 0, 78]]);
  expect(pairTable(found.slice(2, 3))).toEqual({ columns: ["name", "clock", "median_ns", "worst_ns", "worst_rank", "host_median_ns"], rows: [["forward", "device", 40, 85, 2, 12]] });
  expect(pairTable(pairs(ranks).slice(0, 1))).toEqual({ columns: ["name", "median_ns", "worst_ns", "worst_rank"], rows: [["wall", 100, 100, 0]] });
  const summary = { phases: { forward: { median_ms: 1, worst_ms: 3, worst_rank: 7, device: { median_ms: 8, worst_ms: 15, worst_rank: 1 } }, eval: { median_ms: 1, worst_ms: 1, worst_rank: 0, device: null } } };
  expect(pairsOfSummary(summary, true).map(({ name, worst, worstRank }) => [name, worst, worstRank])).toEqual([["forward", 15e6, 1]]);
});

test("median", () => {
  expect([median([3, 1, 2]), median([4, 1, 2, 3])]).toEqual([2, 2.5]);
  expect(median([])).toBeNaN();
});

test("means name their steps", () => {
  expect(windowWords({ steps: 256, stride: 1 }, 99)).toBe("mean of all steps after warm-up");
  expect(windowWords({ steps: 256, stride: 1 }, 5000)).toBe("mean of the last 256 steps");
  expect(windowWords({ steps: 256, stride: 4 }, 5000)).toBe("mean of one in 4 of the last 1,024 steps");
  expect(windowWords(undefined, 5)).toBe("mean of the last steps");
});
