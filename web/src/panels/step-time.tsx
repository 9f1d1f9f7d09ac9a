/** Step time by phase, with findings and events marked at their steps. */

import { useComputed, useSignal, useSignalEffect, type Signal } from "@preact/signals";
import { useMemo, useRef } from "preact/hooks";
import type { StepsDocument } from "../api/documents";
import { stepRange, viewOf } from "../charts/columns";
import { Overview } from "../charts/overview";
import { ordered, PHASE_MEANING, phaseProperty } from "../charts/palette";
import { Plot } from "../charts/plot";
import { newest, unlessAll } from "../charts/window";
import { StepClock } from "../run/align";
import type { OpenRun, View } from "../run/open-run";
import { devicePhases, deviceSlowest, quantile } from "../run/steps";
import { extent, useStretch } from "../run/stretch";
import { Card, Nothing } from "../ui/card";
import { count, duration } from "../ui/format";
import { theme } from "../ui/theme";
import { eventMarks, findingMarks, goTo } from "./finding-marks";
import { aboutWords, heightOf, stepTable, stepTimeChart, stepTip, stepWords, WHOSE, type Shown, type Whose } from "./step-time-chart";
import "./step-time.css";

const LAST = 200;
/** How often a following window moves; each move changes the address, which browsers limit. */
const FOLLOW_MS = 500;
const NO_TIME = new Set(["wall", "work"]);

export function StepTime({ run }: { run: OpenRun }) {
  const whole = extent(run.steps.value);
  if (whole === null || run.steps.value === null) {
    return (
      <Card title="Step time">
        <Nothing>{run.about.value === null ? "Loading the run …" : run.status.value?.over === true ? "No step was recorded in this run." : "No step has ended yet."}</Nothing>
      </Card>
    );
  }
  return <Steps run={run} all={run.steps.value} whole={whole} />;
}

function Steps({ run, all, whole }: { run: OpenRun; all: StepsDocument; whole: View }) {
  const shown = useSignal<Shown>({ whose: "mean", slowest: true, spread: false, whole: false });
  const following = useSignal(false);
  useFollowing(run, following);
  const box = useRef<HTMLDivElement>(null);
  const { steps: stretch, asking } = useStretch(run, box.current?.clientWidth ?? 1200);
  const steps = stretch ?? all;
  const hostPhases = useMemo(() => phasesOf(all), [all]);
  const timed = useMemo(() => ordered(devicePhases(all)), [all]);
  const picked = useSignal<boolean | null>(null);
  const device = (picked.value ?? run.onDevice.value) && timed.length > 0;
  const phases = device ? timed : hostPhases;
  const several = all.ranks.some((ranks) => ranks > 1);
  const view = run.view.value;
  const look = (next: View | null): void => {
    following.value = false;
    run.view.value = next;
  };
  const marks = useMarks(run, all, whole);
  const own = several ? shown.value : { ...shown.value, whose: "mean" as Whose, slowest: false, spread: false };
  const choice = device ? { ...own, whose: "device" as Whose, spread: false } : own;
  const { whose, slowest, spread, whole: high } = choice;
  const chart = useMemo(() => stepTimeChart(steps, phases, choice), [steps, phases.join("\n"), whose, slowest, spread, high, theme.value]);
  const words = useMemo(() => stepWords(steps, phases, device), [steps, device]);
  const [from, to] = stepRange(view ?? whole) ?? [0, 1];
  const height = heightOf(chart.data, { min: from, max: to }, choice.whole);
  const overview = useMemo(() => (device ? deviceSlowest(all) : quantile(all, "wall", 1)), [all, device]);
  return (
    <Card
      title="Step time"
      part="steps"
      about={`${aboutWords(choice.whose, several, timed.length > 0)}${run.about.value?.reading === true ? "; the hub is still reading the earlier steps" : ""}`}
      tools={
        <>
          {timed.length > 0 && <Clocks device={device} choose={(chosen) => (picked.value = chosen)} />}
          {several && <Choices shown={shown} device={device} />}
        </>
      }
      csv={{ name: `${run.name}-steps`, make: () => stepTable(steps, hostPhases) }}
    >
      <div ref={box} class="over-steps" aria-busy={asking}>
        <Plot
          label={`${words}. ${marks.length} marks.`}
          height={240}
          together={`${run.name}/steps`}
          make={() => chart}
          deps={[chart]}
          range={stepRange(view)}
          all={stepRange(whole)}
          tip={(index) => stepTip(steps, phases, choice, index)}
          marks={marks}
          chosen={run.step.value}
          onChoose={(step) => {
            run.step.value = Math.round(step);
          }}
          onStretch={(first, last) => look(unlessAll(viewOf(first, last, whole), whole))}
          onWhole={() => look(null)}
        />
        <Overview first={all.first} values={overview} whole={whole} view={view} onView={look} />
      </div>
      <div class="step-time-foot">
        <Legend phases={phases} slowest={choice.slowest} spread={choice.spread} />
        {(height.beyond > 0 || shown.value.whole) && (
          <button type="button" class="quiet" aria-pressed={shown.value.whole} onClick={() => (shown.value = { ...shown.value, whole: !shown.value.whole })}>
            {height.beyond > 0 ? `▲ ${count(height.beyond)} higher, up to ${duration(height.most)}: show full height` : "full height"}
          </button>
        )}
        <Windows run={run} whole={whole} following={following} look={look} />
      </div>
    </Card>
  );
}

