import { expect, test, vi } from "vitest";
import { StepClock } from "../src/run/align";
import { csvText } from "../src/ui/csv";
import { eventOf, findingOf } from "./documents-made";
import { stepsOf } from "./steps-sample";

vi.stubGlobal("matchMedia", () => ({ matches: false, addEventListener: () => undefined }));
vi.mock("../src/ui/theme", () => ({ theme: { value: "light" }, token: (name: string) => name }));
const { aboutWords, phaseValues, stepTable, stepTimeChart, stepTip, stepWords } = await import("../src/panels/step-time-chart");
const { around, eventMarks, findingMarks } = await import("../src/panels/finding-marks");

const PHASES = ["forward", "comm"];
const steps = stepsOf([{ first: 0, last: 1, forward: 20, comm: 10 }, { first: 2, forward: 50, comm: 10, rank: 3 }]);
const shown = { whose: "mean", slowest: true, spread: false, whole: false } as const;

test("the mean stack ends at the step time, and each phase is the difference of two rows", () => {
  const { data, options } = stepTimeChart(steps, PHASES, shown);
  expect(options.series.map(({ label }) => label)).toEqual(["step", "comm", "forward", "slowest rank"]);
  expect(data).toEqual([
    [-0.5, 1.5, 2.5],
    [30, 60, 60],
    [20, 50, 50],
    [32, 62, 62],
  ]);
});

test("the worst rank's phases are from one step of one rank, medians are per phase", () => {
  expect(phaseValues(steps, "forward", "worst")).toEqual([25, 55]);
  expect(phaseValues(steps, "comm", "worst")).toEqual([5, 5]);
  expect(phaseValues(steps, "comm", "median")).toEqual([10, 10]);
});

test("the tooltip names the steps and the rank that worked longest", () => {
  const tip = stepTip(steps, PHASES, { ...shown, whose: "worst" }, 1);
  expect(tip?.title).toBe("Step 2");
  expect(tip?.rows[0]).toMatchObject({ name: "step, rank 3", strong: true });
  expect(tip?.note).toBe("rank 3 worked longest (55 ns)");
  expect(stepTip(steps, PHASES, shown, 0)?.title).toBe("Steps 0–1");
  expect(stepTip(steps, PHASES, shown, 9)).toBeNull();
});

test("the table has the hub's data, and its phases add up", () => {
  const table = stepTable(steps, PHASES);
  const at = (name: string): number => table.columns.indexOf(name);
  for (const row of table.rows) {
    expect(Number(row[at("forward_mean_ns")]) + Number(row[at("comm_mean_ns")])).toBe(row[at("mean_ns")]);
  }
  expect(csvText(table).split("\r\n")[2]).toBe("2,2,1,4,60,50,10,50,60,62,3,55,1000000002000000000");
  expect(stepWords(steps, PHASES, false)).toBe("Step time over steps 0 to 2: 40 ns a step on average; forward takes 75% of it");
});

test("with a GPU the clock is named, and an untimed step shows the last timed one", () => {
  const gpu = stepsOf([{ first: 0 }, { first: 1, device: 7 }, { first: 2, device: null }, { first: 66, device: null }, { first: 67, device: 9 }]);
  expect(phaseValues(gpu, "forward", "device")).toEqual([0, 7, 7, 0, 9]);
  const device = { ...shown, whose: "device" } as const;
  expect(stepTip(gpu, ["forward"], device, 1)).toMatchObject({ note: "phases as timed on the device", rows: [{ name: "step, mean", value: "7 ns" }, { name: "forward", value: "7 ns" }, { name: "slowest rank", value: "17 ns" }, { name: "step on the host, mean", value: "40 ns" }] });
  expect(stepTip(gpu, ["forward"], device, 2)?.note).toBe("not timed on the device; phases are from the last timed step");
  const table = stepTable(gpu, PHASES);
  const column = table.columns.indexOf("device_forward_mean_ns");
  expect(table.rows.map((row) => row[column])).toEqual([null, 7, null, null, 9]);
  expect(stepWords(gpu, PHASES, false)).toContain("; on the host forward takes 75% of it");
  expect(stepWords(gpu, ["forward"], true)).toContain("; on the device forward takes 100% of it");
});

