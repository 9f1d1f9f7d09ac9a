/**
 * Compare two runs: figures of each, and whether a difference exceeds the step-to-step spread.
 *
 * The spread of a run is half the interquartile range of its newest steps, or half the range of the medians of four
 * consecutive parts if that is larger, so that a drifting run does not look quiet. For phases that most steps do not
 * have (an evaluation, a checkpoint) the spread is unknown, and a difference is shown without a judgment. A difference
 * below the larger of both spreads is reported as within it. This is a statement about size, not a statistical test.
 */

import type { StepsDocument } from "../api/documents";
import { statusText, type Ending } from "../words/standing";
import { onDeviceClock } from "./steps";

export type Better = "less" | "more";

export interface Pair {
  name: string;
  one: number | null;
  two: number | null;
  better: Better;
  /** The larger step-to-step spread of both runs, in the same unit; null: unknown for this figure. */
  spread: number | null;
  /** Shown instead of a judgment if none is possible. */
  unjudged?: string;
}

export interface Difference {
  /** `two` minus `one`. */
  by: number;
  /** Relative to `one`; null if that is zero. */
  share: number | null;
  within: boolean;
  /** The better run; null if they are equal, within the spread, or cannot be judged. */
  winner: "one" | "two" | null;
}

export function difference(pair: Pair): Difference | null {
  const { one, two } = pair;
  if (one === null || two === null) return null;
  const by = two - one;
  const within = pair.spread !== null && Math.abs(by) <= pair.spread;
  const better = pair.better === "less" ? by < 0 : by > 0;
  return { by, share: one === 0 ? null : by / one, within, winner: by === 0 || within || pair.unjudged !== undefined ? null : better ? "two" : "one" };
}

const STRETCHES = 4;
/** With fewer steps the spread is unknown. */
const LEAST_STEPS = 8;

/** The spread of one run for `wall` or a phase, in nanoseconds, from its newest individual steps (see above). */
export function spreadNs(steps: StepsDocument, name: string): number | null {
  const values = steps.mean_ns[name];
  if (values === undefined || values.length < LEAST_STEPS || steps.steps.some((many) => many !== 1)) return null;
  const half = (quantileOf(values, 0.75) - quantileOf(values, 0.25)) / 2;
  const size = Math.ceil(values.length / STRETCHES);
  const medians = Array.from({ length: STRETCHES }, (_, at) => values.slice(at * size, (at + 1) * size))
    .filter((part) => part.length > 0)
    .map((part) => quantileOf(part, 0.5));
  return Math.max(half, (Math.max(...medians) - Math.min(...medians)) / 2);
}

/** Whether fewer than half of the steps have this phase, so that the spread is meaningless. */
export function seldom(steps: StepsDocument, name: string): boolean {
  const values = steps.mean_ns[name];
  return values !== undefined && values.length > 0 && values.filter((value) => value > 0).length * 2 < values.length;
}

/** The larger spread of both runs; null unless both are known. */
export function eitherSpreadNs(one: StepsDocument | null, two: StepsDocument | null, name: string): number | null {
  const found = [one, two].map((steps) => (steps === null ? null : spreadNs(steps, name)));
  const [first = null, second = null] = found;
  return first === null || second === null ? null : Math.max(first, second);
}

/** Linearly interpolated quantile. */
export function quantileOf(values: readonly number[], share: number): number {
  const sorted = [...values].sort((one, two) => one - two);
  const place = share * (sorted.length - 1);
  const below = sorted[Math.floor(place)] ?? Number.NaN;
  const above = sorted[Math.ceil(place)] ?? Number.NaN;
  return below + (above - below) * (place - Math.floor(place));
}

export interface Curve {
  x: number[];
  y: number[];
}

/** Step time (mean over ranks) by step, or by share of the run in percent; on the device only the timed steps. */
export function curve(recorded: StepsDocument, by: "step" | "share", device = false): Curve {
  const steps = device ? onDeviceClock(recorded) : recorded;
  const first = steps.first[0] ?? 0;
  const length = (steps.last.at(-1) ?? 0) - first + 1;
  const x = steps.first.map((step) => (by === "step" ? step : ((step - first) / length) * 100));
  return { x, y: steps.mean_ns["wall"] ?? [] };
}

/** Upper limit of the chart's axis; a few outliers, such as the first step, would flatten the rest. */
export function ceiling(values: readonly number[]): { top: number; beyond: number } {
  const most = values.reduce((one, two) => Math.max(one, two), 0);
  const usual = values.length < LEAST_STEPS ? most : quantileOf(values, 0.98);
  if (most <= 3 * usual) return { top: most * 1.05, beyond: 0 };
  const top = usual * 1.4;
  return { top, beyond: values.filter((value) => value > top).length };
}

/** The headline: which is faster, and by how much. */
export function verdictOf(pair: Pair, one: string, two: string, shown: (value: number) => string): string {
  const found = difference(pair);
  if (found === null || pair.one === null || pair.two === null) return "One of the runs has no steps to compare yet.";
  const figures = (first: number, second: number): string => `${shown(first)} vs. ${shown(second)} per step (median)`;
  if (found.winner === null) return `No difference beyond the step-to-step spread: ${figures(pair.one, pair.two)}.`;
  const [fast, slow] = found.winner === "one" ? [one, two] : [two, one];
  const [less, more] = [Math.min(pair.one, pair.two), Math.max(pair.one, pair.two)];
  const times = more / less;
  const much = times < 1.1 ? `${((times - 1) * 100).toFixed(1)}% faster than` : `${times.toFixed(2)}× as fast as`;
  return `${fast} is ${much} ${slow}: ${figures(less, more)}.`;
}

const CUT_SHORT: readonly string[] = ["crashed", "failed", "interrupted"];

/** Notes for the headline about runs that did not finish. */
export function cutShort(one: Ending, two: Ending): string[] {
  return Object.entries({ A: one, B: two }).flatMap(([name, run]) =>
    CUT_SHORT.includes(run.status) ? [`${name} did not finish (${statusText(run)}); its figures cover the steps it completed.`] : [],
  );
}
