/** Hosts, links, GPU events and changes of the fleet: the hub's sentences with their figures, and links to the runs. */

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { Behind, FleetChange, FleetHost, FleetPair, GpuEvent } from "../api/fleet-documents";
import { behindLink, behindText, dayText, tenths } from "../run/fleet-bars";
import { Card, Nothing } from "../ui/card";
import { confidenceText, count, hoursText, percent } from "../ui/format";
import { SeverityMark } from "../ui/severity";
import "./fleet.css";

export function FleetHosts({ rows }: { rows: readonly FleetHost[] }) {
  const [all, setAll] = useState(false);
  const suspects = rows.filter((row) => row.suspect);
  const shown = all ? rows : suspects;
  return (
    <Card title="Slow hosts" about="hosts that were the slow one more often than chance explains" part="hosts">
      {rows.length === 0 && <Nothing>No host could be compared with others: that takes runs on several hosts.</Nothing>}
      {rows.length > 0 && suspects.length === 0 && <Nothing>No host was slow more often than chance explains.</Nothing>}
      {shown.length > 0 && (
        <Table name="Hosts" heads={["Host", "Slow in", "By chance", "Slower by", "Phase", "Confidence", "Lost", "Runs"]}>
          {shown.map((row) => (
            <tr key={row.host} class={row.suspect ? "fleet-suspect" : ""}>
              <th scope="row">
                {row.suspect && <SeverityMark look="warning" />}
                <bdi>{row.host}</bdi>
                <span class="fleet-title">{row.title}</span>
              </th>
              <Cell>
                {count(row.slow_runs)} of {count(row.compared_runs)}
              </Cell>
              <Cell>{tenths(row.expected_slow_runs)}</Cell>
              <Cell>
                {percent(row.slowdown_share)}
                <Interval low={row.slowdown_low_share} high={row.slowdown_high_share} />
              </Cell>
              <td>{row.phase ?? "–"}</td>
              <Cell>{confidenceText(row.confidence)}</Cell>
              <Cell>{hoursText(row.gpu_hours_lost)} h</Cell>
              <RunsCell row={row} about={row.host} />
            </tr>
          ))}
        </Table>
      )}
      {rows.length > suspects.length && (
        <button type="button" class="quiet" aria-expanded={all} onClick={() => setAll(!all)}>
          {all ? "Show slow hosts only" : `Show ${count(rows.length - suspects.length)} other hosts`}
        </button>
      )}
    </Card>
  );
}

export function FleetPairs({ rows }: { rows: readonly FleetPair[] }) {
  if (rows.length === 0) return null;
  return (
    <Card title="Slow links" about="hosts whose exchange takes longer when they are in one run" part="links">
      <Table name="Slow links" heads={["Hosts", "Slow in", "By chance", "Exchange", "Confidence", "Lost", "Runs"]}>
        {rows.map((row) => (
          <tr key={row.hosts.join("\n")} class="fleet-suspect">
            <th scope="row">
              <SeverityMark look="warning" />
              <bdi>{row.hosts.join(" – ")}</bdi>
              <span class="fleet-title">{row.title}</span>
            </th>
            <Cell>
              {count(row.slow_runs)} of {count(row.compared_runs)}
            </Cell>
            <Cell>{tenths(row.expected_slow_runs)}</Cell>
            <Cell>{row.exchange_ratio === null ? "–" : `${tenths(row.exchange_ratio)}×`}</Cell>
            <Cell>{confidenceText(row.confidence)}</Cell>
            <Cell>{hoursText(row.gpu_hours_lost)} h</Cell>
            <RunsCell row={row} about={row.hosts.join(" – ")} />
          </tr>
        ))}
      </Table>
    </Card>
  );
}

