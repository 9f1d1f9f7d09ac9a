/** Collectives by process group: how often, how much, how long they block, and which rank arrives last. */

import { useSignal } from "@preact/signals";
import type { CollectiveGroup, CollectivesDocument } from "../api/documents";
import { Bars } from "../charts/bars";
import { useAnswer, type OpenRun } from "../run/open-run";
import { Card, Nothing } from "../ui/card";
import { binary, count, digits, duration } from "../ui/format";
import { arrivalsOf, exchangeRows, groupTitle, sorted, timesOf, type ExchangeRow, type SortBy } from "../words/collectives";
import { countOf, ranksText } from "../words/ranks";
import { RankButton } from "./rank-button";
import "./collectives.css";

const ROWS = 50;
const LATE = 6;
/** Groups with details; those that block longest come first. */
const FOLDS = 8;
/** Up to this size a group's ranks are listed: groups along a mesh have the same name. */
const SMALL = 16;
const COLUMNS: readonly (readonly [SortBy, string, boolean])[] = [
  ["group", "Group", false],
  ["op", "Operation", false],
  ["count", "Per step", true],
  ["bytes", "Bytes", true],
  ["transferMs", "Transfer", true],
  ["exposedMs", "Exposed and hidden", true],
];

export function CollectivesPanel({ run }: { run: OpenRun }) {
  const by = useSignal<SortBy>("exposedMs");
  const backwards = useSignal(false);
  const status = run.status.value;
  const alone = status !== null && status.world_size <= 1;
  const { value, failure } = useAnswer<CollectivesDocument>(run, status === null || alone ? null : "collectives", {}, 20_000);
  const groups = value?.groups ?? [];
  const rows = sorted(exchangeRows(groups), by.value, backwards.value);
  const sort = (column: SortBy): void => {
    backwards.value = by.value === column && !backwards.value;
    by.value = column;
  };
  if (alone || (value !== null && rows.length === 0)) return null;
  return (
    <Card
      title="Collectives"
      class="half collectives"
      about={rows.length > 0 ? "communication per step" : undefined}
      {...(rows.length === 0 ? {} : { csv: {
        name: `${run.name}-collectives`,
        make: () => ({
          columns: ["group", "kind", "backend", "size", "op", "count_per_step", "bytes_per_step", "exposed_ms", "overlapped_ms", "transfer_ms", "wait_ms", "algorithm_bytes_per_s", "bus_bytes_per_s"],
          rows: rows.map((row) => [row.group, row.kind, row.backend, row.size, row.op, row.count, row.bytes, row.exposedMs, row.overlappedMs, row.transferMs, row.waitMs, row.algorithmPerS, row.busPerS]),
        }),
      } })}
    >
      {rows.length === 0 ? (
        <Nothing>{status === null ? "Loading the run …" : alone ? "A single rank has no collectives." : failure !== null ? failure.message : value === null ? "Loading …" : status.over ? "No collectives were recorded." : "No collectives recorded yet."}</Nothing>
      ) : (
        <>
          <div class="scrolls" tabIndex={0} role="region" aria-label="Collectives by group">
            <table>
              <thead>
                <tr>
                  {COLUMNS.map(([column, name, figure]) => (
                    <th key={column} scope="col" class={figure && column !== "exposedMs" ? "number" : ""} aria-sort={by.value === column ? (backwards.value === figure ? "ascending" : "descending") : "none"}>
                      <button type="button" class="by" onClick={() => sort(column)}>
                        {name}
                        <span aria-hidden="true">{by.value === column ? (backwards.value === figure ? " ▲" : " ▼") : ""}</span>
                      </button>
                    </th>
                  ))}
                </tr>
              </thead>
              <tbody>
                {rows.slice(0, ROWS).map((row) => (
                  <Line key={row.key} row={row} longest={longestOf(rows)} />
                ))}
              </tbody>
            </table>
          </div>
          <p class="muted small">
            <span class="swatch blocked" aria-hidden="true" /> exposed, including the wait for late ranks <span class="swatch beside" aria-hidden="true" /> hidden behind computation
            {rows.length > ROWS ? `; ${countOf(rows.length - ROWS, "more row")} in the CSV` : ""}
            {value !== null && value.groups_left_out > 0 ? `; ${countOf(value.groups_left_out, "more group")} not shown` : ""}
          </p>
          {value?.measured_text ? <p class="muted small">{value.measured_text}</p> : null}
          {groups.slice(0, FOLDS).map((group, at) => (
            <Late key={at} run={run} group={group} />
          ))}
        </>
      )}
    </Card>
  );
}

