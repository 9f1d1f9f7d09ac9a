/** Problems of a node, in words. Pure. */

import type { NodeRow } from "../api/documents";
import { duration } from "../ui/format";
import { isRecord } from "./evidence";
import { countOf } from "./ranks";

const SILENT_NS = 30e9;
const SKEW_NS = 1e9;
const FULL = 0.05;

/** The current time by the hub's clock: its last contact with any node. */
export function hubNow(nodes: readonly NodeRow[]): number {
  return Math.max(0, ...nodes.flatMap((node) => [node.heard_wall_ns ?? 0, node.sample?.["wall_ns"] ?? 0]));
}

export function usedMemory(node: NodeRow): number | null {
  const [total, left] = [node.sample?.["mem_total"], node.sample?.["mem_available"]];
  return typeof total === "number" && typeof left === "number" && total > 0 ? 1 - left / total : null;
}

/** `live`: the run is active, so that silence is a problem. */
export function problemsOf(node: NodeRow, nowNs: number, live: boolean): string[] {
  const found: string[] = [];
  if (live && node.bye === null && node.heard_wall_ns !== null && nowNs - node.heard_wall_ns > SILENT_NS) found.push(`silent for ${duration(nowNs - node.heard_wall_ns)}`);
  if (live && node.live_ranks < node.ranks) found.push(`${countOf(node.ranks - node.live_ranks, "rank")} ended`);
  if (isRecord(node.bye) && typeof node.bye["status"] === "string" && !["finished", "orphaned"].includes(node.bye["status"])) found.push(`ended: ${node.bye["status"]}`);
  if (!live && node.bye === null && node.number !== null && node.number > 0) found.push("did not report how it ended");
  if (node.refused > 0) found.push(`${countOf(node.refused, "frame")} refused`);
  if (Math.abs(node.offset_ns ?? 0) > SKEW_NS) found.push("clock is off; times are corrected");
  const used = usedMemory(node);
  if (used !== null && used > 1 - FULL) found.push("memory is nearly full");
  for (const [key, word] of [["net_errors_ps", "network errors"], ["net_drops_ps", "dropped packets"], ["ib_errors_ps", "InfiniBand errors"]] as const) {
    if ((node.sample?.[key] ?? 0) > 0) found.push(word);
  }
  return found;
}

/** `38–45%`; a single value if all are written alike, – without any. */
export function rangeText(values: readonly (number | null | undefined)[], shown: (value: number) => string): string {
  const known = values.filter((value): value is number => typeof value === "number" && Number.isFinite(value));
  if (known.length === 0) return "–";
  const [least, most] = [shown(Math.min(...known)), shown(Math.max(...known))];
  return least === most ? most : `${least} – ${most}`;
}
