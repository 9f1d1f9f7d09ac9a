/** Several runs side by side: how each differs from the first, where, and how they were started. The hub judges. */

import { useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect } from "preact/hooks";
import { LIST, MOST_COMPARED, encoded } from "../address";
import type { CompareDocument, ComparedRun } from "../api/compare-documents";
import { aborted, type Failure, type Source } from "../api/source";
import { go, runLink } from "../route";
import { letterOf } from "../run/compare";
import { asFailure } from "../run/open-run";
import { SeverityMark } from "../ui/severity";
import { useShortcuts } from "../ui/shortcuts";
import { StatusChip } from "../ui/status-chip";
import { setTab } from "../ui/tab";
import { began } from "../ui/when";
import { countOf } from "../words/ranks";
import { CompareCurves } from "./compare-curves";
import { CompareFindings } from "./compare-findings";
import { Letter } from "./compare-letter";
import { CompareMetrics, useMetrics } from "./compare-metrics";
import { CompareSettings } from "./compare-settings";
import { CompareTable } from "./compare-table";
import { PageTools } from "./page-tools";
import { RunPicker } from "./run-picker";
import { ScreenBar } from "./screen-bar";
import { TroubleScreen } from "./trouble";
import "./compare.css";

const AGAIN_MS = 10_000;

export function CompareScreen({ source, runs }: { source: Source; runs: string[] }) {
  const { found, failure, again } = useComparison(source, runs);
  const metrics = useMetrics(source, found);
  const [one = "", two = "", ...others] = runs;
  const show = (chosen: readonly string[]): void => go({ screen: "compare", runs: [...chosen] });
  const what = (found?.runs.map((run) => run.label) ?? runs).join(", ");
  useEffect(() => setTab(what, "none"), [what]);
  useShortcuts("Compare runs", [
    { keys: "s", words: "swap the first two runs", act: () => show([two, one, ...others]) },
    { keys: "g l", words: "go to the list of runs", act: () => go(LIST) },
  ]);
  if (failure !== null && (found === null || failure.trouble === "refused")) return <TroubleScreen failure={failure} source={source} what={what} onAgain={again} />;
  return (
    <>
      <ScreenBar home title="Compare runs">
        <span class="space" />
        <PageTools />
      </ScreenBar>
      <main id="main" class="grid" tabIndex={-1} aria-busy={found === null}>
        {found === null && <p class="nothing">Comparing {countOf(runs.length, "run")} …</p>}
        {found !== null && (
          <>
            {failure !== null && <p class="banner warning">The data is out of date: {failure.message}</p>}
            <Headline found={found} />
            <Columns source={source} found={found} show={show} />
            <CompareTable found={found} answers={metrics} />
            <CompareCurves source={source} found={found} />
            <CompareMetrics found={found} answers={metrics} />
            <CompareFindings found={found} />
            <CompareSettings found={found} />
          </>
        )}
      </main>
    </>
  );
}

/** What the comparison says about each run. */
function Headline({ found }: { found: CompareDocument }) {
  const [, ...others] = found.runs;
  return (
    <section class="card headline" aria-label="Which is faster">
      {others.map((run) => (
        <div key={run.id} class="headline-run">
          <Said run={run} />
        </div>
      ))}
    </section>
  );
}

function Said({ run: { comparison, problem } }: { run: ComparedRun }) {
  if (comparison === null) return <p class="muted">{problem === null ? "The baseline cannot be compared." : `${problem}.`}</p>;
  const { title, look, changed, cause, step, basis, needed, skew, exchanges, notices } = comparison;
  const more = [skew && `Ranks: ${skew}.`, ...exchanges.map((words) => `Exchanges: ${words}.`), ...notices].filter(Boolean);
  return (
    <>
      <p class="headline-title">
        <SeverityMark look={look} /> {title}
      </p>
      {changed.length > 0 && (
        <p>
          <SeverityMark look="warning" /> Changed: {changed.join("; ")}.
        </p>
      )}
      {cause && <p>{cause}</p>}
      <p class="muted">
        {step.join("; ")}. Based on {basis} {needed}
      </p>
      {more.map((words) => (
        <p key={words} class="muted">
          {words}
        </p>
      ))}
    </>
  );
}

function Columns({ source, found, show }: { source: Source; found: CompareDocument; show: (runs: readonly string[]) => void }) {
  const ids = found.runs.map((run) => run.id);
  return (
    <div class="sides">
      {found.runs.map((run, at) => (
        <Side key={run.id} run={run} at={at}>
          <RunPicker source={source} now={run.id} name={run.label} label="Change run" onPick={(id) => show(distinct(ids.map((one) => (one === run.id ? id : one))))} />
          {at > 0 && (
            <button type="button" class="quiet" onClick={() => show([run.id, ...ids.filter((id) => id !== run.id)])}>
              Make baseline
            </button>
          )}
          {ids.length > 2 && (
            <button type="button" class="quiet" aria-label={`Remove ${run.label}`} onClick={() => show(ids.filter((id) => id !== run.id))}>
              Remove
            </button>
          )}
        </Side>
      ))}
      {ids.length < MOST_COMPARED && (
        <section class="card side-more" aria-label="Another run">
          <RunPicker source={source} now="" label="Add a run" onPick={(id) => id !== "" && show(distinct([...ids, id]))} />
        </section>
      )}
    </div>
  );
}

/** A run can be picked twice, but is shown once; with one left there is nothing to compare. */
function distinct(ids: readonly string[]): string[] {
  return [...new Set(ids)];
}

function Side({ run, at, children }: { run: ComparedRun; at: number; children: ComponentChildren }) {
  return (
    <section class="card side" style={{ borderTopColor: `var(--series-${at % 6})` }} aria-label={`${letterOf(at)}: ${run.label}`}>
      <header>
        <Letter at={at} />
        <h2>
          <a href={runLink(run.id)}>
            <bdi>{run.label}</bdi>
          </a>
        </h2>
        {at === 0 && <span class="chip">baseline</span>}
        <StatusChip of={run} />
      </header>
      <p class="muted">
        {[began(run.created_wall_ns, Date.now()), run.ranks !== null && countOf(run.ranks, "rank"), run.steps !== null && countOf(run.steps, "step"), run.folder].filter(Boolean).join(" · ")}
      </p>
      {run.verdict ? (
        <p>
          {run.severity && <SeverityMark look={run.severity} />} {run.verdict}
        </p>
      ) : (
        <p class="muted">No verdict.</p>
      )}
      <div class="side-tools">{children}</div>
    </section>
  );
}

/** Ask the hub, and again every few seconds while one of the runs is active. */
function useComparison(source: Source, runs: readonly string[]): { found: CompareDocument | null; failure: Failure | null; again: () => void } {
  const found = useSignal<CompareDocument | null>(null);
  const failure = useSignal<Failure | null>(null);
  const turn = useSignal(0);
  useEffect(() => {
    const stop = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const ask = async (): Promise<void> => {
      if (!document.hidden || found.value === null) {
        try {
          found.value = await source.get<CompareDocument>("compare", { runs: runs.map(encoded).join(",") }, stop.signal);
          failure.value = null;
        } catch (error) {
          if (aborted(error)) return;
          failure.value = asFailure(error);
        }
      }
      if (found.value?.runs.some((run) => !run.over)) timer = setTimeout(() => void ask(), AGAIN_MS);
    };
    void ask();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [source, runs.join("\n"), turn.value]);
  return { found: found.value, failure: failure.value, again: () => void (turn.value += 1) };
}