test("description of the stack", () => {
  expect(aboutWords("mean", true, false)).toBe("mean over ranks, by phase");
  expect(aboutWords("median", true, false)).toBe("median rank, by phase; medians may not add up");
  expect(aboutWords("mean", false, false)).toBe("by phase");
  expect(aboutWords("worst", true, true)).toBe("host time by phase, worst rank");
  expect(aboutWords("mean", false, true)).toBe("host time by phase");
  expect(aboutWords("device", true, true)).toBe("device time by phase, mean over ranks");
});

test("findings with steps are marked and can be clicked", () => {
  const chosen: string[] = [];
  const findings = [findingOf({ kind: "drift", severity: "warning", ranks: [3], steps: [5, 9] }), findingOf({ kind: "healthy", steps: [0, 9] }), findingOf({ kind: "rank_crashed" })];
  const marks = findingMarks(findings, ({ kind }) => chosen.push(kind));
  expect(marks.map(({ first, last, tone }) => [first, last, tone])).toEqual([[5, 9, "warning"]]);
  marks[0]?.onChoose?.();
  expect(chosen).toEqual(["drift"]);
  expect(around(100, 199, { first: 0, last: 999 })).toEqual({ first: 90, last: 209 });
  expect(around(0, 95, { first: 0, last: 99 })).toBeNull();
});

test("deaths and hangs are marked at their steps; a normal end is not", () => {
  const at = (second: number): number => 1e18 + second * 1e9;
  const event = (number: number, wall_ns: number, name: string, more = {}) => eventOf(number, name, { wall_ns, ...more });
  const clock = new StepClock(stepsOf([{ first: 0 }, { first: 1 }, { first: 2, wall: 1e9 }]));
  const marks = eventMarks(
    [
      event(1, at(-5), "rank_start", { rank: 0 }),
      event(2, at(1.5), "rank_end", { rank: 1, severity: "critical", text: "Rank 1 vanished.", text_of_ranks: "vanished." }),
      event(3, at(1.6), "rank_end", { rank: 2, severity: "critical", text: "Rank 2 vanished.", text_of_ranks: "vanished." }),
      event(4, at(2.5), "rank_end", { rank: 0, text: "Rank 0 exited normally." }),
      event(5, at(99), "hang", { text: "The job hangs. Rank 3 <b>waits</b>." }),
    ],
    [],
    clock,
    { first: 0, last: 2 },
    () => undefined,
  );
  expect(marks.map(({ first, title }) => [first, title])).toEqual([
    [1, "Ranks 1 and 2 vanished. (at step 1)"],
    [2, "The job hangs. Rank 3 <b>waits</b>. (after step 2)"],
  ]);
});

test("a hang is marked in its step, with the title of its finding", () => {
  const clock = new StepClock(stepsOf([{ first: 0 }, { first: 1 }, { first: 2, wall: 1e9 }]));
  const hang = eventOf(7, "hang", { wall_ns: 1e18 + 99e9, kind: "hang_deadlock", culprits: [1, 0], text: "The job hangs. Ranks 0 and 1 wait for each other." });
  const found = findingOf({ kind: "hang_deadlock", title: "Ranks 0 and 1 waited for each other.", ranks: [0, 1], steps: [3, 3] });
  const marks = (findings: Parameters<typeof eventMarks>[1]) => eventMarks([hang], findings, clock, { first: 0, last: 2 }, () => undefined).map(({ first, title }) => [first, title]);
  expect(marks([found])).toEqual([[2, "Ranks 0 and 1 waited for each other. (in step 3, which did not end)"]]);
  expect(marks([{ ...found, steps: [1, 2] }])).toEqual([[1, "Ranks 0 and 1 waited for each other. (in steps 1–2)"]]);
  expect(marks([{ ...found, ranks: [1] }])).toEqual([[2, "The job hangs. Ranks 0 and 1 wait for each other. (after step 2)"]]);
});
