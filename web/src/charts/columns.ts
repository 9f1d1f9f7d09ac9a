/**
 * Columns of figures over steps as a chart wants them.
 *
 * A step s takes up s − ½ to s + ½ of the axis, a bin of steps as much as all of them: what is narrow on the screen is a
 * short time of the run, and a figure stands over its own step.
 */

import type { View } from "../run/open-run";
import type { Span } from "./span";

/** The edges of bins, one more than there are bins. Where steps are missing between two, the one before goes on. */
export function edges(first: readonly number[], last: readonly number[]): number[] {
  const found = first.map((step) => step - 0.5);
  const end = last.at(-1);
  if (end !== undefined) found.push(end + 0.5);
  return found;
}

/** One more value at the end, which holds up to the last edge. */
export function closed<T>(values: readonly T[]): T[] {
  const last = values.at(-1);
  return last === undefined ? [] : [...values, last];
}

/** The x that a view of steps takes up, exactly. */
export function stepRange(view: View | null): Span | null {
  return view === null ? null : [view.first - 0.5, view.last + 0.5];
}

/** The stretch of x that ends where steps do: what a chart that was moved rests on, as long as it was. */
export function rested([from, to]: Span): Span {
  const edge = (x: number): number => Math.round(x + 0.5) - 0.5;
  return [edge(from), edge(to)];
}

/** The view that a stretch of x means: the steps of which at least half is in it; never less than one. */
export function viewOf(from: number, to: number, whole: View): View {
  const first = Math.min(Math.max(Math.round(from + 0.001), whole.first), whole.last);
  const last = Math.max(first, Math.min(Math.round(to - 0.001), whole.last));
  return { first, last };
}

/** Each row is the sum of the rows up to its own: the upper edges of a stack, from the lowest to the highest. */
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

/** How far up an axis goes, and how many values lie beyond it. */
export interface Ceiling {
  top: number;
  beyond: number;
  most: number;
}

const RARE = 0.98;
const RARE_LINE = 0.8;
const FAR = 3;

/**
 * A few values that are far above all others (the first step, which compiles) would press everything else flat: the axis
 * then ends above the others, and the chart says what lies beyond. Of `lines` (the most of many) more may.
 */
export function ceiling(stack: readonly number[], lines: readonly number[], whole: boolean): Ceiling {
  const most = Math.max(0, ...stack, ...lines);
  const usual = Math.max(lowest(stack, RARE), lowest(lines, RARE_LINE));
  if (whole || stack.length < 20 || usual <= 0 || most <= FAR * usual) return { top: most > 0 ? most * 1.05 : 1, beyond: 0, most };
  const top = usual * 1.5;
  return { top, beyond: stack.filter((value, at) => Math.max(value, lines[at] ?? 0) > top).length, most };
}

/** The value that this share of all does not exceed. */
function lowest(values: readonly number[], share: number): number {
  const sorted = [...values].sort((one, two) => one - two);
  return sorted[Math.max(0, Math.ceil(sorted.length * share) - 1)] ?? 0;
}