export function GpuEvents({ rows }: { rows: readonly GpuEvent[] }) {
  if (rows.length === 0) return null;
  return (
    <Card title="GPU events" about="throttled GPUs, and hardware errors in failures" part="gpu-events">
      <Table name="GPU events" heads={["GPU", "Event", "Throttled", "First", "Last", "Runs"]}>
        {rows.map((row, at) => (
          <tr key={at} class={row.kind === "hardware_error" ? "fleet-suspect" : ""}>
            <th scope="row">
              <SeverityMark look={row.kind === "hardware_error" ? "critical" : "warning"} />
              <bdi>
                {row.host}
                {row.gpu_index === null ? "" : `, GPU ${row.gpu_index}`}
              </bdi>
              <span class="fleet-title">{[row.gpu_name, row.gpu_uuid].filter(Boolean).join(" · ")}</span>
            </th>
            <td class="fleet-words">{row.title}</td>
            <Cell>{percent(row.throttled_share)}</Cell>
            <Cell>{dayText(row.first_wall_ns)}</Cell>
            <Cell>{dayText(row.last_wall_ns)}</Cell>
            <RunsCell row={row} about={row.title} />
          </tr>
        ))}
      </Table>
    </Card>
  );
}

export function FleetChanges({ rows }: { rows: readonly FleetChange[] }) {
  if (rows.length === 0) return null;
  return (
    <Card title="Changes that several jobs share" part="changes">
      <ul class="fleet-changes">
        {rows.map((row) => (
          <li key={`${row.wall_ns} ${row.title}`}>
            <p>
              <SeverityMark look={row.direction === "slower" ? "warning" : "healthy"} />
              <strong>{row.title}</strong>
            </p>
            {row.what.length > 0 && (
              <ul class="plain-list fleet-what" aria-label="What changed">
                {row.what.map((one) => (
                  <li key={one.name}>
                    {one.name}: <code>{one.before ?? "–"}</code> → <code>{one.after ?? "–"}</code> <span class="muted">in {one.jobs === 1 ? "1 job" : `${count(one.jobs)} jobs`}</span>
                  </li>
                ))}
              </ul>
            )}
            <p class="fleet-facts-line muted">
              <span>{dayText(row.wall_ns)}</span>
              <span>
                {count(row.changed_jobs)} of {count(row.jobs)} jobs
              </span>
              <span>
                <ChangeShare row={row} /> {row.direction}
              </span>
              {row.phase !== null && <span>mostly in {row.phase}</span>}
              <span>confidence {confidenceText(row.confidence)}</span>
              {row.gpu_hours_lost !== null && <span>{row.gpu_hours_lost < 0 ? `${hoursText(-row.gpu_hours_lost)} GPU hours gained since` : `${hoursText(row.gpu_hours_lost)} GPU hours lost since`}</span>}
              <RunsLink row={row} about={row.title} />
            </p>
          </li>
        ))}
      </ul>
    </Card>
  );
}

function Table({ name, heads, children }: { name: string; heads: readonly string[]; children: ComponentChildren }) {
  return (
    <div class="scrolls fleet-table" tabIndex={0} role="region" aria-label={name}>
      <table>
        <thead>
          <tr>
            {heads.map((head, at) => (
              <th key={head} scope="col" class={at > 0 && !["Phase", "Event"].includes(head) ? "number" : ""}>
                {head}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}

function Cell({ children }: { children: ComponentChildren }) {
  return <td class="number">{children}</td>;
}

function RunsCell({ row, about }: { row: Behind; about: string }) {
  return (
    <Cell>
      <RunsLink row={row} about={about} />
    </Cell>
  );
}

function RunsLink({ row, about }: { row: Behind; about: string }) {
  const href = behindLink(row, about);
  return href === null ? <span>{behindText(row)}</span> : <a href={href}>{behindText(row)}</a>;
}

/** By how much: shares of what is faster are negative, which the word after them says. */
function ChangeShare({ row: { change_share: share, low_share: low, high_share: high, direction } }: { row: FleetChange }) {
  if (share === null || low === null || high === null || direction === "slower") {
    return (
      <>
        {percent(share)}
        <Interval low={low} high={high} />
      </>
    );
  }
  return (
    <>
      {percent(-share)}
      <Interval low={-high} high={-low} />
    </>
  );
}

function Interval({ low, high }: { low: number | null; high: number | null }) {
  return low === null || high === null ? null : (
    <span class="muted">
      {" "}
      ({percent(low)} to {percent(high)})
    </span>
  );
}
