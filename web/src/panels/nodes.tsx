/** The nodes of a job with their problems, such as a wrong clock or silence; those with problems first. */

import { useSignal } from "@preact/signals";
import type { NodeRow, NodesDocument } from "../api/node-documents";
import { useAnswer, type OpenRun } from "../run/open-run";
import { Card } from "../ui/card";
import { binary, count, dateTime, duration, percent } from "../ui/format";
import { countOf } from "../words/ranks";
import "./nodes.css";

const PAGE = 40;
/** With more nodes without problems than this, they share a row. */
const ALIKE = 4;

/** Renders nothing for a single node. */
export function NodesPanel({ run }: { run: OpenRun }) {
  const shown = useSignal(PAGE);
  const each = useSignal(false);
  const { value } = useAnswer<NodesDocument>(run, "nodes", { limit: 2000 }, 5000);
  if (value === null || value.total < 2) return null;
  const live = run.status.value?.over === false;
  const now = hubNow(value.nodes);
  const rows = value.nodes.map((node) => ({ node, odd: node.problems }));
  rows.sort((one, two) => Number(two.odd.length > 0) - Number(one.odd.length > 0));
  const odd = rows.filter((row) => row.odd.length > 0).length;
  const calm = rows.filter((row) => row.odd.length === 0).map((row) => row.node);
  const folded = calm.length > ALIKE;
  const listed = folded && !each.value ? rows.slice(0, odd) : rows;
  const joined = value.nodes.some((node) => node.heard_wall_ns !== null);
  const refused = Object.entries(value.refused);
  return (
    <Card
      title="Nodes"
      class="nodes"
      about={`${countOf(value.total, "node")}${odd > 0 ? `, ${count(odd)} with problems` : ", no problems"}`}
      csv={{
        name: `${run.name}-nodes`,
        make: () => ({
          columns: ["node", "hosts", "ranks", "live_ranks", "clock_offset_ms", "round_trip_ms", "cpu_percent", "memory_used_share", "received_bytes_per_second", "sent_bytes_per_second", "refused", "odd"],
          rows: rows.map(({ node, odd: words }) => [
            node.node,
            node.hosts.join(" "),
            node.ranks,
            node.live_ranks,
            milliseconds(node.offset_ns),
            milliseconds(node.rtt_ns),
            node.sample?.["cpu_percent"] ?? null,
            usedMemory(node),
            node.sample?.["net_rx_bps"] ?? null,
            node.sample?.["net_tx_bps"] ?? null,
            node.refused,
            words.join("; "),
          ]),
        }),
      }}
    >
      <div class="scrolls" tabIndex={0} role="region" aria-label="Table of nodes">
        <table>
          <thead>
            <tr>
              <th scope="col">Node</th>
              <th scope="col">Problems</th>
              <th scope="col" class="number">Ranks</th>
              {joined && <th scope="col" class="number">Last heard</th>}
              {joined && <th scope="col" class="number">Clock offset</th>}
              {joined && <th scope="col" class="number">Round trip</th>}
              <th scope="col" class="number">CPU</th>
              <th scope="col" class="number">Memory</th>
              <th scope="col" class="number">Received</th>
              <th scope="col" class="number">Sent</th>
            </tr>
          </thead>
          <tbody>
            {listed.slice(0, shown.value).map(({ node, odd: words }) => (
              <Line key={node.node} node={node} odd={words} now={now} live={live} joined={joined} />
            ))}
            {folded && !each.value && <Calm nodes={calm} joined={joined} />}
          </tbody>
        </table>
      </div>
      {listed.length > shown.value && (
        <button type="button" class="quiet" onClick={() => (shown.value += PAGE)}>
          {countOf(listed.length - shown.value, "more node")}
        </button>
      )}
      {folded && (
        <button type="button" class="quiet" aria-pressed={each.value} onClick={() => (each.value = !each.value)}>
          {each.value ? "Show those without problems in one row" : "Show each node"}
        </button>
      )}
      {refused.length > 0 && (
        <p class="muted small">
          Rejected connections:{" "}
          {refused
            .slice(0, 8)
            .map(([why, times]) => `${why.replaceAll("_", " ")} ${count(times)}×`)
            .join(", ")}
          .
        </p>
      )}
    </Card>
  );
}

