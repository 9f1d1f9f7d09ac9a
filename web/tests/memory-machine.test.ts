import { expect, test, vi } from "vitest";
import type { SamplesDocument } from "../src/api/documents";
import { StepClock } from "../src/run/align";
import { findingOf } from "./documents-made";
import { stepsOf } from "./steps-sample";

vi.mock("../src/ui/theme", () => ({ theme: { value: "light" }, token: (name: string) => name }));
const { lone, medianCurve, picked, lineLook } = await import("../src/charts/curves");
const { deviceCurves, forecasts, forecastWords, foreseen, hostCurves, memoryChart, throughDrawn, curveTable, memoryTable, moments } = await import("../src/panels/memory-figures");
const { known, machineLines, whose, FIGURES } = await import("../src/panels/machine-figures");
const { tick, bytes, duration } = await import("../src/ui/format");

const T0 = 1e18;
const clock = new StepClock(stepsOf([{ first: 0, start: T0, wall: 1e9 }, { first: 1, start: T0 + 1e9, wall: 1e9 }]));
const MIB = 2 ** 20;
const creep = findingOf({
  kind: "memory_creep",
  steps: [0, 100],
  evidence: { which: "device_allocated", bytes_per_step: MIB, first_bytes: 900 * MIB, last_bytes: 1000 * MIB, runs_out_at_step: 400, runs_out_in_s: 120 },
});

test("a forecast follows the measurements and ends at the hub's step", () => {
  const [forecast] = forecasts([creep, { ...creep, kind: "drift" }, { ...creep, evidence: {} }]);
  expect(forecasts([creep, { ...creep, kind: "drift" }, { ...creep, evidence: {} }])).toHaveLength(1);
  if (forecast === undefined) throw new Error("no forecast");
  expect(foreseen(forecast, 100)).toBe(1000 * MIB);
  expect(foreseen(forecast, 400)).toBe(1300 * MIB);
  expect(foreseen(forecast, -1)).toBeNull();
  expect(forecastWords(forecast)).toBe("1.00 MiB more per step; full at step 400, after another 2 min");
  expect(forecastWords({ ...forecast, endStep: null })).toBe("1.00 MiB more per step; when it is full is unknown");
  const chart = memoryChart([0, 100], [{ name: "in use", values: [900 * MIB, 1000 * MIB] }], false, forecast, 400);
  expect(chart.data).toEqual([
    [0, 100, 400],
    [900 * MIB, 1000 * MIB, null],
    [900 * MIB, 1000 * MIB, 1300 * MIB],
  ]);
});

test("a forecast has the slope and both ends of the finding", () => {
  const [forecast] = forecasts([{ ...creep, evidence: { ...creep.evidence, first_bytes: 910 * MIB, last_bytes: 990 * MIB, first_step: 10, last_step: 90 } }]);
  if (forecast === undefined) throw new Error("no forecast");
  expect([0, 10, 90, 100].map((step) => foreseen(forecast, step))).toEqual([900 * MIB, 910 * MIB, 990 * MIB, 1000 * MIB]);
  expect([forecast.firstBytes, forecast.lastBytes]).toEqual([900 * MIB, 1000 * MIB]);
});

test("the forecast is shifted to the drawn line and uses the finding's duration", () => {
  const [forecast] = forecasts([{ ...creep, evidence: { ...creep.evidence, which: "host_rss", runs_out_in_s: 634.5 } }]);
  if (forecast === undefined) throw new Error("no forecast");
  const x = [-5, 0, 50, 100];
  const curves = [
    { name: "rank 1", values: [5000 * MIB, 5000 * MIB, 5000 * MIB, 5000 * MIB] },
    { name: "rank 0", values: [null, 950 * MIB, 1000 * MIB, 1050 * MIB] },
  ];
  expect(foreseen(throughDrawn(forecast, x, curves), 0)).toBe(950 * MIB);
  expect(foreseen(throughDrawn(forecast, x, []), 100)).toBe(1000 * MIB);
  expect(forecastWords(forecast)).toBe("1.00 MiB more per step; full at step 400, after another 10 min 35 s");
});

test("missing device metrics have no lines", () => {
  const { x, curves } = deviceCurves(stepsOf([{ first: 0, last: 3, memory: 5 }, { first: 4, memory: null }]));
  expect(x).toEqual([1.5, 4]);
  expect(curves).toEqual([{ name: "in use, fullest rank", values: [5, null] }]);
});

const samples = (kind: string, series: SamplesDocument["series"]): SamplesDocument => ({ kind, stat: "mean", wall_ns: [T0, T0 + 1e9], bin_ns: 1e9, series, left_out: 0 });

