/** Flight Recorder results in words and signs; the marks are those of `stepscope flight --json`. Pure. */

import type { FlightDocument, Side } from "../api/hang-documents";
import { groupName } from "./hang";
import { ranksText, spansText } from "./ranks";

export interface Mark {
  /** A sign in addition to the color. */
  sign: string;
  look: "ended" | "started" | "waiting" | "other" | "missing" | "unknown";
  meaning: string;
}

export const MARKS: Readonly<Record<string, Mark>> = {
  c: { sign: "", look: "ended", meaning: "ended" },
  s: { sign: "▸", look: "started", meaning: "started" },
  w: { sign: "…", look: "waiting", meaning: "called and waits" },
  x: { sign: "≠", look: "other", meaning: "waits in another call" },
  d: { sign: "≠", look: "other", meaning: "ended another call" },
  m: { sign: "·", look: "missing", meaning: "not called" },
  "-": { sign: "", look: "unknown", meaning: "no longer known" },
  "?": { sign: "?", look: "unknown", meaning: "no recorder response" },
};

/** The meaning of a mark; `now`: the ranks still wait. */
export function meaningOf(mark: Mark, now: boolean): string {
  return now ? mark.meaning : mark.meaning.replace("waits", "waited");
}

/** `Rank 0 waits for rank 1 in all_reduce number 41 of group 1.` */
export function waitText(wait: FlightDocument["wait_for"][number], now: boolean): string {
  const waits = !now ? "waited" : wait.waiters.length === 1 ? "waits" : "wait";
  return `${ranksText(wait.waiters, true)} ${waits} for ${ranksText(wait.waited)} in ${wait.op} number ${wait.sequence} of ${groupName(wait)}.`;
}

export function sideText(side: Side): string {
  return side.op === null ? "did not call it" : [side.op, side.sizes, side.dtypes].filter(Boolean).join(" ");
}

export function partedText(parted: NonNullable<FlightDocument["first_divergence"]>): string {
  const where = `number ${parted.sequence} of ${groupName(parted)}`;
  return parted.differs === "missing" ? `${ranksText(parted.ranks, true)} did not call ${where}.` : `The ranks diverged at ${where}: another ${parted.differs}.`;
}

export interface GroupRow {
  key: string;
  name: string;
  members: number[];
  called: string;
  started: string;
  ended: string;
  trouble: boolean;
}

/** The groups; first those with calls that have not ended. */
export function groupsInTrouble(groups: FlightDocument["groups"]): GroupRow[] {
  const rows = groups.map((group): GroupRow => {
    const ranks = Object.entries(group.ranks);
    const of = (key: "enqueued" | "started" | "completed"): string => counter(ranks.map(([rank, one]) => [Number(rank), one[key]]));
    return {
      key: `${group.name} ${group.description}`,
      name: groupName({ group: group.name, description: group.description }),
      members: group.members,
      called: of("enqueued"),
      started: of("started"),
      ended: of("completed"),
      trouble: ranks.some(([, one]) => one.enqueued !== null && one.completed !== null && one.enqueued > one.completed),
    };
  });
  return rows.sort((one, two) => Number(two.trouble) - Number(one.trouble));
}

/** `24`, or `6 (rank 0), 7 (rank 1)` where they differ. */
function counter(values: readonly (readonly [number, number | null])[]): string {
  const by = new Map<number | null, number[]>();
  for (const [rank, value] of values) by.set(value, [...(by.get(value) ?? []), rank]);
  const parts = [...by.entries()].sort((one, two) => (one[0] ?? -1) - (two[0] ?? -1));
  if (parts.length === 1) return String(parts[0]?.[0] ?? "–");
  return parts
    .slice(0, 4)
    .map(([value, ranks]) => `${value ?? "–"} (${ranks.length === 1 ? "rank" : "ranks"} ${spansText(ranks)})`)
    .join(", ");
}
