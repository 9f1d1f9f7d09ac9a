/** Texts for the header of a run: its status, how many ranks, and the steps of a hang. Pure. */

import type { Finding, Severity, Status } from "../api/documents";
import { count } from "../ui/format";
import { countOf } from "./ranks";

export type Tone = "" | "good" | "warning" | "critical" | "live";
/** What the hub says about how a run ended. */
export type Ending = Pick<Status, "status" | "status_text" | "status_severity">;

const LOOKS: Readonly<Record<Severity, [Tone, string]>> = { info: ["good", "✓"], warning: ["warning", "■"], critical: ["critical", "✖"] };
/** For hubs and copies of earlier versions, which send the status alone. */
const SEVERITIES: Readonly<Record<string, Severity>> = { running: "info", finished: "info", interrupted: "warning", unfinished: "warning" };

/** `killed (SIGKILL)`: as the hub sent it. */
export function statusText({ status, status_text: text }: Ending): string {
  return text ?? status;
}

export function statusLook(of: Ending): [Tone, string] {
  if (statusText(of) === "running") return ["live", "●"];
  return LOOKS[of.status_severity ?? SEVERITIES[of.status] ?? "critical"];
}

/** `8 ranks`, `7 of 8 ranks`, `7 of 8 ranks hung`. `going`: the status is current. */
export function ranksWords(status: Pick<Status, "ranks" | "live_ranks" | "still_ranks" | "world_size" | "over">, going: boolean): string {
  const { ranks, live_ranks: live, still_ranks: still = 0 } = status;
  if (ranks === 0) return status.world_size > 0 ? `${count(status.world_size)} ranks expected` : status.over ? "no rank" : "no rank yet";
  if (going && live === 0) return ranks === 1 ? "the rank has ended" : `all ${count(ranks)} ranks have ended`;
  if (going && still > 0) return `${still < ranks ? `${count(still)} of ${countOf(ranks, "rank")}` : countOf(ranks, "rank")} hung`;
  if (going && live < ranks) return `${count(live)} of ${countOf(ranks, "rank")}`;
  return countOf(ranks, "rank");
}

/** First and last step of an ongoing hang; null: there is none. */
export function stillIn(findings: readonly Pick<Finding, "kind" | "steps" | "evidence">[]): [number, number] | null {
  return findings.find(({ kind, evidence }) => kind.startsWith("hang_") && (evidence["over"] ?? null) === null)?.steps ?? null;
}

/** Explains why the figures end before the step of the hang. */
export function stillTitle(whole: number): string {
  return whole < 0 ? "No step has ended yet." : `Step ${count(whole)} was the last to end; the figures cover completed steps.`;
}
