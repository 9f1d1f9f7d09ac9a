/** The incidents of a run: one per cause, each with a link to its own page. */

import type { IncidentRow, IncidentsDocument } from "../api/incident-documents";
import { incidentLink } from "../route";
import { useAnswer, type OpenRun } from "../run/open-run";
import { Card } from "../ui/card";
import { clock, count, dateTime } from "../ui/format";
import { SeverityMark } from "../ui/severity";
import "./incidents.css";

const EVERY_MS = 10_000;
const SHOWN = 20;

/** Renders nothing if there are none. */
export function IncidentsPanel({ run }: { run: OpenRun }) {
  const found = useAnswer<IncidentsDocument>(run, "incidents", {}, EVERY_MS).value;
  // Recorded incidents newest first; those made of final findings in the order of the findings.
  const listed = found?.incidents ?? [];
  const rows = found?.made_from === "incidents.jsonl" ? [...listed].reverse() : listed;
  if (found === null || rows.length === 0) return null;
  const open = rows.filter(({ state }) => state !== "resolved");
  const order = [...open, ...rows.filter(({ state }) => state === "resolved")];
  return (
    <Card title="Incidents" about={open.length > 0 ? `${count(open.length)} open` : undefined} class="incidents" part="incidents">
      {found.notice && <p class="muted small">{found.notice}</p>}
      <ul class="incident-list">
        {order.slice(0, SHOWN).map((row) => (
          <Line key={row.number} run={run.name} row={row} />
        ))}
      </ul>
      {order.length > SHOWN && <p class="muted">and {count(order.length - SHOWN)} more: stepscope incident {run.name}</p>}
    </Card>
  );
}

function Line({ run, row }: { run: string; row: IncidentRow }) {
  return (
    <li class={row.state}>
      <SeverityMark look={row.severity} />
      <div>
        <a href={incidentLink(run, row.number)}>{row.title}</a>
        <p class="facts">
          <span>{row.state_text}</span>
          {row.since_step !== null && <span>since step {count(row.since_step)}</span>}
          {row.since_wall_ns !== null && <span title={dateTime(row.since_wall_ns)}>{clock(row.since_wall_ns)}</span>}
          {row.cost_text && <span>{row.cost_text}</span>}
        </p>
      </div>
    </li>
  );
}
