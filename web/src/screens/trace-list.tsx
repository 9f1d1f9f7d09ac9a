/** The folders of traces next to the listed runs, folded if there are several. Renders nothing if there are none. */

import { useEffect, useState } from "preact/hooks";
import { aborted, type Source } from "../api/source";
import { traceLink } from "../route";
import { bytes } from "../ui/format";
import { began } from "../ui/when";
import { countOf } from "../words/ranks";
import "./sweep-list.css";

const SHOWN = 12;

interface TraceRow {
  id: string;
  name: string;
  files: number;
  size_bytes: number;
  changed_wall_ns: number;
}

export function TraceList({ source, onCount }: { source: Source; onCount: (count: number) => void }) {
  const [rows, setRows] = useState<TraceRow[]>([]);
  const [all, setAll] = useState(false);
  useEffect(() => {
    if (source.kind === "file") return onCount(0);
    const stop = new AbortController();
    source.get<{ traces: TraceRow[] }>("traces", {}, stop.signal).then(
      (answer) => {
        setRows(answer.traces);
        onCount(answer.traces.length);
      },
      (error: unknown) => {
        if (!aborted(error)) onCount(0); // an older hub has no traces, and a token for one run does not show them
      },
    );
    return () => stop.abort();
  }, [source]);
  if (rows.length === 0) return null;
  return (
    <section class="card sweeps" aria-labelledby="traces-title">
      <h2 id="traces-title">Traces</h2>
      <ul>
        {(all ? rows : rows.slice(0, SHOWN)).map((row) => (
          <li key={row.id}>
            <a href={traceLink(row.id)}>
              <bdi>{row.id.replace(/^~/, "").replaceAll("~", "/")}</bdi>
            </a>{" "}
            <span class="muted">{[countOf(row.files, "file"), bytes(row.size_bytes), began(row.changed_wall_ns, Date.now())].join(" · ")}</span>
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
