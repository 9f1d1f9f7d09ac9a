/** What is shown of traces: the view, the rank, and the rank that it is compared with. */

import type { ReportDocument } from "../api/report-document";

export interface TracePlace {
  /** null: the first view, or the first rank of the report. */
  view: string | null;
  rank: number | null;
  peer: number | null;
}

export const NO_PLACE: TracePlace = { view: null, rank: null, peer: null };

/** The place as far as the report has it; unknown views and ranks become its own first ones. */
export function placeIn(report: ReportDocument, { view, rank, peer }: TracePlace): TracePlace {
  const known = new Set(report.ranks ?? []);
  const views = report.views ?? [];
  const [first, second] = report.pair ?? [null, null];
  const own = rank !== null && known.has(rank) ? rank : (report.rank ?? null);
  const other = peer !== null && known.has(peer) ? peer : second;
  return { view: views.some(([key]) => key === view) ? view : (views[0]?.[0] ?? null), rank: own, peer: other === own ? (own === first ? second : first) : other };
}
