/** Events as sentences, and many of a kind as one. Every kind that agents, hubs and the store write is here; a test holds it to that. Pure. */

import type { RunEvent, Severity } from "../api/documents";
import { duration, stepsText } from "../ui/format";
import { codeText } from "./endings";
import { evidenceRows, flat, isRecord, shown } from "./evidence";
import { nameOf } from "./names";
import { countOf, numbersIn, ranksText, spansText } from "./ranks";

interface EventKind {
  /** In a list of kinds. */
  name: string;
  severity: Severity | ((event: RunEvent) => Severity);
  say: (event: RunEvent) => string;
}

const STATES: Readonly<Record<string, string>> = { exited: "ended in order", exception: "ended by an exception", vanished: "is gone without a word", running: "still ran when it was last heard of" };
/** Of several ranks, where that is said otherwise. */
const STATES_OF_MANY: Readonly<Record<string, string>> = { vanished: "are gone without a word", running: "still ran when they were last heard of" };
const REFUSALS: Readonly<Record<string, string>> = { key: "another key", token: "a wrong token" };

const seconds = (value: unknown): string => (typeof value === "number" ? duration(value * 1e9) : "some time");
const said = (value: unknown): string => (typeof value === "string" ? value : "");
const node = (event: RunEvent): string => `Node ${String(event.node)}${said(event["host"]) ? ` (${said(event["host"])})` : ""}`;
const host = (event: RunEvent): string => (said(event["host"]) ? ` on ${said(event["host"])}` : "");

export const EVENTS: Readonly<Record<string, EventKind>> = {
  agent_start: { name: "recording", severity: "info", say: (event) => `Recording began${host(event)}.` },
  agent_end: { name: "recording", severity: "info", say: (event) => `Recording ended${host(event)}${endText(event["end"])}.` },
  hub_start: { name: "hub", severity: "info", say: () => "The hub of the job began." },
  node_joined: { name: "nodes", severity: "info", say: (event) => `${node(event)} joined${event["late"] === true ? ", late" : ""}.` },
  node_replaced: { name: "nodes", severity: "warning", say: (event) => `${node(event)} took the place of ${said(event["before"]) || "another"}.` },
  node_absent: { name: "nodes", severity: "warning", say: (event) => `Not heard of yet: ${numbersIn(event["nodes"]).length === 1 ? "node" : "nodes"} ${spansText(numbersIn(event["nodes"]))}.` },
  node_lost: { name: "nodes", severity: "critical", say: (event) => `${node(event)} has not been heard of for ${seconds(event["silent_s"])}.` },
  node_back: { name: "nodes", severity: "info", say: (event) => `${node(event)} is back after ${seconds(event["silent_s"])}.` },
  node_bye: { name: "nodes", severity: (event) => (failed(event["end"]) ? "warning" : "info"), say: (event) => `${node(event)} ended${endText(event["end"])}.` },
  clock_skew: { name: "nodes", severity: "warning", say: (event) => `The clock of ${node(event).replace("Node", "node")} is ${typeof event["offset_ns"] === "number" ? duration(Math.abs(event["offset_ns"])) : "much"} ${Number(event["offset_ns"]) < 0 ? "behind" : "ahead"}; times are corrected.` },
  hub_lost: { name: "hub", severity: "warning", say: (event) => `The hub cannot be reached: ${said(event["why"]) || "it does not answer"}. Recording goes on.` },
  hub_found: { name: "hub", severity: "info", say: (event) => `The hub is there again after ${seconds(event["away_s"])}.` },
  hub_refused: { name: "hub", severity: "critical", say: (event) => `The hub does not take this node in: ${said(event["why"])}.` },
  refused: { name: "refused", severity: "warning", say: (event) => `Somebody at ${said(event["source"]) || "an unknown address"} was turned away: ${said(event["why"]) || refusal(event["reason"])}.` },
  refusals: { name: "refused", severity: "warning", say: (event) => `Turned away for ${refusal(event["reason"])}: ${countOf(Number(event["count"]) || 0, "time")} so far.` },
  refused_in_all: { name: "refused", severity: "info", say: (event) => `Turned away in all: ${isRecord(event["counts"]) ? Object.entries(event["counts"]).map(([why, times]) => `${refusal(why)} ${String(times)}×`).join(", ") : "some"}.` },
  rank_start: { name: "ranks", severity: "info", say: (event) => `Rank ${event.rank ?? "?"} began${host(event)}.` },
  rank_end: { name: "ranks", severity: (event) => (event["state"] === "exited" ? "info" : "critical"), say: rankEnd },
  hang: { name: "hangs", severity: "critical", say: (event) => `The job stands still${inSteps(event["steps"])}. ${said(event["title"])}` },
  hang_over: { name: "hangs", severity: "warning", say: (event) => `The job goes on after ${seconds(event["seconds"])} of standing still.` },
  not_a_hang: { name: "hangs", severity: "info", say: (event) => `No progress for a while, but no hang: ${said(event["reason"])}` },
  on_hang: { name: "hangs", severity: "warning", say: (event) => `Because of the hang Stepscope ${said(event["action"]) || "did what it was told to"}.` },
  on_hang_end: { name: "hangs", severity: "info", say: (event) => `The command for hangs ended${typeof event["exit_code"] === "number" ? `, ${codeText(event["exit_code"])}` : ""}.` },
  probes: { name: "network", severity: "info", say: (event) => said(event["message"]) || `Packets that came to the port of the probes and were none: ${flatten(event["ignored"])}.` },
  context: { name: "recording", severity: "info", say: (event) => (isRecord(event["git"]) ? `The code is at commit ${said(event["git"]["commit"]).slice(0, 10)}${event["git"]["dirty"] === true ? ", with changes" : ""}.` : "The code is in no git repository.") },
  warning: { name: "warnings", severity: "warning", say: (event) => sentence(said(event["message"])) },
  note: { name: "notes", severity: "info", say: (event) => `Rank ${event.rank ?? "?"} noted${typeof event["step"] === "number" ? ` in step ${event["step"]}` : ""}: ${flatten(event["values"])}` },
};

