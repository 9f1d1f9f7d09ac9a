/** A hang in words: which ranks, since when, in which call, and where each rank is. Pure. */

import type { Call, Hang, Place, RankThere } from "../api/hang-documents";
import { duration, stepsText } from "../ui/format";

/** Process states by the kernel's letter. */
const STATES: Readonly<Record<string, string>> = { R: "runs", S: "sleeps", D: "waits for a disk", T: "is stopped", t: "is stopped by a debugger", Z: "is dead", X: "is dead", I: "is idle" };
const STATES_THEN: typeof STATES = { R: "ran", S: "slept", D: "waited for a disk", T: "was stopped", t: "was stopped by a debugger", Z: "was dead", X: "was dead", I: "was idle" };
const ENDINGS = { recovered: "then continued", ended: "until the job ended", aborted: "until the job was aborted" };

/** Like `group_name` of the records: torch calls a group without a name "undefined". */
export function groupName(call: { group: string; description: string }): string {
  if (call.description && call.description !== "undefined") return call.description;
  return /^\d+$/.test(call.group) ? `group ${call.group}` : call.group || "a group";
}

/** `all_reduce number 25 of default_pg, [512] Float`. */
export function callText(call: Call | null, sizes = true): string {
  if (call === null) return "";
  const number = call.sequence === null ? "" : ` number ${call.sequence}`;
  const peer = call.peer === null ? "" : ` with rank ${call.peer}`;
  const shape = sizes ? [call.sizes, call.dtypes].filter(Boolean).join(" ") : "";
  return `${call.op || "a collective"}${number} of ${groupName(call)}${peer}${shape ? `, ${shape}` : ""}`;
}

/** Duration of the hang, as far as known. `nowNs` as below. */
function stoodNs(hang: Hang, nowNs: number | null): number {
  return Math.max(hang.over_wall_ns ?? nowNs ?? 0, hang.declared_wall_ns) - hang.stopped_wall_ns;
}

/** `nowNs`: the current time by the viewer's clock while the hang lasts; null: the run has ended. */
export function sinceText(hang: Hang, nowNs: number | null): string {
  const long = duration(stoodNs(hang, nowNs));
  const where = hang.steps ? ` in ${stepsText(hang.steps)}` : "";
  const usual = hang.step_s ? `; a step usually takes ${duration(hang.step_s * 1e9)}` : "";
  if (hang.over === null && nowNs === null) return `No progress for ${long}${where} when this was written; how it ended is unknown${usual}.`;
  return hang.over === null ? `No progress for ${long}${where}${usual}.` : `It hung for ${long}${where}, ${ENDINGS[hang.over]}${usual}.`;
}

export interface Culprits {
  ranks: number[];
  reason: string;
  at: Place | null;
}

/** Culprits grouped by reason and place. */
export function culpritsOf(hang: Hang): Culprits[] {
  const found = new Map<string, Culprits>();
  for (const { rank, reason, at } of hang.culprits) {
    const key = JSON.stringify([reason, at]);
    const known = found.get(key);
    if (known) known.ranks.push(rank);
    else found.set(key, { ranks: [rank], reason, at });
  }
  return [...found.values()];
}

export interface Whereabouts {
  ranks: number[];
  hosts: string[];
  doing: string;
  at: Place | null;
  steps: number[];
  phases: string[];
  state: string;
  cpu: [number, number] | null;
  silentS: number;
  culprit: boolean;
  workers: Record<string, unknown>[];
}

/** Where each rank is, grouped by call and line, culprits first. `now`: the hang is ongoing. */
export function whereabouts(hang: Hang, now: boolean): Whereabouts[] {
  const guilty = new Set(hang.culprits.map((one) => one.rank));
  const found = new Map<string, RankThere[]>();
  for (const rank of hang.ranks) {
    const key = JSON.stringify([rank.alive, callText(rank.waiting_in), rank.at, rank.process_state, rank.gil_held === true, guilty.has(rank.rank)]);
    const known = found.get(key);
    if (known) known.push(rank);
    else found.set(key, [rank]);
  }
  const rows = [...found.values()].map((ranks) => there(ranks, guilty, now));
  return rows.sort((one, two) => Number(two.culprit) - Number(one.culprit) || one.ranks.length - two.ranks.length);
}

function there(ranks: RankThere[], guilty: ReadonlySet<number>, now: boolean): Whereabouts {
  const [first] = ranks;
  const shares = ranks.map((one) => one.cpu_share).filter((share): share is number => share !== null);
  const states = now ? STATES : STATES_THEN;
  const state = first === undefined || !first.alive ? (now ? "is gone" : "was gone") : (states[first.process_state] ?? (first.process_state || "unknown"));
  return {
    ranks: ranks.map((one) => one.rank),
    hosts: [...new Set(ranks.map((one) => one.host).filter(Boolean))],
    doing: first?.waiting_in ? callText(first.waiting_in) : first?.alive === false ? "" : "not in a collective",
    at: first?.at ?? null,
    steps: unique(ranks.map((one) => one.step)),
    phases: [...new Set(ranks.map((one) => one.phase).filter(Boolean))],
    state: first?.gil_held === true ? `${state}, ${now ? "holds" : "held"} the GIL` : state,
    cpu: shares.length > 0 ? [Math.min(...shares), Math.max(...shares)] : null,
    silentS: Math.max(...ranks.map((one) => one.since_s)),
    culprit: ranks.some((one) => guilty.has(one.rank)),
    workers: ranks.flatMap((one) => one.workers),
  };
}

/** The ranks of a wait cycle, parsed from its sentences; null: they do not form a cycle. */
export function circleOf(cycle: readonly string[]): { rank: number; how: string }[] | null {
  const stops = cycle.map((line) => /^rank (\d+) wait(?:s|ed) for rank (\d+)(?: in (.*))?$/.exec(line));
  if (stops.length < 2 || stops.some((stop) => stop === null)) return null;
  const closed = stops.every((stop, at) => stop?.[2] === stops[(at + 1) % stops.length]?.[1]);
  return closed ? stops.map((stop) => ({ rank: Number(stop?.[1]), how: stop?.[3] ?? "" })) : null;
}

/** State and place of a worker process. */
export function workerText(worker: Readonly<Record<string, unknown>>, now: boolean): string {
  const does = (now ? STATES : STATES_THEN)[String(worker["state"] ?? "")] ?? "";
  const at = typeof worker["at"] === "string" ? ` at ${worker["at"]}` : "";
  return `${worker["kind"] === "dataloader" ? "DataLoader worker" : "process"} ${String(worker["pid"] ?? "")} ${does}${at}`.trim();
}

function unique(values: readonly (number | null)[]): number[] {
  return [...new Set(values.filter((one): one is number => one !== null))].sort((one, two) => one - two);
}
