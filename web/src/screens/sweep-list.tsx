/** The sweeps next to the listed runs, folded if there are several. Renders nothing if there are none. */

import { useEffect, useState } from "preact/hooks";
import type { SweepRow } from "../api/history-documents";
import { aborted, type Source } from "../api/source";
import { sweepLink } from "../route";
import { began } from "../ui/when";
import { countOf } from "../words/ranks";
import "./sweep-list.css";

const SHOWN = 3;

/** `runs`: how many there are; a sweep in progress adds some. */
export function SweepList({ source, runs }: { source: Source; runs: number }) {
  const [rows, setRows] = useState<SweepRow[]>([]);
  const [all, setAll] = useState(false);
  useEffect(() => {
    if (source.kind === "file") return;
    const stop = new AbortController();
    source.get<{ sweeps: SweepRow[] }>("sweeps", {}, stop.signal).then(
      (answer) => setRows(answer.sweeps),
      (error: unknown) => {
        if (!aborted(error)) setRows([]); // an older hub has no sweeps, and a token for one run does not show them
      },
    );
    return () => stop.abort();
  }, [source, runs]);
  if (rows.length === 0) return null;
  const shown = all ? rows : rows.slice(0, SHOWN);
  return (
    <section class="card sweeps" aria-labelledby="sweeps-title">
      <h2 id="sweeps-title">Sweeps</h2>
      <ul>
        {shown.map((row) => (
          <li key={row.id}>
            {row.problem === null ? (
              <a href={sweepLink(row.id)}>
                <bdi>{row.name}</bdi>
              </a>
            ) : (
              <bdi>{row.name}</bdi>
            )}{" "}
            <span class="muted">{about(row)}</span>
            <span class="sweeps-title">{row.problem ?? row.title}</span>
          </li>
        ))}
      </ul>
      {rows.length > SHOWN && (
        <button type="button" class="quiet" aria-expanded={all} onClick={() => setAll(!all)}>
          {all ? "Show fewer" : `Show all ${rows.length}`}
        </button>
      )}
    </section>
  );
}

function about(row: SweepRow): string {
  const parts = [row.variants !== undefined && countOf(row.variants, "variant"), row.failed ? `${row.failed} failed` : "", row.complete === false && "not complete", began(row.changed_wall_ns, Date.now()), row.folder];
  return parts.filter(Boolean).join(" · ");
}
