/** When each finding was shown while the job ran: from which step and time to which. */

import type { Severity } from "../api/documents";
import { useAnswer, type OpenRun } from "../run/open-run";
import { Card } from "../ui/card";
import { clock, count, dateTime } from "../ui/format";
import { SeverityMark } from "../ui/severity";
import "./incidents.css";

export interface FindingHistory {
  history: FindingEpisode[];
}

interface FindingEpisode {
  number: number;
  severity: Severity;
  title: string;
  open: boolean;
  first_wall_ns: number;
  last_wall_ns: number;
  text: string;
}

const EVERY_MS = 10_000;
const SHOWN = 50;

/** Renders nothing if there are none. */
export function FindingHistoryPanel({ run }: { run: OpenRun }) {
  const found = useAnswer<FindingHistory>(run, "findings/history", {}, EVERY_MS).value;
  const rows = [...(found?.history ?? [])].reverse();
  if (rows.length === 0) return null;
  const open = rows.filter((row) => row.open).length;
  return (
    <Card title="History of findings" about={open > 0 ? `${count(open)} now` : undefined} class="incidents" part="history">
      <ul class="incident-list">
        {rows.slice(0, SHOWN).map((row) => (
          <li key={row.number} class={row.open ? "open" : "resolved"}>
            <SeverityMark look={row.severity} />
            <div>
              {row.title}
              <p class="facts">
                <span>{row.text}</span>
                <span title={dateTime(row.first_wall_ns)}>{clock(row.first_wall_ns)}</span>
                {!row.open && <span title={dateTime(row.last_wall_ns)}>to {clock(row.last_wall_ns)}</span>}
              </p>
            </div>
          </li>
        ))}
      </ul>
      {rows.length > SHOWN && <p class="muted">and {count(rows.length - SHOWN)} earlier ones</p>}
    </Card>
  );
}