/** All nodes without problems, with the range of each figure. */
function Calm({ nodes, joined }: { nodes: readonly NodeRow[]; joined: boolean }) {
  const sampled = (key: string): (number | null | undefined)[] => nodes.map((node) => node.sample?.[key]);
  const rate = (value: number): string => `${binary(value)}/s`;
  return (
    <tr>
      <th scope="row">{countOf(nodes.length, "node")} without problems</th>
      <td>
        <span class="muted">–</span>
      </td>
      <td class="number">{countOf(nodes.reduce((sum, node) => sum + node.ranks, 0), "rank")}</td>
      {joined && <td class="number">–</td>}
      {joined && <td class="number">{rangeText(nodes.map((node) => node.offset_ns), duration)}</td>}
      {joined && <td class="number">{rangeText(nodes.map((node) => node.rtt_ns), duration)}</td>}
      <td class="number">{rangeText(sampled("cpu_percent"), (value) => `${Math.round(value)}%`)}</td>
      <td class="number">{rangeText(nodes.map(usedMemory), percent)}</td>
      <td class="number">{rangeText(sampled("net_rx_bps"), rate)}</td>
      <td class="number">{rangeText(sampled("net_tx_bps"), rate)}</td>
    </tr>
  );
}

function Line({ node, odd, now, live, joined }: { node: NodeRow; odd: readonly string[]; now: number; live: boolean; joined: boolean }) {
  const of = node.sample ?? {};
  const rate = (key: string): string => (typeof of[key] === "number" ? `${binary(of[key])}/s` : "–");
  return (
    <tr class={odd.length > 0 ? "odd" : ""}>
      <th scope="row" title={node.address ?? undefined}>
        {node.hosts.slice(0, 3).join(", ") || node.node}
        {!node.hosts.includes(node.node) && <span class="muted"> {node.node}</span>}
      </th>
      <td>
        {odd.length > 0 && (
          <span class="severity warning" aria-hidden="true">
            ▲{" "}
          </span>
        )}
        {odd.join("; ") || <span class="muted">–</span>}
      </td>
      <td class="number">{live && node.live_ranks !== node.ranks ? `${count(node.live_ranks)} of ${spansOf(node)}` : spansOf(node)}</td>
      {joined && <td class="number">{node.heard_wall_ns === null ? "–" : !live ? dateTime(node.heard_wall_ns) : now - node.heard_wall_ns < 2e9 ? "now" : `${duration(now - node.heard_wall_ns)} ago`}</td>}
      {joined && <td class="number">{duration(node.offset_ns)}</td>}
      {joined && <td class="number">{duration(node.rtt_ns)}</td>}
      <td class="number">{typeof of["cpu_percent"] === "number" ? `${Math.round(of["cpu_percent"])}%` : "–"}</td>
      <td class="number">{percent(usedMemory(node))}</td>
      <td class="number">{rate("net_rx_bps")}</td>
      <td class="number">{rate("net_tx_bps")}</td>
    </tr>
  );
}

/** The ranks (`8–15`) if that is short, else their number. */
function spansOf(node: NodeRow): string {
  const spans = node.rank_spans.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`));
  return spans.length > 0 && spans.length <= 3 ? spans.join(", ") : count(node.ranks);
}

function milliseconds(ns: number | null): number | null {
  return ns === null ? null : ns / 1e6;
}

/** The current time by the hub's clock: its last contact with any node. */
function hubNow(nodes: readonly NodeRow[]): number {
  return Math.max(0, ...nodes.flatMap((node) => [node.heard_wall_ns ?? 0, node.sample?.["wall_ns"] ?? 0]));
}

function usedMemory(node: NodeRow): number | null {
  const [total, left] = [node.sample?.["mem_total"], node.sample?.["mem_available"]];
  return typeof total === "number" && typeof left === "number" && total > 0 ? 1 - left / total : null;
}

/** `38% – 45%`; a single value if all are written alike, – without any. */
export function rangeText(values: readonly (number | null | undefined)[], shown: (value: number) => string): string {
  const known = values.filter((value): value is number => typeof value === "number" && Number.isFinite(value));
  if (known.length === 0) return "–";
  const [least, most] = [shown(Math.min(...known)), shown(Math.max(...known))];
  return least === most ? most : `${least} – ${most}`;
}
