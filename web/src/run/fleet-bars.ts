/** The fleet document as bars: which causes are drawn, how long each part is, and where a bar leads. */

import { runLink, writeRoute, LIST } from "../address";
import type { Behind, CauseRow, FleetDocument, Hours } from "../api/fleet-documents";
import { NEWEST, writeView } from "./list-rows";

type Unit = FleetDocument["over_time"]["unit"];

/** The cause that is no loss. */
export const USEFUL = "useful";

export interface BarPart {
  cause: string;
  name: string;
  hours: number;
}

/** The parts of a bar in the order of the causes, without empty ones; `useful`: whether useful training is drawn. */
export function barParts(causes: readonly CauseRow[], hours: Hours, useful: boolean): BarPart[] {
  return causes
    .filter(({ cause }) => useful || cause !== USEFUL)
    .map(({ cause, name }) => ({ cause, name, hours: Math.max(hours[cause] ?? 0, 0) }))
    .filter((part) => part.hours > 0);
}

export function sumOf(parts: readonly BarPart[]): number {
  return parts.reduce((sum, { hours }) => sum + hours, 0);
}

const TENTHS = new Intl.NumberFormat("en-GB", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric", timeZone: "UTC" });
const MONTH = new Intl.DateTimeFormat("en-GB", { month: "short", year: "numeric", timeZone: "UTC" });

/** A number of runs by chance, or a ratio, as in the hub's sentences. */
export function tenths(value: number | null): string {
  return value === null ? "–" : TENTHS.format(value);
}

/** The fleet has days in UTC: its bars begin with them, and readers of one hub are in several time zones. */
export function dayText(wallNs: number | null): string {
  return wallNs === null ? "–" : DAY.format(new Date(wallNs / 1e6));
}

export function periodText(wallNs: number, unit: Unit): string {
  const when = new Date(wallNs / 1e6);
  if (unit === "month") return MONTH.format(when);
  if (unit === "year" || unit === "decade") return `${when.getUTCFullYear()}${unit === "decade" ? "s" : ""}`;
  return unit === "week" ? `week of ${DAY.format(when)}` : DAY.format(when);
}

/** The address of the runs behind a row: of a run, or of the list with these runs alone. Null without any. */
export function behindLink({ runs }: Behind, about: string): string | null {
  const ids = runs.filter((id) => !id.includes("://")); // archived, and not in this hub's list
  const [only] = ids;
  if (only === undefined) return null;
  if (ids.length === 1) return runLink(only);
  return writeRoute({ ...LIST, query: writeView({ ...NEWEST, runs: ids, about }) });
}

/** `3 runs`, `20 of 510 runs`: how many of the runs behind a row its link shows. */
export function behindText({ runs, run_count }: Behind): string {
  const total = Math.max(run_count, runs.length);
  const word = total === 1 ? "run" : "runs";
  return runs.length < total && runs.length > 0 ? `${runs.length} of ${total.toLocaleString("en-GB")} ${word}` : `${total.toLocaleString("en-GB")} ${word}`;
}
