/** Memory over steps, of devices and processes, and a forecast if it grows. */

import type uPlot from "uplot";
import type { Finding, SamplesDocument, StepsDocument } from "../api/documents";
import { BINARY, lineSeries, medianCurve, picked, type Curve } from "../charts/curves";
import type { Chart } from "../charts/plot-instance";
import { ontoSteps, type StepClock } from "../run/align";
import type { Csv } from "../ui/csv";
import { bytes, count, duration, tick } from "../ui/format";
import { token } from "../ui/theme";
import { median } from "./rank-bars";

/** A straight line through growing memory (`memory_creep`), and when it runs out. */
export interface Forecast {
  which: string;
  severity: Finding["severity"];
  firstStep: number;
  lastStep: number;
  firstBytes: number;
  lastBytes: number;
  perStep: number;
  /** Step at which memory runs out; null: unknown. */
  endStep: number | null;
  inSeconds: number | null;
}

export function forecasts(findings: readonly Finding[]): Forecast[] {
  return findings.flatMap((finding) => {
    if (finding.kind !== "memory_creep" || finding.steps === null) return [];
    const number = (name: string): number | null => (typeof finding.evidence[name] === "number" ? (finding.evidence[name] as number) : null);
    const [perStep, firstBytes, lastBytes] = [number("bytes_per_step"), number("first_bytes"), number("last_bytes")];
    if (perStep === null || firstBytes === null || lastBytes === null) return [];
    const [firstStep, lastStep] = finding.steps;
    // The line was fitted without the warm-up: extend it to both ends.
    const onLine = (from: number, known: number | null, to: number): number => from + perStep * (to - (known ?? to));
    return [
      {
        which: String(finding.evidence["which"]),
        severity: finding.severity,
        firstStep,
        lastStep,
        firstBytes: onLine(firstBytes, number("first_step"), firstStep),
        lastBytes: onLine(lastBytes, number("last_step"), lastStep),
        perStep,
        endStep: number("runs_out_at_step"),
        inSeconds: number("runs_out_in_s"),
      },
    ];
  });
}

/** The forecast for a step; null before the steps of the finding. */
export function foreseen(forecast: Forecast, step: number): number | null {
  return step < forecast.firstStep ? null : forecast.lastBytes + forecast.perStep * (step - forecast.lastStep);
}

/** The curve that grows; among processes, the one that grew most. */
function grownCurve({ which }: Forecast, curves: readonly Curve[]): Curve | null {
  const wanted = DEVICE_LINES.find(([key]) => `device_${key}` === which)?.[1];
  if (wanted !== undefined) return curves.find(({ name }) => name === wanted) ?? null;
  const growth = ({ values }: Curve): number => {
    const known = values.filter((value): value is number => value !== null);
    return (known.at(-1) ?? 0) - (known[0] ?? 0);
  };
  return curves.reduce<Curve | null>((most, curve) => (most === null || growth(curve) > growth(most) ? curve : most), null);
}

/**
 * Shift the line to the drawn curve, with the same slope: the finding uses local minima, which lie below the curve. Half of
 * the points then lie above the line, half below.
 */
export function throughDrawn(forecast: Forecast, x: readonly number[], curves: readonly Curve[]): Forecast {
  const values = grownCurve(forecast, curves)?.values ?? [];
  const levels = x.flatMap((step, at) => {
    const value = values[at] ?? null;
    return value === null || step < forecast.firstStep || step > forecast.lastStep ? [] : [value - forecast.perStep * (step - forecast.lastStep)];
  });
  return levels.length === 0 ? forecast : { ...forecast, lastBytes: median(levels) };
}

export function forecastWords(forecast: Forecast): string {
  const pace = `${bytes(forecast.perStep)} more per step`;
  if (forecast.endStep === null) return `${pace}; when it is full is unknown`;
  const when = forecast.inSeconds === null ? "" : `, after another ${duration(forecast.inSeconds * 1e9)}`;
  return `${pace}; full at step ${count(forecast.endStep)}${when}`;
}

export const DEVICE_LINES: readonly [string, string][] = [
  ["allocated_median", "in use, median rank"],
  ["allocated", "in use, fullest rank"],
  ["peak_allocated", "peak, fullest rank"],
  ["reserved", "held by the allocator, max"],
];

/** The available device metrics as curves; x is the middle of each bin. */
export function deviceCurves(steps: StepsDocument): { x: number[]; curves: Curve[] } {
  const curves = DEVICE_LINES.flatMap(([key, name]) => {
    const values = steps.memory_bytes[key];
    return values?.some((value) => value !== null) ? [{ name, values }] : [];
  });
  return { x: steps.first.map((first, at) => (first + (steps.last[at] ?? first)) / 2), curves };
}

