/** Filter and sort the list of runs. */

import type { RunRow } from "../api/documents";
import { statusText } from "../words/standing";

export const COLUMNS = ["name", "status", "created_wall_ns", "ranks", "steps", "median_step_ms", "verdict"] as const;
export type Column = (typeof COLUMNS)[number];

export interface ListView {
  search: string;
  /** Empty: all. */
  status: string;
  column: Column;
  down: boolean;
}

/** Rows that contain all search words in name, status or verdict; rows without a value in the sort column come last. */
export function chosenRows(rows: readonly RunRow[], view: ListView): RunRow[] {
  const words = view.search.toLowerCase().split(/\s+/).filter(Boolean);
  const found = rows.filter((row) => {
    if (view.status !== "" && statusText(row) !== view.status) return false;
    const text = `${row.name}\n${row.id}\n${statusText(row)}\n${row.verdict ?? ""}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const sign = view.down ? -1 : 1;
  return found.sort((one, two) => order(cell(one, view.column), cell(two, view.column), sign) || two.created_wall_ns - one.created_wall_ns);
}

/** Number of runs per status, most frequent first. */
export function statuses(rows: readonly RunRow[]): [string, number][] {
  const found = new Map<string, number>();
  for (const row of rows) found.set(statusText(row), (found.get(statusText(row)) ?? 0) + 1);
  return [...found].sort((one, two) => two[1] - one[1] || (one[0] < two[0] ? -1 : 1));
}

/**
 * The refreshed newest runs, followed by the known older ones. Null if the count does not match the hub's: older runs were
 * added or removed, and the whole list must be loaded.
 */
export function withNewest(known: readonly RunRow[], newest: readonly RunRow[], total: number): RunRow[] | null {
  const fresh = new Set(newest.map((row) => row.id));
  const rows = [...newest, ...known.filter((row) => !fresh.has(row.id))];
  return rows.length === total ? rows : null;
}

/** At most two runs are selected for comparison; a third replaces the first. */
export function toggled(chosen: readonly string[], id: string): string[] {
  return chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id].slice(-2);
}

function cell(row: RunRow, column: Column): string | number | null {
  return column === "status" ? statusText(row) : row[column];
}

const names = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

function order(one: string | number | null, two: string | number | null, sign: number): number {
  const [noOne, noTwo] = [one === null || one === "", two === null || two === ""];
  if (noOne || noTwo) return Number(noOne) - Number(noTwo);
  return sign * (typeof one === "string" ? names.compare(one, String(two)) : Number(one) - Number(two));
}
