/** Collectives as rows of a sortable table. Pure. */

import type { CollectiveGroup, MeasuredOnDevice } from "../api/documents";
import { count, duration, percent } from "../ui/format";
import { isRecord } from "./evidence";
import { groupName } from "./hang";

/** Below this, no percentage: one of three is not "33%". */
const SHARE_FROM = 20;

/** Which ranks arrived last in a group: see docs/schema.md, arrivals. */
export interface Arrivals {
  steps: number;
  collectives: number;
  transferMs: number | null;
  skewMs: number | null;
  /** Sorted by how often they arrived last. */
  ranks: { rank: number; last: number; lateMs: number; waitMs: number }[];
}

export interface ExchangeRow {
  key: string;
  group: string;
  kind: string;
  backend: string;
  size: number;
  ranks: number[];
  timed: boolean;
  op: string;
  count: number | null;
  bytes: number | null;
  exposedMs: number | null;
  overlappedMs: number | null;
  /** The transfer itself, per step. */
  transferMs: number | null;
  /** Mean wait for later ranks, per step; known if the device was timed. */
  waitMs: number | null;
  algorithmPerS: number | null;
  busPerS: number | null;
}

export type SortBy = "group" | "op" | "count" | "bytes" | "exposedMs" | "overlappedMs" | "transferMs";

/** The name of a group, or its purpose (`data`) if it has none. */
export function groupTitle(group: Pick<CollectiveGroup, "name" | "description" | "kind">): string {
  if (!group.name && !group.description) return group.kind;
  return groupName({ group: group.name, description: group.description });
}

export function exchangeRows(groups: readonly CollectiveGroup[]): ExchangeRow[] {
  return groups.flatMap((group, at) =>
    group.ops.map((op) => ({
      key: `${at} ${op.op}`,
      group: groupTitle(group),
      kind: group.kind,
      backend: group.backend,
      size: group.size,
      ranks: group.ranks,
      timed: group.timed,
      op: op.op,
      count: op.count,
      bytes: op.bytes,
      exposedMs: op.exposed_ms,
      overlappedMs: op.overlapped_ms,
      transferMs: op.transfer_ms ?? null,
      waitMs: op.wait_ms ?? null,
      algorithmPerS: op.algorithm_bytes_per_s ?? null,
      busPerS: op.bus_bytes_per_s ?? null,
    })),
  );
}

/** Text ascending, numbers descending; unknown values last. */
export function sorted(rows: readonly ExchangeRow[], by: SortBy, backwards: boolean): ExchangeRow[] {
  const sign = backwards ? -1 : 1;
  return [...rows].sort((one, two) => {
    const [a, b] = [one[by], two[by]];
    if (a === null || b === null) return Number(a === null) - Number(b === null);
    if (typeof a === "string" || typeof b === "string") return sign * String(a).localeCompare(String(b));
    return sign * (b - a);
  });
}

/** How collectives were measured on the device; the same text as in `summary.txt`. */
export function measuredText(measured: MeasuredOnDevice | null | undefined): string {
  if (!measured) return "";
  const { steps, of, missed, last_unread: last, exposed_ms: exposed } = measured;
  const parts = [`Measured on the device (NCCL's Flight Recorder) in ${count(steps)} of ${count(of)} steps`];
  if (missed > 0) parts.push(missed === 1 ? "1 step was overwritten before it could be read" : `${count(missed)} steps were overwritten before they could be read`);
  if (last > 0) parts.push(last === 1 ? "the last step was not read" : `the last ${count(last)} steps were not read`);
  if (exposed !== null) parts.push(`computation waits ${duration(exposed * 1e6)} per step for it`);
  return `${parts.join("; ")}.`;
}

export function timesOf(times: number, all: number): string {
  return all < SHARE_FROM ? `${count(times)} of ${count(all)}` : `${percent(times / all)} of ${count(all)}`;
}

export function arrivalsOf(value: unknown): Arrivals | null {
  if (!isRecord(value)) return null;
  const number = (key: string): number | null => (typeof value[key] === "number" ? value[key] : null);
  const ranks = (Array.isArray(value["ranks"]) ? value["ranks"] : []).filter(isRecord).map((one) => ({ rank: Number(one["rank"]), last: Number(one["last"] ?? 0), lateMs: Number(one["late_ms"] ?? 0), waitMs: Number(one["wait_ms"] ?? 0) }));
  return {
    steps: number("steps") ?? 0,
    collectives: number("collectives") ?? 0,
    transferMs: number("transfer_ms"),
    skewMs: number("skew_ms"),
    ranks: ranks.filter((one) => Number.isFinite(one.rank)).sort((one, two) => two.last - one.last || two.lateMs - one.lateMs),
  };
}
