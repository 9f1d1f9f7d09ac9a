/** A run without steps: what is known about it, and why it may have none. */

import type { RanksDocument, RunDocument } from "../api/documents";
import { RunOutput } from "../panels/run-output";
import { useAnswer, type OpenRun } from "../run/open-run";
import { Card } from "../ui/card";
import { count, duration, spans } from "../ui/format";
import { useNow } from "../ui/now";
import "./empty-run.css";

const MOST_ROWS = 12;
/** Most scripts complete a step by then; later than that, the recorder may not recognize the steps. */
const LATE_S = 120;

export function EmptyRun({ run }: { run: OpenRun }) {
  const status = run.status.value;
  const about = run.about.value;
  const now = useNow(1000, run.now);
  const ranks = useAnswer<RanksDocument>(run, "ranks", { limit: 10_000 }).value;
  // Processes count as ranks only from their first step on.
  const info = useAnswer<RunDocument>(run, "").value?.info ?? about?.info ?? {};
  if (status === null || about === null) return null;
  const began = about.context.created_wall_ns;
  const ageMs = began === null ? 0 : now - began / 1e6;
  return (
    <>
      <Card title={status.over ? "The run ended before its first step" : "No step has ended yet"} class="empty-run">
        <p>{status.over ? overWords(number(info["rings"])) : words(number(info["rings"]), number(info["hosts"]), status.world_size, ageMs)}</p>
        {ranks !== null && ranks.rank.length > 0 && <WhereTheyAre ranks={ranks} />}
        {(status.over || ageMs > LATE_S * 1000) && (
          <p class="muted">
            Stepscope recognizes steps by calls of the optimizer. Without an optimizer, wrap each step in <code>with stepscope.step():</code>.
          </p>
        )}
      </Card>
      <RunOutput run={run} />
    </>
  );
}

function words(begun: number, hosts: number, expected: number, ageMs: number): string {
  if (begun === 0) return `${ageMs > 0 ? `Started ${duration(ageMs * 1e6, true)} ago. ` : ""}No process has reported yet: they may be importing torch or may not have reached their first step.`;
  const age = ageMs > 0 ? ` Started ${duration(ageMs * 1e6, true)} ago.` : "";
  const of = expected > begun ? ` of ${count(expected)}` : "";
  const where = hosts > 1 ? ` on ${count(hosts)} hosts` : "";
  return `${count(begun)}${of} ${begun === 1 && !of ? "process has" : "processes have"} started${where}, but no step is complete yet. Compilation, caches and the first batch can delay it. Charts appear with the first step.${age}`;
}

function overWords(begun: number): string {
  return begun === 0 ? "No process reported. See the output below." : `${begun === 1 ? "A process" : `${count(begun)} processes`} reported, but no step was seen. See the output below and how each rank ended.`;
}

function number(value: unknown): number {
  return typeof value === "number" ? value : 0;
}

/** Ranks grouped by their current activity. */
function WhereTheyAre({ ranks }: { ranks: RanksDocument }) {
  const groups = new Map<string, number[]>();
  ranks.rank.forEach((rank, at) => {
    const doing = [ranks.hang_state[at] ?? ranks.state[at], ranks.live_phase[at]].filter(Boolean).join(", in ");
    groups.set(doing, [...(groups.get(doing) ?? []), rank]);
  });
  const rows = [...groups].sort((one, two) => two[1].length - one[1].length).slice(0, MOST_ROWS);
  return (
    <table class="empty-ranks">
      <caption class="hidden">Current activity of the ranks</caption>
      <thead>
        <tr>
          <th scope="col">Ranks</th>
          <th scope="col" class="number">
            Count
          </th>
          <th scope="col">Now</th>
        </tr>
      </thead>
      <tbody>
        {rows.map(([doing, members]) => (
          <tr key={doing}>
            <td>{spans(members)}</td>
            <td class="number">{count(members.length)}</td>
            <td>{doing}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
