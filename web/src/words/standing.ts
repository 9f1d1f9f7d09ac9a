/** How a run stands, in the words of its header: how many ranks, and where a job that does not go on is. Pure. */

import type { Finding, Status } from "../api/documents";
import { count } from "../ui/format";
import { countOf } from "./ranks";

/** `8 ranks`, `7 of 8 ranks`, `7 of 8 ranks stand still`. `going`: what the hub says is of now. */
export function ranksWords(status: Pick<Status, "ranks" | "live_ranks" | "still_ranks" | "world_size" | "over">, going: boolean): string {
  const { ranks, live_ranks: live, still_ranks: still = 0 } = status;
  if (ranks === 0) return status.world_size > 0 ? `${count(status.world_size)} ranks expected` : status.over ? "no rank" : "no rank yet";
  if (going && live === 0) return ranks === 1 ? "the rank has ended" : `all ${count(ranks)} ranks have ended`;
  if (going && still > 0) return `${still < ranks ? `${count(still)} of ${countOf(ranks, "rank")}` : countOf(ranks, "rank")} ${still === 1 ? "stands" : "stand"} still`;
  if (going && live < ranks) return `${count(live)} of ${countOf(ranks, "rank")}`;
  return countOf(ranks, "rank");
}

/** The first and the last of the steps that a job stands in; null: it goes on. */
export function stillIn(findings: readonly Pick<Finding, "kind" | "steps" | "evidence">[]): [number, number] | null {
  return findings.find(({ kind, evidence }) => kind.startsWith("hang_") && (evidence["over"] ?? null) === null)?.steps ?? null;
}

/** Why figures are of another step than the one it stands in. */
export function stillTitle(whole: number): string {
  return whole < 0 ? "No step has ended yet." : `Step ${count(whole)} was the last that ended; figures are of steps that did.`;
}
