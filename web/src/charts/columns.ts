/**
 * Columns of values over steps, prepared for charts.
 *
 * Step s covers s − ½ to s + ½ of the axis, and a bin covers all of its steps.
 */

import type { View } from "../run/open-run";
import type { Span } from "./span";

/** The edges of bins, one more than there are bins. If steps are missing, the bin before is extended. */
export function edges(first: readonly number[], last: readonly number[]): number[] {
  const found = first.map((step) => step - 0.5);
  const end = last.at(-1);
  if (end !== undefined) found.push(end + 0.5);
  return found;
}

/** Repeat the last value, for the last edge. */
export function closed<T>(values: readonly T[]): T[] {
  const last = values.at(-1);
  return last === undefined ? [] : [...values, last];
}

/** The exact x range of a view of steps. */
export function stepRange(view: View | null): Span | null {
  return view === null ? null : [view.first - 0.5, view.last + 0.5];
}

/** Round a range to step edges, where a moved chart comes to rest; its length is kept. */
export function rested([from, to]: Span): Span {
  const edge = (x: number): number => Math.round(x + 0.5) - 0.5;
  return [edge(from), edge(to)];
}

/** The view for an x range: the steps at least half inside it, and at least one. */
export function viewOf(from: number, to: number, whole: View): View {
  const first = Math.min(Math.max(Math.round(from + 0.001), whole.first), whole.last);
  const last = Math.max(first, Math.min(Math.round(to - 0.001), whole.last));
  return { first, last };
}

/** Cumulative sums of the rows: the upper edges of a stack, from bottom to top. */
export function stacked(rows: readonly (readonly (number | null | undefined)[])[], length: number): number[][] {
  const sums: number[][] = [];
  let below: readonly number[] = new Array<number>(length).fill(0);
  for (const row of rows) {
    const sum = below.map((value, at) => value + (row[at] ?? 0));
    sums.push(sum);
    below = sum;
  }
  return sums;
}

/** Upper end of an axis, and how many values exceed it. */
export interface Ceiling {
  top: number;
  beyond: number;
  most: number;
}

const RARE = 0.98;
const RARE_LINE = 0.8;
const FAR = 3;

/**
 * A few outliers (such as the first step, which compiles) would flatten everything else: the axis then ends above the other
 * values, and the chart reports what lies beyond. More outliers are allowed in `lines`, which are maxima.
 */
export function ceiling(stack: readonly number[], lines: readonly number[], whole: boolean): Ceiling {
  const most = Math.max(0, ...stack, ...lines);
  const usual = Math.max(lowest(stack, RARE), lowest(lines, RARE_LINE));
  if (whole || stack.length < 20 || usual <= 0 || most <= FAR * usual) return { top: most > 0 ? most * 1.05 : 1, beyond: 0, most };
  const top = usual * 1.5;
  return { top, beyond: stack.filter((value, at) => Math.max(value, lines[at] ?? 0) > top).length, most };
}

/** The value that about this share of all values does not exceed; never the highest. */
function lowest(values: readonly number[], share: number): number {
  const sorted = [...values].sort((one, two) => one - two);
  return sorted[Math.floor((sorted.length - 1) * share)] ?? 0;
}
