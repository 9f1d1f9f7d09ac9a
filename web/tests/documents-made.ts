/** Documents of the hub for tests. */

import type { Finding, RunEvent } from "../src/api/documents";
import type { FindingText } from "../src/api/text-documents";

export const TEXT: FindingText = { look: "critical", kind: "", meaning: "", facts: [], confidence: "", price: [], time_left: null, evidence: [], charts: [] };

export function findingOf(more: Partial<Finding> = {}): Finding {
  return { kind: "compute_straggler", severity: "critical", title: "", ranks: [], phase: null, steps: null, cost: null, evidence: {}, advice: [], confidence: 1, text: TEXT, ...more };
}

export function eventOf(number: number, event: string, more: Partial<RunEvent> = {}): RunEvent {
  return { number, node: "2", wall_ns: 1e18, event, text: "", severity: "info", category: "ranks", ...more };
}
