/** Layout of marked step ranges in rows above a chart, without overlaps. */

import type { Severity } from "../api/documents";

export interface Mark {
  key: string;
  /** First and last step; equal for an event at one step. */
  first: number;
  last: number;
  tone: Severity | "event";
  /** The text. */
  title: string;
  onChoose?: () => void;
}

export interface Placed {
  mark: Mark;
  row: number;
  /** Fractions of the width, 0 to 1. */
  from: number;
  to: number;
  /** Whether it begins before or ends after the visible range. */
  cutFrom: boolean;
  cutTo: boolean;
}

/** Limited number of rows; `left` counts marks that did not fit. `least`: minimum width of a mark, as a fraction. */
export function placed(marks: readonly Mark[], range: readonly [number, number], least: number, rows: number): { marks: Placed[]; left: number } {
  const [start, end] = range;
  const ends: number[] = [];
  const found: Placed[] = [];
  let left = 0;
  for (const mark of marks) {
    if (mark.last + 0.5 <= start || mark.first - 0.5 >= end || !(end > start)) continue;
    let from = Math.max(0, (mark.first - 0.5 - start) / (end - start));
    let to = Math.min(1, (mark.last + 0.5 - start) / (end - start));
    if (to - from < least) {
      from = Math.max(0, Math.min((from + to - least) / 2, 1 - least));
      to = from + least;
    }
    const row = rowFor(found, ends, from, to);
    if (row >= rows) {
      left += 1;
      continue;
    }
    ends[row] = Math.max(ends[row] ?? 0, to);
    found.push({ mark, row, from, to, cutFrom: mark.first - 0.5 < start, cutTo: mark.last + 0.5 > end });
  }
  return { marks: found, left };
}

function rowFor(found: readonly Placed[], ends: readonly number[], from: number, to: number): number {
  for (let row = 0; row < ends.length; row += 1) {
    const free = found.every((other) => other.row !== row || other.to <= from || other.from >= to);
    if (free) return row;
  }
  return ends.length;
}