/** Choose host or device time. */
function Clocks({ device: now, choose }: { device: boolean; choose: (device: boolean) => void }) {
  return (
    <span class="heat-buttons" role="group" aria-label="Clock">
      {[false, true].map((device) => (
        <button key={String(device)} type="button" aria-pressed={now === device} onClick={() => choose(device)}>
          {device ? "device" : "host"}
        </button>
      ))}
    </span>
  );
}

function Choices({ shown, device }: { shown: Signal<Shown>; device: boolean }) {
  const set = (change: Partial<Shown>): void => {
    shown.value = { ...shown.value, ...change };
  };
  return (
    <>
      {!device && (
        <label>
          <span class="hidden">Ranks</span>
          <select value={shown.value.whose} onChange={(event) => set({ whose: event.currentTarget.value as Whose })}>
            {Object.entries(WHOSE).map(([name, words]) => (
              <option key={name} value={name}>
                {words}
              </option>
            ))}
          </select>
        </label>
      )}
      <button type="button" aria-pressed={shown.value.slowest} onClick={() => set({ slowest: !shown.value.slowest })}>
        slowest rank
      </button>
      {!device && (
        <button type="button" aria-pressed={shown.value.spread} onClick={() => set({ spread: !shown.value.spread })}>
          5–95% of ranks
        </button>
      )}
    </>
  );
}

function Legend({ phases, slowest, spread }: { phases: readonly string[]; slowest: boolean; spread: boolean }) {
  return (
    <ul class="legend step-time-legend" aria-label="Phases">
      {phases.map((phase) => (
        <li key={phase} title={PHASE_MEANING[phase] ?? "user-defined phase"}>
          <span class="swatch" style={{ background: `var(${phaseProperty(phase)})` }} />
          {phase}
        </li>
      ))}
      {slowest && (
        <li>
          <span class="line-swatch" />
          slowest rank
        </li>
      )}
      {spread && (
        <li>
          <span class="line-swatch dashed" />
          5% and 95% of ranks
        </li>
      )}
    </ul>
  );
}

function allSteps({ first, last }: View): string {
  return first === last ? `only step ${count(first)}` : `all ${count(last - first + 1)} steps`;
}

interface WindowsProps {
  run: OpenRun;
  whole: View;
  following: Signal<boolean>;
  look: (view: View | null) => void;
}

function Windows({ run, whole, following, look }: WindowsProps) {
  const view = run.view.value;
  const live = run.status.value?.over === false;
  const long = whole.last - whole.first + 1 > LAST;
  const last = (): void => {
    look(newest(LAST, whole));
    following.value = live;
  };
  return (
    <div class="step-time-windows" role="group" aria-label="Which steps">
      <span class="muted">{view === null ? allSteps(whole) : `steps ${count(view.first)}–${count(view.last)}`}</span>
      <button type="button" aria-pressed={view === null} onClick={() => look(null)}>
        all
      </button>
      {long && (
        <button type="button" onClick={last}>
          last {LAST}
        </button>
      )}
      {live && view !== null && (
        <button type="button" aria-pressed={following.value} title="Keep the newest steps in the window" onClick={() => (following.value = !following.value)}>
          follow
        </button>
      )}
    </div>
  );
}

/** While following, the window keeps its length and ends with the newest step. */
function useFollowing(run: OpenRun, following: Signal<boolean>): void {
  const timer = useRef<ReturnType<typeof setTimeout> | null>(null);
  const end = useComputed(() => extent(run.steps.value)?.last ?? -1);
  useSignalEffect(() => {
    if (!following.value || end.value < 0 || timer.current !== null) return;
    const move = (): void => {
      timer.current = null;
      const [view, whole] = [run.view.peek(), extent(run.steps.peek())];
      if (!following.peek() || view === null || whole === null || view.last === whole.last) return;
      run.view.value = newest(view.last - view.first + 1, whole);
    };
    timer.current = setTimeout(move, FOLLOW_MS);
  });
  useSignalEffect(() => () => {
    if (timer.current !== null) clearTimeout(timer.current);
    timer.current = null;
  });
}

function useMarks(run: OpenRun, all: StepsDocument, whole: View) {
  const findings = run.findings.value?.findings ?? [];
  const events = run.events.value;
  return useMemo(() => {
    const clock = new StepClock(all);
    const chooseEvent = (step: number, rank: number | null): void => {
      run.step.value = step;
      if (rank !== null) run.rank.value = rank;
    };
    return [...findingMarks(findings, (finding) => goTo(run, finding, whole)), ...eventMarks(events, findings, clock, whole, chooseEvent)];
  }, [findings, events, whole.first, whole.last]);
}

function phasesOf(steps: StepsDocument): string[] {
  const some = (name: string): boolean => (steps.mean_ns[name] ?? []).some((value) => value > 0);
  return ordered(Object.keys(steps.mean_ns).filter((name) => !NO_TIME.has(name) && some(name)));
}
