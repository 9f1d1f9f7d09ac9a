/** Table of runs; on narrow screens each run's figures are below its name. */

import type { RunRow } from "../api/documents";
import { runLink } from "../route";
import type { Column, ListView } from "../run/list-rows";
import { count, dateTime, duration } from "../ui/format";
import { useNow } from "../ui/now";
import { SeverityMark } from "../ui/severity";
import { StatusChip } from "../ui/status-chip";
import { began } from "../ui/when";
import { countOf } from "../words/ranks";

interface RunTableProps {
  rows: RunRow[];
  view: ListView;
  onSort: (column: Column) => void;
  chosen: readonly string[];
  onChoose: (id: string) => void;
}

const HEADS: [Column, string, string][] = [
  ["name", "Run", ""],
  ["status", "Status", "wide"],
  ["created_wall_ns", "Started", "wide"],
  ["ranks", "Ranks", "wide number"],
  ["steps", "Steps", "wide number"],
  ["median_step_ms", "Median step", "wide number"],
  ["verdict", "Verdict", "wide"],
];

export function RunTable({ rows, view, onSort, chosen, onChoose }: RunTableProps) {
  const now = useNow(60_000);
  return (
    <div class="card run-table">
      <table>
        <caption class="hidden">Runs; column headings sort the table</caption>
        <thead>
          <tr>
            <td class="pick" />
            {HEADS.map(([column, title, kind]) => (
              <th key={column} scope="col" class={kind} aria-sort={view.column !== column ? "none" : view.down ? "descending" : "ascending"}>
                <button type="button" class="sort" onClick={() => onSort(column)}>
                  {title}
                  <span aria-hidden="true">{view.column !== column ? "" : view.down ? " ↓" : " ↑"}</span>
                </button>
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <Row key={row.id} row={row} now={now} chosen={chosen.includes(row.id)} onChoose={onChoose} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Verdict({ row }: { row: RunRow }) {
  return (
    <>
      {row.severity && <SeverityMark look={row.severity} />} {row.verdict}
    </>
  );
}

function Row({ row, now, chosen, onChoose }: { row: RunRow; now: number; chosen: boolean; onChoose: (id: string) => void }) {
  const step = row.median_step_ms === null ? "–" : duration(row.median_step_ms * 1e6);
  const when = began(row.created_wall_ns, now);
  return (
    <tr class={chosen ? "chosen" : ""}>
      <td class="pick">
        <label>
          <input type="checkbox" checked={chosen} onChange={() => onChoose(row.id)} />
          <span class="hidden">Compare {row.name}</span>
        </label>
      </td>
      <th scope="row" class="run-name">
        <a href={runLink(row.id)} title={row.name}>
          <bdi>{row.name}</bdi>
        </a>
        <div class="narrow run-more">
          <StatusChip of={row} />
          <span>{when}</span>
          {row.ranks !== null && <span>{countOf(row.ranks, "rank")}</span>}
          {row.steps !== null && <span>{countOf(row.steps, "step")}</span>}
          {row.median_step_ms !== null && <span>median step {step}</span>}
          {row.verdict && (
            <p>
              <Verdict row={row} />
            </p>
          )}
        </div>
      </th>
      <td class="wide">
        <StatusChip of={row} />
      </td>
      <td class="wide when" title={dateTime(row.created_wall_ns)}>
        {when}
      </td>
      <td class="wide number">{count(row.ranks)}</td>
      <td class="wide number">{count(row.steps)}</td>
      <td class="wide number">{step}</td>
      <td class="wide run-verdict">{row.verdict ? <Verdict row={row} /> : <span class="muted">–</span>}</td>
    </tr>
  );
}
