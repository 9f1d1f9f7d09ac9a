/** Where each rank is: equal ones in one row, culprits first, with the kernel's state of their processes. */

import type { Hang } from "../api/hang-documents";
import type { HangPlace } from "../api/text-documents";
import type { OpenRun } from "../run/open-run";
import { duration } from "../ui/format";
import { useNow } from "../ui/now";
import { RankButton } from "./rank-button";

const BUTTONS = 3;

/** `now`: the hang is ongoing, so the silence grows. */
export function WhereaboutsTable({ run, hang, now }: { run: OpenRun; hang: Hang; now: boolean }) {
  const nowMs = useNow(now ? 1000 : 0, run.now);
  const sinceNs = now ? Math.max(0, nowMs * 1e6 - hang.declared_wall_ns) : 0;
  const { rows, left } = hang.text.places;
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
            {rows.map((row) => (
              <Line key={row.ranks.join()} run={run} row={row} several={several} sinceNs={sinceNs} />
            ))}
          </tbody>
        </table>
      </div>
      {left > 0 && <p class="muted">and {left} more places</p>}
    </div>
  );
}

function Line({ run, row, several, sinceNs }: { run: OpenRun; row: HangPlace; several: boolean; sinceNs: number }) {
  return (
    <tr class={row.culprit ? "culprit" : ""}>
      <th scope="row">
        {row.culprit && (
          <span class="severity critical">
            <span aria-hidden="true">✖ </span>
            <span class="hidden">culprit </span>
          </span>
        )}
        {row.ranks.length <= BUTTONS ? row.ranks.map((rank) => <RankButton key={rank} run={run} rank={rank} />) : row.who}
      </th>
      {several && <td>{row.hosts}</td>}
      <td>{row.call || "–"}</td>
      <td>
        {row.where === null ? "–" : <code title={row.where.file}>{row.where.text}</code>}
        {row.workers.map((worker) => (
          <div key={worker} class="small">
            {worker}
          </div>
        ))}
      </td>
      <td>
        {row.steps || "–"}
        {row.phases !== "" && <span class="muted"> {row.phases}</span>}
      </td>
      <td>{row.state}</td>
      <td class="number">{row.cpu || "–"}</td>
      <td class="number">{duration(row.silent_s * 1e9 + sinceNs)}</td>
    </tr>
  );
}
