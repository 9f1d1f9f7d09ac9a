/** Traces of a hub: a folder that belongs to no run. The hub analyzes them when they are first opened. */

import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { LIST, encoded } from "../address";
import type { ReportDocument } from "../api/report-document";
import { aborted, type Failure, type Source } from "../api/source";
import { HubTrace, pause, type TraceAnswer } from "../api/trace-data";
import { go, route } from "../route";
import { asFailure } from "../run/open-run";
import type { TracePlace } from "../run/trace-place";
import { bytes } from "../ui/format";
import { useShortcuts } from "../ui/shortcuts";
import { setTab } from "../ui/tab";
import "../panels/trace-views.css";
import { PageTools } from "./page-tools";
import { ReportScreen } from "./report-screen";
import { ScreenBar } from "./screen-bar";
import { TroubleScreen } from "./trouble";

const SOON_MS = 80;

export function TraceScreen({ source, id }: { source: Source; id: string }) {
  useShortcuts("Traces", [{ keys: "g l", words: "go to the list of runs", act: () => go(LIST) }]);
  return <Traces source={source} path={`traces/${encoded(id)}`} title={id} what="Traces" />;
}

interface TracesProps {
  source: Source;
  /** Of the page, below `/api/v1/`. */
  path: string;
  title: string;
  /** What is missing, if it is. */
  what: string;
  bar?: ComponentChildren;
  lead?: ComponentChildren;
}

export function Traces({ source, path, title, what, bar, lead }: TracesProps) {
  const [answer, setAnswer] = useState<TraceAnswer | null>(null);
  const [failure, setFailure] = useState<Failure | null>(null);
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    const ask = async (): Promise<void> => {
      for (;;) {
        const found = await source.get<TraceAnswer>(path, {}, stop.signal);
        setAnswer(found);
        setFailure(null);
        if (found.state === "done" || found.state === "failed") return;
        await pause(SOON_MS, stop.signal);
      }
    };
    ask().catch((error: unknown) => {
      if (!aborted(error)) setFailure(asFailure(error));
    });
    return () => stop.abort();
  }, [source, path, turn]);
  useEffect(() => setTab(title, "none"), [title]);
  const report: ReportDocument | null = answer !== null && answer.state === "done" ? answer : null;
  const data = useMemo(() => (report === null ? null : new HubTrace(source, path, report)), [source, path, report]);
  const again = (): void => setTurn(turn + 1);
  if (failure?.trouble === "missing") return <Standing title={title} bar={bar} heading={`${what} not found`} words={failure.message} />;
  if (failure !== null && report === null) return <TroubleScreen failure={failure} source={source} what={title} onAgain={again} />;
  if (report !== null && data !== null) {
    const { view = null, rank, peer = null } = route.value;
    const onPlace = (place: TracePlace): void => go(place);
    return <ReportScreen report={report} home traces={{ data, place: { view, rank, peer }, onPlace, title, bar, lead }} />;
  }
  if (answer?.state === "failed") return <Standing title={title} bar={bar} heading="These traces cannot be shown" words={answer.problem ?? ""} onAgain={again} />;
  return <Reading title={title} bar={bar} answer={answer} />;
}

function Reading({ title, bar, answer }: { title: string; bar: ComponentChildren; answer: TraceAnswer | null }) {
  const { read_bytes: read, total_bytes: total } = answer !== null && answer.state !== "done" ? answer : { read_bytes: 0, total_bytes: 0 };
  const waiting = answer?.state === "waiting" ? "Waiting for another analysis to end …" : read < total || total === 0 ? "Reading the traces …" : "Analyzing …";
  return (
    <>
      <ScreenBar home title={title}>
        {bar}
        <span class="space" />
        <PageTools />
      </ScreenBar>
      <main id="main" class="grid" tabIndex={-1} aria-busy>
        <div class="trace-progress" role="status">
          <p>{waiting}</p>
          <progress aria-label="Traces read" max={Math.max(total, 1)} {...(answer === null ? {} : { value: read })} />
          {total > 0 && (
            <p class="muted">
              {bytes(read)} of {bytes(total)}
            </p>
          )}
        </div>
      </main>
    </>
  );
}

export function Standing({ title, bar, heading, words, onAgain }: { title: string; bar?: ComponentChildren; heading: string; words: string; onAgain?: () => void }) {
  return (
    <>
      <ScreenBar home title={title}>
        {bar}
        <span class="space" />
        <PageTools />
      </ScreenBar>
      <main id="main" class="trouble" tabIndex={-1} aria-busy={false}>
        <section class="card" aria-labelledby="standing-title">
          <h2 id="standing-title">{heading}</h2>
          <p>{words}</p>
          <p>
            {onAgain && (
              <button type="button" onClick={onAgain}>
                Try again
              </button>
            )}{" "}
            <a href="#/">All runs</a>
          </p>
        </section>
      </main>
    </>
  );
}
