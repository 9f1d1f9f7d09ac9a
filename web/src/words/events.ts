/** Events as sentences, with similar ones merged. Covers every kind that agents, hubs and the store write (tested). Pure. */

import type { RunEvent, Severity } from "../api/documents";
import { duration, stepsText } from "../ui/format";
import { codeText } from "./endings";
import { evidenceRows, flat, isRecord, shown } from "./evidence";
import { nameOf } from "./names";
import { countOf, numbersIn, ranksText, spansText } from "./ranks";

interface EventKind {
  /** Name in the filter. */
  name: string;
  severity: Severity | ((event: RunEvent) => Severity);
  say: (event: RunEvent) => string;
}

const STATES: Readonly<Record<string, string>> = { exited: "exited normally", exception: "ended with an exception", vanished: "vanished", running: "was still running when last seen" };
/** Wording for several ranks, if it differs. */
const STATES_OF_MANY: Readonly<Record<string, string>> = { running: "were still running when last seen" };
const REFUSALS: Readonly<Record<string, string>> = { key: "a different key", token: "a wrong token" };

const seconds = (value: unknown): string => (typeof value === "number" ? duration(value * 1e9) : "some time");
const said = (value: unknown): string => (typeof value === "string" ? value : "");
const node = (event: RunEvent): string => `Node ${String(event.node)}${said(event["host"]) ? ` (${said(event["host"])})` : ""}`;
const host = (event: RunEvent): string => (said(event["host"]) ? ` on ${said(event["host"])}` : "");

export const EVENTS: Readonly<Record<string, EventKind>> = {
  agent_start: { name: "recording", severity: "info", say: (event) => `Recording started${host(event)}.` },
  agent_end: { name: "recording", severity: "info", say: (event) => `Recording ended${host(event)}${endText(event["end"])}.` },
  hub_start: { name: "hub", severity: "info", say: () => "The job's hub started." },
  node_joined: { name: "nodes", severity: "info", say: (event) => `${node(event)} joined${event["late"] === true ? ", late" : ""}.` },
  node_replaced: { name: "nodes", severity: "warning", say: (event) => `${node(event)} replaced ${said(event["before"]) || "another"}.` },
  node_absent: { name: "nodes", severity: "warning", say: (event) => `Not connected yet: ${numbersIn(event["nodes"]).length === 1 ? "node" : "nodes"} ${spansText(numbersIn(event["nodes"]))}.` },
  node_lost: { name: "nodes", severity: "critical", say: (event) => `${node(event)} has been silent for ${seconds(event["silent_s"])}.` },
  node_back: { name: "nodes", severity: "info", say: (event) => `${node(event)} is back after ${seconds(event["silent_s"])}.` },
  node_bye: { name: "nodes", severity: (event) => (failed(event["end"]) ? "warning" : "info"), say: (event) => `${node(event)} ended${endText(event["end"])}.` },
  clock_skew: { name: "nodes", severity: "warning", say: (event) => `The clock of ${node(event).replace("Node", "node")} is ${typeof event["offset_ns"] === "number" ? duration(Math.abs(event["offset_ns"])) : "much"} ${Number(event["offset_ns"]) < 0 ? "behind" : "ahead"}; times are corrected.` },
  hub_lost: { name: "hub", severity: "warning", say: (event) => `The hub cannot be reached: ${said(event["why"]) || "it does not answer"}. Recording continues.` },
  hub_found: { name: "hub", severity: "info", say: (event) => `The hub is reachable again after ${seconds(event["away_s"])}.` },
  hub_refused: { name: "hub", severity: "critical", say: (event) => `The hub rejected this node: ${said(event["why"])}.` },
  refused: { name: "refused", severity: "warning", say: (event) => `A connection from ${said(event["source"]) || "an unknown address"} was rejected: ${said(event["why"]) || refusal(event["reason"])}.` },
  refusals: { name: "refused", severity: "warning", say: (event) => `Rejected for ${refusal(event["reason"])}: ${countOf(Number(event["count"]) || 0, "time")} so far.` },
  refused_in_all: { name: "refused", severity: "info", say: (event) => `Rejected in total: ${isRecord(event["counts"]) ? Object.entries(event["counts"]).map(([why, times]) => `${refusal(why)} ${String(times)}×`).join(", ") : "some"}.` },
  rank_start: { name: "ranks", severity: "info", say: (event) => `Rank ${event.rank ?? "?"} started${host(event)}.` },
  rank_end: { name: "ranks", severity: (event) => (event["state"] === "exited" ? "info" : "critical"), say: rankEnd },
  hang: { name: "hangs", severity: "critical", say: (event) => `The job hangs${inSteps(event["steps"])}. ${said(event["title"])}` },
  hang_over: { name: "hangs", severity: "warning", say: (event) => `The job continues after a hang of ${seconds(event["seconds"])}.` },
  not_a_hang: { name: "hangs", severity: "info", say: (event) => `No progress for a while, but no hang: ${said(event["reason"])}` },
  on_hang: { name: "hangs", severity: "warning", say: (event) => `Because of the hang, Stepscope ${said(event["action"]) || "acted as configured"}.` },
  on_hang_end: { name: "hangs", severity: "info", say: (event) => `The --on-hang command ended${typeof event["exit_code"] === "number" ? `, ${codeText(event["exit_code"])}` : ""}.` },
  probes: { name: "network", severity: "info", say: (event) => said(event["message"]) || `Ignored packets on the probe port: ${flatten(event["ignored"])}.` },
  context: { name: "recording", severity: "info", say: (event) => (isRecord(event["git"]) ? `The code is at commit ${said(event["git"]["commit"]).slice(0, 10)}${event["git"]["dirty"] === true ? ", with changes" : ""}.` : "The code is not in a git repository.") },
  warning: { name: "warnings", severity: "warning", say: (event) => sentence(said(event["message"])) },
  finding_opened: { name: "findings", severity: "critical", say: (event) => `Found${inStep(event)}: ${said(event["title"])}` },
  finding_changed: { name: "findings", severity: "info", say: (event) => `Less severe${inStep(event)}: ${said(event["title"])}` },
  finding_resolved: { name: "findings", severity: "info", say: (event) => `No longer found${inStep(event)}: ${said(event["title"])}` },
  note: { name: "notes", severity: "info", say: (event) => `Rank ${event.rank ?? "?"} noted${inStep(event)}: ${flatten(event["values"])}` },
};

