/** Curves of several runs in one chart, and texts of which only the differing words matter. */

import type { StepsDocument } from "../api/documents";
import { onDeviceClock } from "./steps";

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

/** With fewer points every one of them is shown. */
const LEAST_POINTS = 8;

/** Upper limit of the chart's axis; a few outliers, such as the first step, would flatten the rest. */
export function ceiling(values: readonly number[]): { top: number; beyond: number } {
  const most = values.reduce((one, two) => Math.max(one, two), 0);
  const usual = values.length < LEAST_POINTS ? most : quantileOf(values, 0.98);
  if (most <= 3 * usual) return { top: most * 1.05, beyond: 0 };
  const top = usual * 1.4;
  return { top, beyond: values.filter((value) => value > top).length };
}

/** Linearly interpolated quantile. */
export function quantileOf(values: readonly number[], share: number): number {
  const sorted = [...values].sort((one, two) => one - two);
  const place = share * (sorted.length - 1);
  const below = sorted[Math.floor(place)] ?? Number.NaN;
  const above = sorted[Math.ceil(place)] ?? Number.NaN;
  return below + (above - below) * (place - Math.floor(place));
}

export interface Word {
  text: string;
  /** Whether the other text lacks it, or has it less often. */
  own: boolean;
}

/** Split a text into words and mark those that the other text lacks. */
export function ownWords(text: string, other: string | null): Word[] {
  const left = new Map<string, number>();
  for (const word of (other ?? "").split(/(\s+)/)) left.set(word, (left.get(word) ?? 0) + 1);
  return text.split(/(\s+)/).map((word) => {
    const many = left.get(word) ?? 0;
    left.set(word, many - 1);
    return { text: word, own: many <= 0 && word.trim() !== "" };
  });
}

/** `A` for the baseline, then `B`, `C` … */
export function letterOf(at: number): string {
  return String.fromCharCode("A".charCodeAt(0) + at);
}
