/** The merged timeline of all ranks: opened in Perfetto in a new tab, or downloaded. */

import { useState } from "preact/hooks";
import { aborted } from "../api/source";
import type { TraceData } from "../api/trace-data";
import { asFailure } from "../run/open-run";
import { downloadBlob } from "../ui/csv";
import { handOver, openPerfetto, PERFETTO } from "../ui/perfetto";

export function PerfettoCard({ data, name }: { data: TraceData; name: string }) {
  const [words, setWords] = useState("");
  const [busy, setBusy] = useState(false);
  const made = (): Promise<Blob> => {
    if (data.perfetto === undefined) throw new Error("this trace has no merged timeline");
    return data.perfetto(setWords, new AbortController().signal);
  };
  const during = async (work: () => Promise<string>): Promise<void> => {
    setBusy(true);
    try {
      setWords(await work());
    } catch (error) {
      if (!aborted(error)) setWords(asFailure(error).message);
    } finally {
      setBusy(false);
    }
  };
  // The tab must be opened during the click, before the first wait: browsers block it later.
  const open = (): void => {
    const tab = openPerfetto();
    if (tab === null) setWords("The browser blocked the new tab. Allow it for this page, or download the timeline and open it in Perfetto.");
    else void during(async () => ((await handOver(tab, await made(), name)) ? "Opened in Perfetto." : "Perfetto does not respond. Download the timeline and open it there."));
  };
  const save = (): void =>
    void during(async () => {
      downloadBlob(`${name}.perfetto.json.gz`, await made());
      return "";
    });
  return (
    <section class="card perfetto" aria-label="Perfetto">
      <p>
        {data.ranks.length > 1 ? "All ranks as one timeline, on one clock." : "The whole recording as a timeline."} <span class="muted">A new tab opens {PERFETTO.replace("https://", "")}; this page hands the data to it, and it stays in your browser.</span>
        <span role="status" class="muted">
          {" "}
          {words}
        </span>
      </p>
      <button type="button" class="primary" disabled={busy} onClick={open}>
        Open in Perfetto
      </button>
      <button type="button" disabled={busy} title="For use without a network" onClick={save}>
        Download
      </button>
    </section>
  );
}
