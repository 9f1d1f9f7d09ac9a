/** Captures in words. */

import type { CaptureRecord, CapturesDocument, CaptureState } from "../api/capture-documents";
import { count, digits, stepsText } from "../ui/format";
import { ranksText } from "./ranks";

const REASONS: Record<CaptureRecord["reason"], string> = {
  request: "requested",
  finding: "because of a finding",
  schedule: "on schedule",
  baseline: "baseline of the first steps",
};

const STATES: Record<CaptureState, string> = {
  ordered: "ordered",
  profiling: "profiling",
  delivering: "delivering the traces",
  analyzing: "analyzing",
  done: "done",
  failed: "failed",
};

export function whyCaptured({ reason, finding, by }: CaptureRecord): string {
  if (reason === "finding" && finding !== "") return `because of: ${finding.replaceAll("_", " ")}`;
  return reason === "request" && by !== "" ? `requested by ${by}` : (REASONS[reason] ?? reason);
}

export function stateText(record: CaptureRecord): string {
  if (record.state === "ordered") return `ordered: starts at step ${count(record.order.at_step)}`;
  return STATES[record.state] ?? record.state;
}

/** The steps that were profiled, as far as the ranks have reported them. */
export function capturedSteps({ order, reports }: CaptureRecord): string {
  const known = reports.filter(({ first_step: first }) => first >= 0);
  const first = known.length > 0 ? Math.min(...known.map((report) => report.first_step)) : order.at_step;
  const last = known.length > 0 ? Math.max(...known.map((report) => report.last_step)) : order.at_step + order.steps - 1;
  return stepsText([first, Math.max(first, last)]);
}

export function capturedRanks({ order }: CaptureRecord): string {
  return ranksText(order.ranks);
}

/** `step time 41.0 ms instead of 38.2 ms`; "": not known. */
export function captureCost({ figures, reports }: CaptureRecord): string {
  const parts: string[] = [];
  if (typeof figures.step_ms === "number" && typeof figures.usual_step_ms === "number") parts.push(`step time ${digits(figures.step_ms)} ms instead of ${digits(figures.usual_step_ms)} ms`);
  const pauses = reports.map((report) => report.start_ms + report.stop_ms + report.write_ms);
  const longest = Math.max(0, ...pauses);
  if (longest > 0) parts.push(`${digits(longest / 1000)} s to start, stop and write`);
  return parts.join("; ");
}

/** The capture that it was compared with; null: none, or nothing that can be shown. */
export function baselineOf({ figures }: CaptureRecord): { id: string; steps: [number, number] } | null {
  const { baseline } = figures;
  if (typeof baseline !== "object" || baseline === null) return null;
  const { id, steps } = baseline as { id?: unknown; steps?: unknown };
  const known = typeof id === "string" && Array.isArray(steps) && steps.length === 2 && steps.every((step) => typeof step === "number");
  return known ? { id, steps: steps as [number, number] } : null;
}

export function isOver({ state }: CaptureRecord): boolean {
  return state === "done" || state === "failed";
}

/** The later of two answers: the one with the newest capture, or else with more that are over. The list is limited, so its length says nothing. */
export function newer(usual: CapturesDocument | null, fresh: CapturesDocument | null): CapturesDocument | null {
  if (usual === null || fresh === null) return fresh ?? usual;
  const newest = ({ captures }: CapturesDocument): number => captures.reduce((most, record) => Math.max(most, record.requested_wall_ns), 0);
  const over = ({ captures }: CapturesDocument): number => captures.filter(isOver).length;
  const ahead = newest(usual) - newest(fresh) || over(usual) - over(fresh);
  return ahead > 0 ? usual : fresh;
}
