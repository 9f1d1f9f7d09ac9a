/** Where each rank is: equal ones in one row, culprits first, with the kernel's state of their processes. */

import type { Hang } from "../api/hang-documents";
import type { OpenRun } from "../run/open-run";
import { duration, percent } from "../ui/format";
import { useNow } from "../ui/now";
import { whereabouts, workerText, type Whereabouts } from "../words/hang";
import { spansText } from "../words/ranks";
import { placeText } from "../words/stacks";
import { RankButton } from "./rank-button";

const ROWS = 30;
const BUTTONS = 3;

/** `now`: the hang is ongoing, so the silence grows. */
export function WhereaboutsTable({ run, hang, now }: { run: OpenRun; hang: Hang; now: boolean }) {
  const nowMs = useNow(now ? 1000 : 0, run.now);
  const sinceNs = now ? Math.max(0, nowMs * 1e6 - hang.declared_wall_ns) : 0;
  const rows = whereabouts(hang, now);
  if (rows.length === 0) return null;
  const title = now ? "Where each rank is" : "Where each rank was";
  const several = hang.hosts.length > 1;
  return (
    <div>
      <h3>{title}</h3>
      <div class="scrolls" tabIndex={0} role="region" aria-label={title}>
        <table class="whereabouts">
          <thead>
            <tr>
              <th scope="col">Ranks</th>
              {several && <th scope="col">Host</th>}
              <th scope="col">{now ? "Waits in" : "Waited in"}</th>
              <th scope="col">At</th>
              <th scope="col">Step</th>
              <th scope="col">Process</th>
              <th scope="col" class="number">
                Core
              </th>
              <th scope="col" class="number">
                Silent
              </th>
            </tr>
          </thead>
          <tbody>
            {rows.slice(0, ROWS).map((row) => (
              <Line key={row.ranks.join()} run={run} row={row} several={several} sinceNs={sinceNs} now={now} />
            ))}
          </tbody>
        </table>
      </div>
      {rows.length > ROWS && <p class="muted">and {rows.length - ROWS} more places</p>}
    </div>
  );
}

function Line({ run, row, several, sinceNs, now }: { run: OpenRun; row: Whereabouts; several: boolean; sinceNs: number; now: boolean }) {
  const told = row.workers.filter((worker) => typeof worker["at"] === "string" || !["S", "R", ""].includes(String(worker["state"] ?? "")));
  return (
    <tr class={row.culprit ? "culprit" : ""}>
      <th scope="row">
        {row.culprit && (
          <span class="severity critical">
            <span aria-hidden="true">✖ </span>
            <span class="hidden">culprit </span>
          </span>
        )}
        {row.ranks.length <= BUTTONS ? row.ranks.map((rank) => <RankButton key={rank} run={run} rank={rank} />) : `${spansText(row.ranks)}`}
      </th>
      {several && <td>{row.hosts.slice(0, 3).join(", ")}</td>}
      <td>{row.doing || "–"}</td>
      <td>
        {row.at === null ? (
          "–"
        ) : (
          <code title={row.at.file}>{placeText(row.at)}</code>
        )}
        {told.slice(0, 4).map((worker) => (
          <div key={String(worker["pid"])} class="small">
            {workerText(worker, now)}
          </div>
        ))}
      </td>
      <td>
        {row.steps.length > 0 ? spansText(row.steps) : "–"}
        {row.phases.length > 0 && <span class="muted"> {row.phases.join(", ")}</span>}
      </td>
      <td>{row.state}</td>
      <td class="number">{row.cpu === null ? "–" : row.cpu[0] === row.cpu[1] ? percent(row.cpu[0]) : `${percent(row.cpu[0])}–${percent(row.cpu[1])}`}</td>
      <td class="number">{duration(row.silentS * 1e9 + sinceNs)}</td>
    </tr>
  );
}
