/** Findings and events as marks over steps; a click selects their steps and rank. */

import { batch } from "@preact/signals";
import type { Finding, RunEvent } from "../api/documents";
import type { Mark } from "../charts/marks";
import { unlessAll } from "../charts/window";
import type { StepClock } from "../run/align";
import type { OpenRun, View } from "../run/open-run";
import { stepsText } from "../ui/format";
import { numbersIn, ranksText } from "../words/ranks";

const NOT_A_PLACE = new Set(["healthy", "insufficient_data"]);

export function findingMarks(findings: readonly Finding[], choose: (finding: Finding) => void): Mark[] {
  return findings.flatMap((finding, at) => {
    if (finding.steps === null || NOT_A_PLACE.has(finding.kind)) return [];
    const [first, last] = finding.steps;
    return [{ key: `${at}/${finding.kind}`, first, last, tone: finding.severity, title: finding.title, onChoose: () => choose(finding) }];
  });
}

/** A tenth more at both sides, to show the steps before and after. */
export function around(first: number, last: number, whole: View): View | null {
  const more = Math.max(2, Math.round((last - first + 1) / 10));
  return unlessAll({ first: Math.max(whole.first, first - more), last: Math.min(whole.last, last + more) }, whole);
}

/** Show the steps and the rank of a finding. */
export function goTo(run: OpenRun, finding: Finding, whole: View): void {
  batch(() => {
    if (finding.steps !== null) run.view.value = around(finding.steps[0], finding.steps[1], whole);
    const [rank] = finding.ranks;
    if (rank !== undefined) run.rank.value = rank;
  });
}

/** Events that explain a curve: hangs, dead ranks, an unreachable hub. Equal events at one step are merged. */
export function eventMarks(events: readonly RunEvent[], findings: readonly Finding[], clock: StepClock, whole: View, choose: (step: number, rank: number | null) => void): Mark[] {
  const groups = new Map<string, { step: number; event: RunEvent; text: string; where: string; ranks: number[] }>();
  for (const event of events) {
    if (!["hang", "hang_over", "hub_lost"].includes(event.event) && !(event.event === "rank_end" && event.severity !== "info")) continue;
    // The finding about a hang knows its steps and whether it is over; the event only its declaration.
    const found = event.event === "hang" ? hangOf(event, findings) : undefined;
    const step = found?.steps ? within(found.steps[0], whole) : stepOf(event, clock, whole);
    if (step === null) continue;
    const where = found?.steps ? inText(found.steps, whole) : `${event.wall_ns > (clock.span?.[1] ?? Infinity) ? "after" : "at"} step ${step}`;
    const text = found?.title ?? event.text;
    const key = `${event.text_of_ranks ?? text}@${step}`;
    const group = groups.get(key) ?? { step, event, text, where, ranks: [] };
    if (event.rank !== undefined) group.ranks.push(event.rank);
    groups.set(key, group);
  }
  return [...groups].slice(-40).map(([key, { step, event, text, where, ranks }]) => {
    const words = ranks.length > 1 ? `${ranksText(ranks, true)} ${event.text_of_ranks ?? ""}` : text;
    return { key, first: step, last: step, tone: "event", title: `${words} (${where})`, onChoose: () => choose(step, ranks[0] ?? null) };
  });
}

/** Hangs and deaths after the last complete step are marked at that step. */
function stepOf(event: RunEvent, clock: StepClock, whole: View): number | null {
  const span = clock.span;
  if (span === null || event.wall_ns < span[0]) return null;
  const step = clock.step(event.wall_ns);
  return step === null ? whole.last : within(Math.floor(step), whole);
}

function within(step: number, whole: View): number {
  return Math.min(whole.last, Math.max(whole.first, step));
}

/** If several findings match, the first: they are sorted by severity. */
function hangOf(event: RunEvent, findings: readonly Finding[]): Finding | undefined {
  const culprits = JSON.stringify(numbersIn(event["culprits"]).sort((one, two) => one - two));
  return findings.find(({ kind, ranks }) => kind === event["kind"] && JSON.stringify(ranks) === culprits);
}

/** `in step 41, which did not end`: the chart has no such step. */
function inText(steps: [number, number], whole: View): string {
  return `in ${stepsText(steps)}${steps[1] > whole.last ? ", which did not end" : ""}`;
}
