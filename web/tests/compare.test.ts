import { expect, test, vi } from "vitest";
import type { StepsDocument } from "../src/api/documents";
import { ceiling, curve, cutShort, difference, eitherSpreadNs, quantileOf, spreadNs, verdictOf, type Pair } from "../src/run/compare";
import { flattened, ownWords, settingsDifference } from "../src/run/compare-settings";
import type { ComparedRun } from "../src/run/compared-run";

vi.mock("../src/ui/theme", () => ({ theme: { value: "light" }, token: (name: string) => name }));
const { memoryPairs, metricPairs, pacePair, phasePairs, stepPairs } = await import("../src/run/compared-run");

function steps(wall: number[], size = 1): StepsDocument {
  return {
    first: wall.map((_, at) => 10 + at * size),
    last: wall.map((_, at) => 9 + (at + 1) * size),
    steps: wall.map(() => size),
    ranks: wall.map(() => 2),
    quantiles: [0.5],
    ns: { wall: wall.map((value) => [value]) },
    mean_ns: { wall },
    worst: wall.map(() => []),
    start_wall_ns: wall.map(() => 0),
    device_mean_ns: {},
    memory_bytes: {},
  };
}

const pair = (one: number | null, two: number | null, spread: number | null = null, better: "less" | "more" = "less"): Pair => ({ name: "x", one, two, better, spread });

test("a difference has a size, a direction and a comparison with the spread", () => {
  expect(difference(pair(100, 80))).toEqual({ by: -20, share: -0.2, within: false, winner: "two" });
  expect(difference(pair(100, 130))).toEqual({ by: 30, share: 0.3, within: false, winner: "one" });
  expect(difference(pair(100, 130, null, "more"))?.winner).toBe("two");
  expect(difference(pair(100, 104, 4))).toMatchObject({ within: true, winner: null });
  expect(difference(pair(100, 105, 4))).toMatchObject({ within: false, winner: "one" });
  expect(difference(pair(5, 5))).toMatchObject({ by: 0, winner: null });
  expect(difference(pair(0, 5))).toMatchObject({ share: null, winner: "one" });
  expect(difference(pair(null, 5))).toBeNull();
});

test("the spread is half the interquartile range, and larger for a drifting run", () => {
  const quiet = Array.from({ length: 100 }, (_, at) => 100 + (at % 5));
  expect(spreadNs(steps(quiet), "wall")).toBe(1);
  const drifting = quiet.map((value, at) => value + (at >= 50 ? 40 : 0));
  expect(spreadNs(steps(drifting), "wall")).toBe(20);
  expect(spreadNs(steps([1, 2, 3]), "wall")).toBeNull();
  expect(spreadNs(steps(quiet, 4), "wall")).toBeNull();
  expect(spreadNs(steps(quiet), "forward")).toBeNull();
  expect(eitherSpreadNs(steps(quiet), steps(drifting), "wall")).toBe(20);
  expect(eitherSpreadNs(steps(quiet), steps([1]), "wall")).toBeNull();
});

test("a run never differs from itself", () => {
  for (let seed = 1; seed < 50; seed += 1) {
    const values = Array.from({ length: 64 }, (_, at) => 50 + ((at * 7919 * seed) % 13));
    const median = quantileOf(values, 0.5);
    expect(difference(pair(median, median, eitherSpreadNs(steps(values), steps(values), "wall")))?.winner).toBeNull();
  }
});

test("quantiles are interpolated", () => {
  expect([0, 0.25, 0.5, 1].map((share) => quantileOf([4, 1, 3, 2], share))).toEqual([1, 1.75, 2.5, 4]);
});

test("curves by step and by share of the run", () => {
  const run = steps([5, 6, 7, 8], 10);
  expect(curve(run, "step")).toEqual({ x: [10, 20, 30, 40], y: [5, 6, 7, 8] });
  expect(curve(run, "share").x).toEqual([0, 25, 50, 75]);
});

test("a few outliers do not flatten the chart, and are counted", () => {
  expect(ceiling([10, 12])).toEqual({ top: 12 * 1.05, beyond: 0 });
  const values = [1000, ...Array.from({ length: 99 }, () => 10)];
  expect(ceiling(values)).toEqual({ top: 14, beyond: 1 });
  expect(ceiling([])).toEqual({ top: 0, beyond: 0 });
});

test("the headline names the faster run first", () => {
  const shown = (value: number): string => `${value} ms`;
  expect(verdictOf(pair(100, 50), "A", "B", shown)).toBe("B is 2.00× as fast as A: 50 ms vs. 100 ms per step (median).");
  expect(verdictOf(pair(100, 105), "A", "B", shown)).toBe("A is 5.0% faster than B: 100 ms vs. 105 ms per step (median).");
  expect(verdictOf(pair(100, 101, 5), "A", "B", shown)).toBe("No difference beyond the step-to-step spread: 100 ms vs. 101 ms per step (median).");
  expect(verdictOf(pair(null, 101), "A", "B", shown)).toBe("One of the runs has no steps to compare yet.");
});

