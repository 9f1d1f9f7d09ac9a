/** Events as rows of the page: consecutive ranks that started or ended in the same way are merged. */

import type { RunEvent, Severity } from "../api/documents";
import { numbersIn, ranksText } from "../words/ranks";

export interface EventRow {
  key: number;
  event: string;
  wallNs: number;
  category: string;
  severity: Severity;
  text: string;
  /** The ranks concerned; several for merged events. */
  ranks: number[];
}

/** Newest first. */
export function eventRows(events: readonly RunEvent[]): EventRow[] {
  const rows: EventRow[] = [];
  for (let at = 0; at < events.length; ) {
    const first = events[at] as RunEvent;
    let end = at + 1;
    while (end < events.length && sameEnding(first, events[end] as RunEvent)) end += 1;
    const ranks = events.slice(at, end).flatMap((event) => (typeof event.rank === "number" ? [event.rank] : numbersIn(event["culprits"])));
    if (end - at > 1) ranks.sort((one, two) => one - two);
    const text = end - at === 1 ? first.text : `${ranksText(ranks, true)} ${first.text_of_ranks}`;
    rows.push({ key: first.number, event: first.event, wallNs: first.wall_ns, category: first.category, severity: first.severity, text, ranks });
    at = end;
  }
  return rows.reverse();
}

/** The step of an event; null before the first step ended, and for `rank_start`, which is noticed only at the first step. */
export function stepOfEvent(event: Pick<RunEvent, "event" | "wall_ns">, steps: { first: number; step: (wallNs: number) => number | null }): number | null {
  const step = event.event === "rank_start" ? null : steps.step(event.wall_ns);
  return step === null || step < steps.first + 1 ? null : Math.floor(step);
}

function sameEnding(one: RunEvent, other: RunEvent): boolean {
  return one.text_of_ranks !== undefined && one.event === other.event && one.text_of_ranks === other.text_of_ranks;
}
