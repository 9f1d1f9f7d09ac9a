/** Collectives as rows of a sortable table. Pure. */

import { isRecord } from "../api/copy-bytes";
import type { CollectiveGroup } from "../api/documents";
import { count, percent } from "../ui/format";

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

/** The description of a group, else its name, else its purpose (`data`); torch calls a group without a name "undefined". */
export function groupTitle({ name, description, kind }: Pick<CollectiveGroup, "name" | "description" | "kind">): string {
  if (description && description !== "undefined") return description;
  return /^\d+$/.test(name) ? `group ${name}` : name || kind;
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