test("phases that most steps lack and nearly equal memory are shown without a judgment", () => {
  const run = (evalMs: number, often: number, rss: number): ComparedRun => {
    const values = Array.from({ length: 64 }, (_, at) => (at % often === 0 ? evalMs * often * 1e6 : 0));
    const newest = { ...steps(values), mean_ns: { wall: values, eval: values } };
    return { id: "x", about: {} as ComparedRun["about"], summary: { phases: { eval: { mean_ms: evalMs } }, memory: { rss_peak: { bytes: rss } } }, steps: newest, newest };
  };
  const [rare] = phasePairs(run(4, 40, 0), run(2, 40, 0));
  expect(rare).toEqual({ name: "eval", one: 4e6, two: 2e6, better: "less", spread: null, unjudged: "not judged: most steps do not have this phase" });
  expect(difference(rare as Pair)).toEqual({ by: -2e6, share: -0.5, within: false, winner: null });
  const [steady] = phasePairs(run(4, 1, 0), run(2, 1, 0));
  expect(steady).toEqual({ name: "eval", one: 4e6, two: 2e6, better: "less", spread: 0 });
  expect(difference(steady as Pair)?.winner).toBe("two");
  const memory = (one: number, two: number): Pair => memoryPairs(run(4, 1, one), run(4, 1, two))[0] as Pair;
  expect(memory(342, 345)).toMatchObject({ one: 342, two: 345, unjudged: "about the same" });
  expect(difference(memory(342, 345))?.winner).toBeNull();
  expect(difference(memory(342, 350))?.winner).toBe("one");
});

test("a run that did not finish gets a note", () => {
  expect(cutShort({ status: "finished" }, { status: "running", status_text: "hung" })).toEqual([]);
  expect(cutShort({ status: "interrupted" }, { status: "crashed", status_text: "killed (SIGKILL)" })).toEqual([
    "A did not finish (interrupted); its figures cover the steps it completed.",
    "B did not finish (killed (SIGKILL)); its figures cover the steps it completed.",
  ]);
});

test("only differing settings are listed", () => {
  const one = flattened({ loader: { workers: 4, pin: true }, git: null, peers: [[0, 4]], note: "" });
  const two = flattened({ loader: { workers: 8, pin: true }, git: { commit: "abc" }, peers: [[0, 4]] });
  expect(settingsDifference(one, two)).toEqual({
    differ: [
      { name: "loader.workers", one: "4", two: "8" },
      { name: "git.commit", one: null, two: "abc" },
    ],
    same: ["loader.pin", "peers"],
  });
  const deep: Record<string, unknown> = {};
  deep["a"] = { b: { c: { d: { e: { f: 1 } } } } };
  expect([...flattened(deep)]).toEqual([["a.b.c.d", '{"e":{"f":1}}']]);
});

test("words missing on the other side are marked", () => {
  const marked = (text: string, other: string | null): string[] => ownWords(text, other).filter((word) => word.own).map((word) => word.text);
  expect(marked("train.py --lr 1 --wd 1", "train.py --lr 1")).toEqual(["--wd", "1"]);
  expect(marked("a b", null)).toEqual(["a", "b"]);
  expect(ownWords("a  b", "a b").map((word) => word.text).join("")).toBe("a  b");
});

test("the pace exceeds the spread if the median does", () => {
  const run = (ms: number, wall: number[]): ComparedRun => ({ id: "x", about: {} as ComparedRun["about"], summary: { step_time: { p50_ms: ms }, steps: { per_second: 1000 / ms } }, steps: steps(wall), newest: steps(wall) });
  const spread = (by: number): number[] => Array.from({ length: 64 }, (_, at) => (at % 4 < 2 ? 100e6 - by : 100e6 + by));
  for (const [by, winner] of [[40e6, "two"], [44e6, null]] as const) {
    const [one, two] = [run(143, spread(by)), run(100, spread(by))];
    expect(difference(stepPairs(one, two)[0] as Pair)?.winner).toBe(winner);
    expect(difference(pacePair(one, two))?.winner).toBe(winner);
  }
});

test("noted numbers are compared by their last value, without a judgment", () => {
  const noted = (name: string, ...value: number[]) => ({ metrics: [{ name, step: value.map((_, at) => at), value }], left_out: 0 });
  const run = (metrics: ComparedRun["metrics"]): ComparedRun => ({ metrics }) as ComparedRun;
  expect(metricPairs(run(noted("loss", 3, 2)), run(noted("loss", 3, 1.5))).map(({ name, one, two }) => [name, one, two])).toEqual([["loss", 2, 1.5]]);
  expect(difference(metricPairs(run(noted("loss", 2)), run(noted("loss", 1)))[0] as Pair)?.winner).toBeNull();
  expect(metricPairs(run(null), run(noted("lr", 1))).map(({ name, one, two }) => [name, one, two])).toEqual([["lr", null, 1]]);
});
