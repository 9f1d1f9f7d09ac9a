/** The selected rank: its steps compared with the mean of the others, device, memory, identity and current state. */

import { useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useMemo } from "preact/hooks";
import type { RankDocument, RanksDocument } from "../api/documents";
import { stepRange } from "../charts/columns";
import { onDevice } from "../charts/heat-words";
import { ordered, phaseProperty } from "../charts/palette";
import { Plot } from "../charts/plot";
import { useAnswer, type OpenRun } from "../run/open-run";
import { BINS, onDeviceClock } from "../run/steps";
import { extent } from "../run/stretch";
import { Card, Nothing } from "../ui/card";
import { bytes, count, duration } from "../ui/format";
import { Facts, Identity, stateWords } from "./rank-about";
import { memoryChart, memoryNames, rankChart, rankTable } from "./rank-charts";
import { comparison, comparisonAt, othersWall, rankOnDevice, type PhaseRow, type StepRows } from "./rank-others";
import { RankTable } from "./rank-table";
import { stepAxis } from "./step-axis";
import "./rank.css";

const CLOCK_MS = 1000;

/** The selected rank, or the only one. */
export function rankOf(run: OpenRun): number | null {
  const status = run.status.value;
  return run.rank.value ?? (status !== null && status.ranks === 1 && status.world_size <= 1 ? 0 : null);
}

export function RankPanel({ run }: { run: OpenRun }) {
  const rank = rankOf(run);
  const several = (run.status.value?.ranks ?? 0) > 1;
  if (rank === null) return several ? <RankTable run={run} /> : null;
  return (
    <>
      {several && <RankTable run={run} />}
      <OneRank key={rank} run={run} rank={rank} several={several} />
    </>
  );
}

function OneRank({ run, rank, several }: { run: OpenRun; rank: number; several: boolean }) {
  const view = run.view.value;
  const params = view === null ? { bins: BINS } : { bins: BINS, first: view.first, last: view.last };
  const answer = useAnswer<RankDocument>(run, `ranks/${rank}`, params);
  const tools = several && <Ways run={run} rank={rank} />;
  const title = `Rank ${rank}`;
  if (answer.value === null || answer.value.rank !== rank) {
    return (
      <Card title={title} tools={tools}>
        <Nothing>{answer.failure === null ? "Loading the rank …" : answer.failure.trouble === "missing" ? `Rank ${rank} does not exist or has not completed a step yet.` : answer.failure.message}</Nothing>
      </Card>
    );
  }
  return <Known run={run} rank={answer.value} several={several} tools={tools} />;
}

/** Buttons for other ranks, and to close. */
function Ways({ run, rank }: { run: OpenRun; rank: number }) {
  const worst = useAnswer<RanksDocument>(run, "ranks", { order: run.onDevice.value ? onDevice("work") : "work", limit: 1 }, 5000).value?.rank[0];
  const last = Math.max(run.status.value?.world_size ?? 0, run.status.value?.ranks ?? 0) - 1;
  const go = (to: number | null): void => {
    run.rank.value = to;
  };
  return (
    <>
      <span class="heat-buttons" role="group" aria-label="Other ranks">
        <button type="button" aria-label="Previous rank" title="Previous rank" disabled={rank <= 0} onClick={() => go(rank - 1)}>
          ‹
        </button>
        <button type="button" aria-label="Next rank" title="Next rank" disabled={rank >= last} onClick={() => go(rank + 1)}>
          ›
        </button>
      </span>
      {worst !== undefined && worst !== rank && (
        <button type="button" title={`Rank ${worst} takes longest`} onClick={() => go(worst)}>
          Worst rank
        </button>
      )}
      <button type="button" aria-label="Close the rank" title="Close" onClick={() => go(null)}>
        ×
      </button>
    </>
  );
}

interface KnownProps {
  run: OpenRun;
  rank: RankDocument;
  several: boolean;
  tools: ComponentChildren;
}

