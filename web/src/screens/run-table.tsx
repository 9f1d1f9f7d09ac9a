/** Table of runs; on narrow screens each run's figures are below its name. */

import { Fragment } from "preact";
import { useState } from "preact/hooks";
import type { RunRow } from "../api/documents";
import { numberText } from "../panels/metrics";
import { runLink } from "../route";
import { shownMetrics, type Column, type ListView } from "../run/list-rows";
import type { RunFeed } from "../run/run-feed";
import { count, dateTime, duration, percent } from "../ui/format";
import { useNow } from "../ui/now";
import { SeverityMark } from "../ui/severity";
import { StatusChip } from "../ui/status-chip";
import { began } from "../ui/when";
import { countOf } from "../words/ranks";
import { RunDetails } from "./run-details";

interface RunTableProps {
  rows: RunRow[];
  feed: RunFeed;
  view: ListView;
  onSort: (column: Column) => void;
  onTag: (tag: string) => void;
  chosen: readonly string[];
  onChoose: (id: string) => void;
  onGone: (id: string) => void;
}

const HEADS: [Column, string, string][] = [
  ["name", "Run", ""],
  ["status", "Status", "wide"],
  ["created_wall_ns", "Started", "wide"],
  ["duration_s", "Duration", "wide number"],
  ["ranks", "Ranks", "wide roomy number"],
  ["steps", "Steps", "wide number"],
  ["median_step_ms", "Median step", "wide number"],
  ["cost_share", "Cost", "wide number"],
  ["commit", "Commit", "wide"],
  ["verdict", "Verdict", "wide"],
];

export function RunTable({ rows, feed, view, onSort, onTag, chosen, onChoose, onGone }: RunTableProps) {
  const now = useNow(60_000);
  const [open, setOpen] = useState<string | null>(null);
  // A column that is empty for all rows only takes room away from the verdict.
  const noted = rows.some((row) => shownMetrics(row).length > 0);
  const committed = rows.some((row) => row.commit) || view.column === "commit";
  const heads = HEADS.filter(([column]) => column !== "commit" || committed);
  return (
    <div class="card run-table">
      <table>
        <caption class="hidden">Runs; column headings sort the table</caption>
        <thead>
          <tr>
            <td class="pick" />
            {heads.map(([column, title, kind]) => (
              <Fragment key={column}>
                {column === "verdict" && noted && (
                  <th scope="col" class="wide">
                    <span class="plain-head">Last values</span>
                  </th>
                )}
                <th scope="col" class={kind} aria-sort={view.column !== column ? "none" : view.down ? "descending" : "ascending"}>
                  <button type="button" class="sort" onClick={() => onSort(column)}>
                    {title}
                    <span aria-hidden="true">{view.column !== column ? "" : view.down ? " ↓" : " ↑"}</span>
                  </button>
                </th>
              </Fragment>
            ))}
            <td class="more" />
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <Fragment key={row.id}>
              <Row
                row={row}
                now={now}
                noted={noted}
                committed={committed}
                chosen={chosen.includes(row.id)}
                open={open === row.id}
                onChoose={onChoose}
                onTag={onTag}
                onOpen={() => setOpen(open === row.id ? null : row.id)}
              />
              {open === row.id && (
                <tr class="run-opened">
                  <td colSpan={heads.length + 2 + Number(noted)}>
                    <RunDetails
                      row={row}
                      feed={feed}
                      onGone={() => {
                        setOpen(null);
                        onGone(row.id);
                      }}
                    />
                  </td>
                </tr>
              )}
            </Fragment>
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

interface RowProps {
  row: RunRow;
  now: number;
  noted: boolean;
  committed: boolean;
  chosen: boolean;
  open: boolean;
  onChoose: (id: string) => void;
  onTag: (tag: string) => void;
  onOpen: () => void;
}

function Row({ row, now, noted, committed, chosen, open, onChoose, onTag, onOpen }: RowProps) {
  const step = row.median_step_ms === null ? "–" : duration(row.median_step_ms * 1e6);
  const took = row.duration_s === null || row.duration_s === undefined ? null : duration(row.duration_s * 1e9, true);
  const when = began(row.created_wall_ns, now);
  const metrics = shownMetrics(row).map(([name, value]) => `${name} ${numberText(value)}`);
  const tags = row.tags ?? [];
  return (
    <tr class={chosen ? "chosen" : ""}>
      <td class="pick">
        <label>
          <input type="checkbox" checked={chosen} onChange={() => onChoose(row.id)} />
          <span class="hidden">Compare {row.name}</span>
        </label>
      </td>
      <th scope="row" class="run-name">
        <a href={runLink(row.id)} title={row.name === row.id ? row.name : `${row.name} (${row.id})`}>
          <bdi>{row.name}</bdi>
        </a>
        {row.folder && (
          <div class="run-folder" title={row.folder}>
            <bdi>{row.folder}</bdi>
          </div>
        )}
        {(tags.length > 0 || row.note) && (
          <div class="run-labels">
            {tags.map((tag) => (
              <button key={tag} type="button" class="tag" aria-label={`Show runs with the tag ${tag}`} onClick={() => onTag(tag)}>
                {tag}
              </button>
            ))}
            {row.note && (
              <span class="run-labels-note" title={row.note}>
                {row.note}
              </span>
            )}
          </div>
        )}
        <div class="narrow run-more">
          <StatusChip of={row} />
          <span>{when}</span>
          {took !== null && <span>took {took}</span>}
          {row.ranks !== null && <span>{countOf(row.ranks, "rank")}</span>}
          {row.steps !== null && <span>{countOf(row.steps, "step")}</span>}
          {row.median_step_ms !== null && <span>median step {step}</span>}
          {metrics.map((text) => (
            <span key={text}>{text}</span>
          ))}
          {row.commit && <code>{row.commit.slice(0, 8)}</code>}
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
      <td class="wide number">{took ?? "–"}</td>
      <td class="wide roomy number">{count(row.ranks)}</td>
      <td class="wide number">{count(row.steps)}</td>
      <td class="wide number">{step}</td>
      <td class="wide number" title="Share of the step time that the verdict costs">
        {row.cost_share ? percent(row.cost_share) : "–"}
      </td>
      {committed && (
        <td class="wide" title={row.dirty ? "with changes that were not committed" : undefined}>
          {row.commit ? <code>{`${row.commit.slice(0, 8)}${row.dirty ? "*" : ""}`}</code> : <span class="muted">–</span>}
        </td>
      )}
      {noted && <td class="wide run-noted">{metrics.length > 0 ? metrics.map((text) => <div key={text} title={text}>{text}</div>) : <span class="muted">–</span>}</td>}
      <td class="wide run-verdict">{row.verdict ? <Verdict row={row} /> : <span class="muted">–</span>}</td>
      <td class="more">
        <button type="button" class="quiet" aria-expanded={open} aria-label={`Details of ${row.name}`} onClick={onOpen}>
          {open ? "▾" : "▸"}
        </button>
      </td>
    </tr>
  );
}