/** Process memory without mapped file pages: the worst few ranks, and the median of all. */
export function hostCurves(samples: SamplesDocument, clock: StepClock, most: number): { x: number[]; curves: Curve[]; ranks: number; median: boolean } {
  const own = samples.series.flatMap((series): (Curve & { rank: number })[] => {
    const [resident, files] = [series.values["rss"], series.values["rss_file"]];
    if (series.rank === undefined || resident === undefined) return [];
    const values = resident.map((value, at) => (value === null || value === 0 ? null : Math.max(0, value - (files?.[at] ?? 0))));
    return [{ name: `rank ${series.rank}`, rank: series.rank, values }];
  });
  const worst = picked(own, most, "high");
  const curves = own.length > worst.length ? [{ name: `median of ${own.length} ranks`, values: medianCurve(own) }, ...worst] : worst;
  const middle = samples.wall_ns.map((wall) => wall + samples.bin_ns / 2);
  const { x, columns } = ontoSteps(clock, middle, curves.map(({ values }) => values));
  return { x, curves: curves.map(({ name }, at) => ({ name, values: columns[at] ?? [] })), ranks: own.length, median: curves.length > worst.length };
}

/** Curves and the forecast, if any, up to `until`. `middle`: the first curve is the median. */
export function memoryChart(x: readonly number[], curves: readonly Curve[], middle: boolean, found: Forecast | null, until: number): Chart {
  const forecast = found === null ? null : throughDrawn(found, x, middle ? curves.slice(1) : curves);
  const series: uPlot.Series[] = [{ label: "step" }];
  for (const [at, curve] of curves.entries()) {
    if (middle && at === 0) series.push({ label: curve.name, stroke: token("--muted"), width: 3, points: { show: false }, spanGaps: true });
    else series.push(lineSeries(curve.name, middle ? at - 1 : at));
  }
  const end = forecast === null ? null : Math.max(until, forecast.lastStep);
  const xs = end !== null && end > (x.at(-1) ?? -Infinity) ? [...x, end] : [...x];
  const rows: (number | null)[][] = curves.map(({ values }) => (xs.length > x.length ? [...values, null] : [...values]));
  if (forecast !== null) {
    series.push({ label: "at this rate", stroke: token("--critical"), width: 2, dash: [7, 5], points: { show: false }, spanGaps: true });
    rows.push(xs.map((step) => foreseen(forecast, step)));
  }
  return {
    key: String(middle),
    options: {
      series,
      scales: { y: { range: (_plot, _least, most) => [0, most > 0 ? most * 1.08 : 1] } },
      axes: [{}, { incrs: BINARY, values: (_plot, ticks) => ticks.map((at) => tick(at, bytes)) }],
    },
    data: [xs, ...rows] as uPlot.AlignedData,
  };
}

/** Step and time of a table row. As in the charts, the middle of step 7 is 7. Null: unknown. */
export interface Moment {
  step: number | null;
  seconds: number | null;
}

/** Convert x values of a chart over steps (`timed`: over seconds since 1970) to moments. */
export function moments(x: readonly number[], clock: StepClock | null, timed = false): Moment[] {
  const rounded = (value: number | null, by: number): number | null => (value === null ? null : Math.round(value * by) / by);
  return x.map((at) => {
    const wall = timed ? at * 1e9 : (clock?.wall(at + 0.5) ?? null);
    const passed = timed ? (clock?.step(at * 1e9) ?? null) : at + 0.5;
    return { step: rounded(passed === null ? null : passed - 0.5, 100), seconds: rounded(wall === null ? null : wall / 1e9, 1000) };
  });
}

/** Rows in which no curve has a value are left out. */
export function curveTable(rows: readonly Moment[], curves: readonly Curve[], unit: string): Csv {
  return {
    columns: ["step", "unix_seconds", ...curves.map(({ name }) => (unit === "" ? name : `${name} (${unit})`))],
    rows: rows
      .map(({ step, seconds }, row) => [step, seconds, ...curves.map(({ values }) => values[row] ?? null)])
      .filter(([, , ...values]) => values.some((value) => value !== null)),
  };
}

/** Curves over different steps in one long table: what, step, time, line, bytes. */
export function memoryTable(parts: readonly { what: string; rows: readonly Moment[]; curves: readonly Curve[] }[]): Csv {
  return {
    columns: ["what", "step", "unix_seconds", "line", "bytes"],
    rows: parts.flatMap(({ what, rows, curves }) =>
      rows.flatMap(({ step, seconds }, row) =>
        curves.flatMap(({ name, values }) => {
          const value = values[row] ?? null;
          return value === null ? [] : [[what, step, seconds, name, Math.round(value)]];
        }),
      ),
    ),
  };
}