function Known({ run, rank, several, tools }: KnownProps) {
  const { steps: recorded } = rank;
  const device = run.onDevice.value;
  const seen = run.seen.value ?? run.steps.value;
  // By the clock of the findings; a device is timed in some steps only.
  const steps = useMemo(() => (device ? rankOnDevice(recorded) : recorded), [recorded, device]);
  const all = useMemo(() => (device && seen !== null ? onDeviceClock(seen) : seen), [seen, device]);
  const phases = useMemo(() => ordered(Object.keys(steps.phase_ns).filter((phase) => steps.phase_ns[phase]?.some((ns) => ns > 0))), [steps]);
  const others = useMemo(() => (several ? othersWall(steps, all) : steps.first.map(() => null)), [steps, all, several]);
  const rows = useMemo(() => comparison(steps, several ? all : null), [steps, all, several]);
  const timed = Object.values(recorded.device_ns).some((values) => values.some((ns) => (ns ?? 0) > 0));
  const clock = device ? ", device time" : timed ? ", host time" : "";
  const most = steps.first.reduce((widest, first, at) => Math.max(widest, (steps.last[at] ?? first) - first + 1), 0);
  const whole = extent(run.steps.value);
  const common = { ...stepAxis(run, whole), range: stepRange(run.view.value) };
  return (
    <Card title={`Rank ${rank.rank}`} part={`rank-${rank.rank}`} about={<State run={run} rank={rank} />} tools={tools} csv={{ name: `${run.name}-rank-${rank.rank}`, make: () => rankTable(recorded, ordered(Object.keys(recorded.phase_ns)), several ? othersWall(recorded, seen) : []) }}>
      {steps.first.length === 0 ? (
        <Nothing>Individual data for these steps is no longer available.</Nothing>
      ) : (
        <div class="rank-charts">
          {run.step.value !== null && <AtStep step={run.step.value} clock={clock} found={comparisonAt(steps, several ? all : null, run.step.value)} />}
          {several && <Compared title={`${meanTitle(steps, run.view.value !== null)}${clock}`} rows={rows} />}
          {/* A single rank's steps are already in the chart of step times. */}
          {several && (
            <>
              <h3>
                Phases{timed && (device ? " on the device" : " on the host")} <span class="muted">{["the line is the mean of the other ranks", most > 1 ? `each column is the mean of up to ${count(most)} steps` : ""].filter(Boolean).join(" · ")}</span>
              </h3>
              <Plot label={`Phases of rank ${rank.rank} over ${count((steps.last.at(-1) ?? 0) - (steps.first[0] ?? 0) + 1)} steps`} height={190} make={() => rankChart(steps, steps.phase_ns, phases, others)} deps={[steps, others]} format={duration} {...common} />
            </>
          )}
          {several && memoryNames(recorded).length > 0 && (
            <>
              <h3>Device memory</h3>
              <Plot label={`Device memory of rank ${rank.rank}`} height={130} make={() => memoryChart(recorded)} deps={[recorded]} format={bytes} {...common} />
            </>
          )}
        </div>
      )}
      <details class="rank-more">
        <summary>Process and settings</summary>
        <div class="rank-about">
          <Identity rank={rank} />
          <Facts sections={rank.facts_text} />
        </div>
      </details>
    </Card>
  );
}

/** The state, with the time spent in it, updated while the run is active. */
function State({ run, rank }: { run: OpenRun; rank: RankDocument }) {
  const now = useSignal(run.now() * 1e6);
  const over = run.status.value?.over ?? true;
  useEffect(() => {
    now.value = run.now() * 1e6;
    if (over) return;
    const timer = setInterval(() => (now.value = run.now() * 1e6), CLOCK_MS);
    return () => clearInterval(timer);
  }, [over, rank]);
  return <>{stateWords(rank, now.value)}</>;
}

function AtStep({ step, clock, found }: { step: number; clock: string; found: StepRows | null }) {
  if (found === null) return <Nothing>Step {count(step)} is not among the steps shown for this rank.</Nothing>;
  const title = found.first === found.last ? `Step ${count(found.first)}` : `Steps ${count(found.first)}–${count(found.last)}, mean`;
  return <Compared title={`${title}${clock}`} rows={found.rows} />;
}

/** Names the range, if one is selected: other panels show the mean of all steps. */
export function meanTitle(steps: { first: readonly number[]; last: readonly number[] }, stretch: boolean): string {
  return stretch ? `Mean of steps ${count(steps.first[0])}–${count(steps.last.at(-1))}` : "Mean per step";
}

function Compared({ title, rows }: { title: string; rows: PhaseRow[] }) {
  const beside = rows.some((row) => row.others !== null);
  const most = Math.max(1, ...rows.map((row) => Math.max(row.own, row.others ?? 0)));
  return (
    <table class="rank-compared">
      <thead>
        <tr>
          <th>{title}</th>
          <th class="number">This rank</th>
          {beside && <th class="number">Other ranks</th>}
          {beside && <th class="number">Difference</th>}
          <td class="rank-bar-head" />
        </tr>
      </thead>
      <tbody>
        {rows.map(({ phase, own, others }) => (
          <tr key={phase} class={phase === "wall" ? "whole" : ""}>
            <td>
              {phase !== "wall" && <span class="swatch" style={{ background: `var(${phaseProperty(phase)})` }} />} {phase === "wall" ? "whole step" : phase}
            </td>
            <td class="number">{duration(own)}</td>
            {beside && <td class="number">{duration(others)}</td>}
            {beside && <td class="number">{others === null ? "–" : `${own >= others ? "+" : "−"}${duration(Math.abs(own - others))}`}</td>}
            <td class="rank-two" aria-hidden="true">
              <span style={{ width: `${(own / most) * 100}%`, background: `var(${phase === "wall" ? "--text" : phaseProperty(phase)})` }} />
              <span style={{ width: `${((others ?? 0) / most) * 100}%` }} />
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
