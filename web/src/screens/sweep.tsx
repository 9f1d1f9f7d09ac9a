/** A sweep of this hub: the front of its variants. The hub writes the document; requested again while trials are missing. */

import { useEffect, useState } from "preact/hooks";
import { LIST, encoded } from "../address";
import type { ReportDocument } from "../api/report-document";
import { aborted, type Failure, type Source } from "../api/source";
import { go } from "../route";
import { asFailure } from "../run/open-run";
import { useShortcuts } from "../ui/shortcuts";
import { setTab } from "../ui/tab";
import { PageTools } from "./page-tools";
import { ReportScreen } from "./report-screen";
import { ScreenBar } from "./screen-bar";
import { TroubleScreen } from "./trouble";

const AGAIN_MS = 10_000;

export function SweepScreen({ source, id }: { source: Source; id: string }) {
  const [report, setReport] = useState<ReportDocument | null>(null);
  const [failure, setFailure] = useState<Failure | null>(null);
  const [turn, setTurn] = useState(0);
  useShortcuts("Sweep", [{ keys: "g l", words: "go to the list of runs", act: () => go(LIST) }]);
  useEffect(() => {
    const stop = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const later = (): void => void (timer = setTimeout(() => void (document.hidden ? later() : ask()), AGAIN_MS));
    const ask = async (): Promise<void> => {
      try {
        const found = await source.get<ReportDocument>(`sweeps/${encoded(id)}`, {}, stop.signal);
        setReport(found);
        setFailure(null);
        if (found.complete === false) later();
      } catch (error) {
        if (!aborted(error)) setFailure(asFailure(error));
      }
    };
    void ask();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [source, id, turn]);
  useEffect(() => setTab(id, "none"), [id]);
  if (failure?.trouble === "missing") return <Missing id={id} />;
  if (failure !== null && (report === null || failure.trouble === "refused")) return <TroubleScreen failure={failure} source={source} what={id} onAgain={() => setTurn(turn + 1)} />;
  if (report !== null) return <ReportScreen report={report} home />;
  return (
    <>
      <ScreenBar home title={id}>
        <span class="space" />
        <PageTools />
      </ScreenBar>
      <main id="main" class="grid" tabIndex={-1} aria-busy>
        <p class="nothing">Reading the sweep …</p>
      </main>
    </>
  );
}

function Missing({ id }: { id: string }) {
  return (
    <>
      <ScreenBar home title={id}>
        <span class="space" />
        <PageTools />
      </ScreenBar>
      <main id="main" class="trouble" tabIndex={-1} aria-busy={false}>
        <section class="card" aria-labelledby="no-sweep">
          <h2 id="no-sweep">Sweep not found</h2>
          <p>Its folder may have been moved or removed, or this hub may serve another folder.</p>
          <p>
            <a href="#/">All runs</a>
          </p>
        </section>
      </main>
    </>
  );
}