test("process memory excludes mapped files; worst ranks by name, plus the median", () => {
  const series = [0, 1, 2, 3].map((rank) => ({ node: "n", rank, values: { rss: [100 + 10 * rank, 200 + 10 * rank], rss_file: [50, null] } }));
  const { x, curves, median, ranks } = hostCurves(samples("process", series), clock, 2);
  expect([x, median, ranks]).toEqual([[0, 1], true, 4]);
  expect(curves).toEqual([
    { name: "median of 4 ranks", values: [65, 215] },
    { name: "rank 3", values: [80, 230] },
    { name: "rank 2", values: [70, 220] },
  ]);
  expect(hostCurves(samples("process", series.slice(0, 2)), clock, 2).median).toBe(false);
});

test("the bad end of a metric decides which curves are shown", () => {
  const curves = [1, 5, 3].map((value) => ({ name: String(value), values: [value, null, value] }));
  expect(picked(curves, 2, "high").map(({ name }) => name)).toEqual(["5", "3"]);
  expect(picked(curves, 2, "low").map(({ name }) => name)).toEqual(["1", "3"]);
  expect(picked([{ name: "none", values: [null] }], 2, "low")).toEqual([]);
  expect(medianCurve(curves)).toEqual([3, null, 3]);
  expect([[null, 4, undefined], [1, 2], [null], []].map(lone)).toEqual([true, false, false, false]);
  expect(new Set(Array.from({ length: 12 }, (_, at) => JSON.stringify(lineLook(at)))).size).toBe(12);
});

test("only available metrics are offered; lines are over steps or time", () => {
  const told = samples("host", [
    { node: "a", values: { cpu_percent: [10, 20], load1: [null, null] } },
    { node: "b", values: { cpu_percent: [90, 80] } },
  ]);
  const figures = known([told, null, samples("gpu", [])]);
  expect(figures.map(({ field }) => field)).toEqual(["cpu_percent"]);
  const [cpu] = figures;
  if (cpu === undefined) throw new Error("no figure");
  expect(machineLines(told, cpu, clock, null, 12)).toEqual({ x: [0, 1], curves: [{ name: "b", values: [90, 80] }, { name: "a", values: [10, 20] }], median: false, of: 2, outside: 0 });
  expect(machineLines(told, cpu, null, "a", 12)).toMatchObject({ x: [1e9 + 0.5, 1e9 + 1.5], curves: [{ name: "a" }] });
  expect(machineLines(told, cpu, clock, null, 1).curves.map(({ name }) => name)).toEqual(["median of 2", "b"]);
  expect(new Set(FIGURES.map(({ kind, field }) => `${kind}/${field}`)).size).toBe(FIGURES.length);
});

test("a node is named by its host, and by its number if it has one", () => {
  expect(whose({ node: "a", host: "a", values: {} })).toBe("a");
  expect(whose({ node: "1", host: "gpu07", values: {} })).toBe("gpu07 (node 1)");
  expect(whose({ node: "1", host: "gpu07", index: 3, values: {} })).toBe("gpu07 (node 1) GPU 3");
});

test("numbers on an axis are short", () => {
  expect([0, 20e6, 1.5e9, 250e3].map((at) => tick(at, duration))).toEqual(["0", "20 ms", "1.5 s", "250 µs"]);
  expect([1024 ** 3, 1.25 * 1024 ** 3].map((at) => tick(at, bytes))).toEqual(["1 GiB", "1.25 GiB"]);
});

test("tables have the step, the time, and only rows with values", () => {
  const rows = moments([-0.050213, 0.5, 7], clock);
  expect(rows).toEqual([
    { step: -0.05, seconds: T0 / 1e9 + 0.45 },
    { step: 0.5, seconds: T0 / 1e9 + 1 },
    { step: 7, seconds: null },
  ]);
  expect(moments([T0 / 1e9 + 1.5], clock, true)).toEqual([{ step: 1, seconds: T0 / 1e9 + 1.5 }]);
  const curves = [{ name: "vm", values: [1, null, 3] }];
  expect(curveTable(rows, curves, "%")).toEqual({
    columns: ["step", "unix_seconds", "vm (%)"],
    rows: [
      [-0.05, T0 / 1e9 + 0.45, 1],
      [7, null, 3],
    ],
  });
  expect(memoryTable([{ what: "host", rows, curves }]).rows.map(([what, step, , line, bytes]) => [what, step, line, bytes])).toEqual([
    ["host", -0.05, "vm", 1],
    ["host", 7, "vm", 3],
  ]);
});