function longestOf(rows: readonly ExchangeRow[]): number {
  return Math.max(...rows.map((row) => (row.exposedMs ?? 0) + (row.overlappedMs ?? 0)), 1e-9);
}

function Line({ row, longest }: { row: ExchangeRow; longest: number }) {
  const width = (ms: number | null): string => `${((ms ?? 0) / longest) * 100}%`;
  return (
    <tr>
      <th scope="row" title={`${row.kind}, ${row.backend}, ${ranksText(row.ranks)}`}>
        {row.group}
        <span class="muted"> {row.size <= SMALL && row.ranks.length === row.size ? ranksText(row.ranks) : countOf(row.size, "rank")}</span>
      </th>
      <td>{row.op}</td>
      <td class="number">{row.count === null ? "–" : Number.isInteger(row.count) ? count(row.count) : digits(row.count)}</td>
      <td class="number">{binary(row.bytes)}</td>
      <td class="number" title={row.busPerS === null ? "" : `bus: ${binary(row.busPerS)}/s; algorithm: ${binary(row.algorithmPerS)}/s`}>
        {row.transferMs === null ? "–" : duration(row.transferMs * 1e6)}
        {row.busPerS === null ? null : <span class="muted bus">{binary(row.busPerS)}/s</span>}
      </td>
      <td>
        {row.exposedMs === null && row.overlappedMs === null ? (
          <span class="muted">{row.waitMs !== null ? `${duration(row.waitMs * 1e6)} waiting` : row.timed ? "unknown" : `not reported by ${row.backend}`}</span>
        ) : (
          <>
            <span class="exchange" aria-hidden="true">
              <span class="blocked" style={{ width: width(row.exposedMs) }} />
              <span class="beside" style={{ width: width(row.overlappedMs) }} />
            </span>
            <span class="exchange-text">
              {duration((row.exposedMs ?? 0) * 1e6)}
              <span class="hidden"> exposed,</span> <span class="muted">+ {duration((row.overlappedMs ?? 0) * 1e6)} hidden</span>
            </span>
          </>
        )}
      </td>
    </tr>
  );
}

/** Which rank arrived last, if known. */
function Late({ run, group }: { run: OpenRun; group: CollectiveGroup }) {
  const arrivals = arrivalsOf(group.arrivals);
  if (arrivals === null || arrivals.ranks.length === 0) return null;
  const late = arrivals.ranks.filter((one) => one.last > 0).slice(0, LATE);
  if (late.length === 0) return null;
  return (
    <details class="fold">
      <summary>
        Last to arrive in {groupTitle(group)} of {ranksText(group.ranks)}: rank {late[0]?.rank}, in {timesOf(late[0]?.last ?? 0, arrivals.collectives)}
      </summary>
      <Bars
        label={`How often each rank arrived last in ${groupTitle(group)}`}
        most={arrivals.collectives}
        rows={late.map((one, at) => ({
          key: String(one.rank),
          name: <RankButton run={run} rank={one.rank} />,
          value: one.last,
          text: `${count(one.last)}×, then a wait of ${duration(one.lateMs * 1e6)}`,
          culprit: at === 0,
        }))}
      />
      <p class="muted small">
        From {countOf(arrivals.steps, "step")} with individually recorded collectives. The transfer takes {duration((arrivals.transferMs ?? 0) * 1e6)} per step; the last rank arrives{" "}
        {duration((arrivals.skewMs ?? 0) * 1e6)} after the first.
      </p>
    </details>
  );
}
