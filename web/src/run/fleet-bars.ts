/** The fleet document as bars: which causes are drawn, how long each part is, and where a bar leads. */

import { runLink, writeRoute, LIST } from "../address";
import type { Behind, CauseRow, Hours } from "../api/fleet-documents";
import { NEWEST, writeView } from "./list-rows";

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

/** Hours with three digits from 1 on; `<0.1` for less than a tenth. */
export function hoursText(hours: number | null | undefined): string {
  if (hours === null || hours === undefined || Number.isNaN(hours)) return "–";
  const size = Math.abs(hours);
  if (size > 0 && size < 0.05) return `${hours < 0 ? "-" : ""}<0.1`;
  const places = size >= 99.95 || Number.isInteger(hours) ? 0 : 1;
  return new Intl.NumberFormat("en-GB", { minimumFractionDigits: places, maximumFractionDigits: places }).format(hours);
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
