/** Two runs side by side: which is faster, where the difference lies, and how they were started. */

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { LIST } from "../address";
import type { Failure, Source } from "../api/source";
import { aborted } from "../api/source";
import { numberText } from "../panels/metrics";
import { compareLink, go, runLink } from "../route";
import { cutShort, difference, verdictOf } from "../run/compare";
import { askRun, memoryPairs, metricPairs, onDevice, pacePair, phasePairs, stepPairs, type ComparedRun } from "../run/compared-run";
import { asFailure } from "../run/open-run";
import { bytes, count, digits, duration } from "../ui/format";
import { Icon } from "../ui/icons";
import { useShortcuts } from "../ui/shortcuts";
import { StatusChip } from "../ui/status-chip";
import { setTab } from "../ui/tab";
import { began } from "../ui/when";
import { countOf } from "../words/ranks";
import { CompareCurves } from "./compare-curves";
import { Figures } from "./compare-figures";
import { CompareSettings } from "./compare-settings";
import { PageTools } from "./page-tools";
import { RunPicker } from "./run-picker";
import { ScreenBar } from "./screen-bar";
import { TroubleScreen } from "./trouble";
import "./compare.css";

const AGAIN_MS = 5000;
const SEVERITY_SHAPES = { critical: "✖", warning: "▲", info: "●" };

interface CompareProps {
  source: Source;
  one: string;
  two: string;
}

export function CompareScreen({ source, one, two }: CompareProps) {
  const { pair, failure, again } = usePair(source, one, two);
  const metrics = pair === null ? [] : metricPairs(...pair);
  const swap = (): void => go({ screen: "compare", runs: [two, one] });
  useEffect(() => setTab(`${one} and ${two}`, "none"), [one, two]);
  useShortcuts("Compare runs", [
    { keys: "s", words: "swap sides", act: swap },
    { keys: "g l", words: "go to the list of runs", act: () => go(LIST) },
  ]);
  if (failure !== null && (pair === null || failure.trouble === "refused")) return <TroubleScreen failure={failure} source={source} what={`${one} and ${two}`} onAgain={again} />;
  return (
    <>
      <ScreenBar home title="Compare runs">
        <span class="space" />
        <PageTools />
      </ScreenBar>
      <main id="main" class="grid" tabIndex={-1} aria-busy={pair === null}>
        {pair === null && <p class="nothing">Opening both runs …</p>}
        {pair !== null && (
          <>
            {failure !== null && <p class="banner warning">The data is out of date: {failure.message}</p>}
            <Headline pair={pair} />
            <div class="sides">
              <Side run={pair[0]} letter="A" source={source} onPick={(id) => location.assign(compareLink(id, two))} />
              <button type="button" class="icon-button swap" aria-label="Swap sides" title="Swap sides (s)" onClick={swap}>
                <Icon name="swap" />
              </button>
              <Side run={pair[1]} letter="B" source={source} onPick={(id) => location.assign(compareLink(one, id))} />
            </div>
            <CompareCurves pair={pair} />
            <Figures title="Step time" about={`${onDevice(...pair) ? "host time, " : ""}steady steps, mean over ranks`} pairs={stepPairs(...pair)} shown={duration} words={["faster", "slower"]} half />
            <Figures
              title="Pace and memory"
              pairs={[pacePair(...pair)]}
              shown={digits}
              words={["faster", "slower"]}
              more={{ pairs: memoryPairs(...pair), shown: bytes, words: ["less", "more"] }}
              half
            />
            <Figures title="Phases" about={`${onDevice(...pair) ? "device time, " : ""}mean over ranks and steps`} pairs={phasePairs(...pair)} shown={duration} words={["shorter", "longer"]} bars />
            {metrics.length > 0 && <Figures title="Metrics" about="noted by the scripts, last value" pairs={metrics} shown={numberText} words={["less", "more"]} />}
            <CompareSettings pair={pair} />
          </>
        )}
      </main>
    </>
  );
}

function Headline({ pair: [one, two] }: { pair: [ComparedRun, ComparedRun] }) {
  const [median] = stepPairs(one, two);
  if (median === undefined) return null;
  const winner = difference(median)?.winner ?? null;
  return (
    <section class="card headline" aria-label="Which is faster">
      <p>{verdictOf(median, `A (${short(one.about.name)})`, `B (${short(two.about.name)})`, duration)}</p>
      {winner !== null && median.spread !== null && <p class="muted">This exceeds the step-to-step spread of ±{duration(median.spread)}.</p>}
      {winner !== null && median.spread === null && <p class="muted">Too few individual steps are available to estimate the step-to-step spread.</p>}
      {cutShort(one.about, two.about).map((words) => (
        <p key={words} class="muted">
          {words}
        </p>
      ))}
      {one.about.world_size !== two.about.world_size && (
        <p class="muted">
          They have {count(one.about.world_size)} and {count(two.about.world_size)} ranks, so a step is not the same amount of work.
        </p>
      )}
    </section>
  );
}

interface SideProps {
  run: ComparedRun;
  letter: "A" | "B";
  source: Source;
  onPick: (id: string) => void;
}

function Side({ run, letter, source, onPick }: SideProps) {
  const { about } = run;
  const begun = about.context.created_wall_ns;
  return (
    <section class={`card side side-${letter.toLowerCase()}`} aria-label={`${letter}: ${about.name}`}>
      <header>
        <span class="letter" aria-hidden="true">
          {letter}
        </span>
        <h2>
          <a href={runLink(run.id)}>
            <bdi>{about.name}</bdi>
          </a>
        </h2>
        <StatusChip of={about} />
      </header>
      <p class="muted">
        {begun !== null && `${began(begun, Date.now())} · `}
        {countOf(about.ranks, "rank")} · {countOf(about.newest_step + 1, "step")}
      </p>
      {about.verdict === null ? (
        <p class="muted">Nothing was found.</p>
      ) : (
        <p class={`side-verdict ${about.verdict.severity}`}>
          <span aria-hidden="true">{SEVERITY_SHAPES[about.verdict.severity]}</span> {about.verdict.title}
          {about.verdict.price !== null && <span class="muted"> {about.verdict.price}</span>}
        </p>
      )}
      <RunPicker source={source} now={run.id} onPick={onPick} />
    </section>
  );
}

function short(name: string): string {
  return name.length > 40 ? `${name.slice(0, 39)}…` : name;
}

/** Load both runs, and again every few seconds while one of them is active. */
function usePair(source: Source, one: string, two: string): { pair: [ComparedRun, ComparedRun] | null; failure: Failure | null; again: () => void } {
  const pair = useSignal<[ComparedRun, ComparedRun] | null>(null);
  const failure = useSignal<Failure | null>(null);
  const turn = useSignal(0);
  useEffect(() => {
    const stop = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const ask = async (): Promise<void> => {
      if (!document.hidden || pair.value === null) {
        try {
          pair.value = await Promise.all([askRun(source, one, stop.signal), askRun(source, two, stop.signal)]);
          failure.value = null;
        } catch (error) {
          if (aborted(error)) return;
          failure.value = asFailure(error);
        }
      }
      if (pair.value?.some((run) => !run.about.over)) timer = setTimeout(() => void ask(), AGAIN_MS);
    };
    void ask();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [source, one, two, turn.value]);
  return { pair: pair.value, failure: failure.value, again: () => void (turn.value += 1) };
}