const KNOWN = ["number", "node", "wall_ns", "event", "schema"];

export function eventText(event: RunEvent): string {
  const kind = Object.hasOwn(EVENTS, event.event) ? EVENTS[event.event] : undefined;
  if (kind !== undefined) return kind.say(event);
  const rest = Object.fromEntries(Object.entries(event).filter(([key]) => !KNOWN.includes(key)));
  const more = flatten(rest);
  return `${sentence(nameOf(event.event)).replace(/\.$/, "")}${more ? `: ${more}` : "."}`;
}

export function severityOf(event: RunEvent): Severity {
  const found = Object.hasOwn(EVENTS, event.event) ? EVENTS[event.event]?.severity : undefined;
  return typeof found === "function" ? found(event) : (found ?? "info");
}

export function kindName(event: string): string {
  return (Object.hasOwn(EVENTS, event) ? EVENTS[event]?.name : undefined) ?? nameOf(event);
}

/** Which step it was; null before the first had ended, and of a rank that begins: that is noticed only when it makes steps. */
export function stepOfEvent(event: Pick<RunEvent, "event" | "wall_ns">, steps: { first: number; step: (wallNs: number) => number | null }): number | null {
  const step = event.event === "rank_start" ? null : steps.step(event.wall_ns);
  return step === null || step < steps.first + 1 ? null : Math.floor(step);
}

export interface EventRow {
  key: number;
  event: string;
  wallNs: number;
  kind: string;
  severity: Severity;
  text: string;
  /** Whom it is about; many where many were gathered. */
  ranks: number[];
}

/** Newest first; ranks that began or ended in the same way, one after the other, in one row. */
export function eventRows(events: readonly RunEvent[]): EventRow[] {
  const rows: EventRow[] = [];
  for (let at = 0; at < events.length; ) {
    const first = events[at] as RunEvent;
    let end = at + 1;
    while (end < events.length && gathers(first, events[end] as RunEvent)) end += 1;
    const ranks = events.slice(at, end).flatMap((event) => ranksOf(event));
    if (end - at > 1) ranks.sort((one, two) => one - two);
    const text = end - at === 1 ? eventText(first) : `${ranksText(ranks, true)} ${first.event === "rank_start" ? "began" : manyEnd(said(first["state"]), first["oom_kill"] === true)}.`;
    rows.push({ key: first.number, event: first.event, wallNs: first.wall_ns, kind: kindName(first.event), severity: severityOf(first), text, ranks });
    at = end;
  }
  return rows.reverse();
}

function gathers(one: RunEvent, other: RunEvent): boolean {
  if (one.event !== other.event) return false;
  if (one.event === "rank_start") return true;
  return one.event === "rank_end" && one["state"] === other["state"] && one["oom_kill"] === other["oom_kill"];
}

function ranksOf(event: RunEvent): number[] {
  if (typeof event.rank === "number") return [event.rank];
  return [...numbersIn(event["culprits"])];
}

function manyEnd(state: string, killed: boolean): string {
  return killed ? "were killed by the kernel for want of memory" : (STATES_OF_MANY[state] ?? STATES[state] ?? state);
}

function rankEnd(event: RunEvent): string {
  const how = event["oom_kill"] === true ? "was killed by the kernel for want of memory" : (STATES[said(event["state"])] ?? (said(event["state"]) || "ended"));
  const call = isRecord(event["collective"]) ? `; its last call was ${String(event["collective"]["op"] ?? "a collective")}` : "";
  return `Rank ${event.rank ?? "?"} ${how}${host(event)}${call}.`;
}

function endText(end: unknown): string {
  if (!isRecord(end) || typeof end["status"] !== "string") return "";
  const code = end["exit_code"];
  if (typeof code !== "number" || code === 0) return `: ${end["status"]}`;
  // Whether that was a failure or a crash the run's own status says: by more than the code.
  return end["status"] === "failed" && code > 0 ? `: ${codeText(code)}` : `: ${end["status"]}, ${codeText(code)}`;
}

function failed(end: unknown): boolean {
  return isRecord(end) && end["status"] !== "finished" && end["status"] !== "orphaned" && end["status"] !== undefined;
}

function refusal(reason: unknown): string {
  const word = said(reason);
  return REFUSALS[word] ?? (word ? nameOf(word) : "an unknown reason");
}

function flatten(value: unknown): string {
  return isRecord(value) ? evidenceRows(value).map((row) => `${row.name} ${flat(row.value)}`).join(", ") : value === undefined ? "" : flat(shown("", value, 0));
}

function sentence(text: string): string {
  const trimmed = text.trim();
  if (!trimmed) return "A warning without words.";
  const start = trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?…]$/.test(start) ? start : `${start}.`;
}

function inSteps(steps: unknown): string {
  const [first, last] = numbersIn(steps);
  return first === undefined || last === undefined ? "" : ` in ${stepsText([first, last])}`;
}