function inStep(event: RunEvent): string {
  return typeof event["step"] === "number" ? ` in step ${event["step"]}` : "";
}

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

/** The step of an event; null before the first step ended, and for `rank_start`, which is noticed only at the first step. */
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
  /** The ranks concerned; several for merged events. */
  ranks: number[];
}

/** Newest first; consecutive ranks that started or ended in the same way are merged. */
export function eventRows(events: readonly RunEvent[]): EventRow[] {
  const rows: EventRow[] = [];
  for (let at = 0; at < events.length; ) {
    const first = events[at] as RunEvent;
    let end = at + 1;
    while (end < events.length && gathers(first, events[end] as RunEvent)) end += 1;
    const ranks = events.slice(at, end).flatMap((event) => ranksOf(event));
    if (end - at > 1) ranks.sort((one, two) => one - two);
    const text = end - at === 1 ? eventText(first) : `${ranksText(ranks, true)} ${first.event === "rank_start" ? "started" : manyEnd(said(first["state"]), first["oom_kill"] === true)}.`;
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
  return killed ? "were killed by the kernel (out of memory)" : (STATES_OF_MANY[state] ?? STATES[state] ?? state);
}

function rankEnd(event: RunEvent): string {
  const how = event["oom_kill"] === true ? "was killed by the kernel (out of memory)" : (STATES[said(event["state"])] ?? (said(event["state"]) || "ended"));
  const call = isRecord(event["collective"]) ? `; its last call was ${String(event["collective"]["op"] ?? "a collective")}` : "";
  return `Rank ${event.rank ?? "?"} ${how}${host(event)}${call}.`;
}

function endText(end: unknown): string {
  if (!isRecord(end) || typeof end["status"] !== "string") return "";
  const code = end["exit_code"];
  if (typeof code !== "number" || code === 0) return `: ${end["status"]}`;
  // The run's own status says whether it was a failure or a crash, from more than the exit code.
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
  if (!trimmed) return "A warning without text.";
  const start = trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?…]$/.test(start) ? start : `${start}.`;
}

function inSteps(steps: unknown): string {
  const [first, last] = numbersIn(steps);
  return first === undefined || last === undefined ? "" : ` in ${stepsText([first, last])}`;
}
