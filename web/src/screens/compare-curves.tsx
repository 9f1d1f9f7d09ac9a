/** The step times of the compared runs in one chart: by step, or by share of the run. */

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import uPlot from "uplot";
import { encoded } from "../address";
import type { CompareDocument } from "../api/compare-documents";
import type { StepsDocument } from "../api/documents";
import type { Source } from "../api/source";
import { lineLook, lineSeries } from "../charts/curves";
import { Plot, type Chart } from "../charts/plot";
import { ceiling, curve, letterOf } from "../run/compare";
import { BINS } from "../run/steps";
import { Card, Nothing } from "../ui/card";
import { duration, tick } from "../ui/format";

interface Drawn {
  letter: string;
  at: number;
  name: string;
  steps: StepsDocument;
}

export function CompareCurves({ source, found }: { source: Source; found: CompareDocument }) {
  const by = useSignal<"step" | "share">("step");
  const drawn = useSteps(source, found);
  const device = found.clock === "device";
  const several = found.runs.some((run) => (run.ranks ?? 0) > 1);
  if (drawn === null || drawn.length === 0) {
    return <Card title="Step time over the run">{drawn === null ? <Nothing>Reading the steps …</Nothing> : <Nothing>None of the runs has completed a step yet.</Nothing>}</Card>;
  }
  const { top, beyond } = ceiling(drawn.flatMap((run) => curve(run.steps, "step", device).y));
  return (
    <Card
      title="Step time over the run"
      about={`${device ? "device time" : "host time"}${several ? ", mean over ranks" : ""}${beyond > 0 ? `; ${beyond === 1 ? "one point is" : `${beyond} points are`} off the chart` : ""}`}
      tools={
        <>
          <button type="button" class="quiet" aria-pressed={by.value === "step"} onClick={() => void (by.value = "step")}>
            by step
          </button>
          <button type="button" class="quiet" aria-pressed={by.value === "share"} onClick={() => void (by.value = "share")}>
            by share of the run
          </button>
        </>
      }
      csv={{ name: "compare-steps", make: () => table(drawn) }}
    >
      <Plot
        key={by.value}
        label={`Step time of ${drawn.map((run) => `${run.letter}, ${run.name}`).join("; of ")}, over ${by.value === "step" ? "steps" : "the share of each run"}`}
        height={230}
        make={() => chart(drawn, by.value, device, top)}
        deps={[drawn, by.value]}
        format={duration}
      />
      <ul class="legend" aria-label="Lines">
        {drawn.map((run) => (
          <li key={run.letter}>
            <span class="compare-line" style={{ borderTopColor: `var(${lineLook(run.at).property})`, borderTopStyle: lineLook(run.at).dash === undefined ? "solid" : "dashed" }} /> {run.letter}: {run.name}
          </li>
        ))}
      </ul>
    </Card>
  );
}

/** The steps of all runs that have some; null until they are known. */
function useSteps(source: Source, found: CompareDocument): Drawn[] | null {
  const drawn = useSignal<Drawn[] | null>(null);
  useEffect(() => {
    const stop = new AbortController();
    const ask = (id: string): Promise<StepsDocument | null> => source.get<StepsDocument>(`runs/${encoded(id)}/steps`, { bins: BINS, worst: 1 }, stop.signal).catch(() => null);
    void Promise.all(found.runs.map((run) => ask(run.id))).then((answers) => {
      if (stop.signal.aborted) return;
      drawn.value = found.runs.flatMap((run, at) => {
        const steps = answers[at] ?? null;
        return steps === null || steps.first.length === 0 ? [] : [{ letter: letterOf(at), at, name: run.label, steps }];
      });
    });
    return () => stop.abort();
  }, [source, found]);
  return drawn.value;
}

function chart(drawn: readonly Drawn[], by: "step" | "share", device: boolean, top: number): Chart {
  const lines = drawn.map((run) => curve(run.steps, by, device));
  return {
    options: {
      series: [{}, ...drawn.map((run) => lineSeries(run.letter, run.at))],
      scales: { x: { time: false }, y: { range: () => [0, top || 1] } },
      axes: [by === "share" ? { values: (_plot, ticks) => ticks.map((share) => `${share}%`) } : {}, { size: 70, values: (_plot, ticks) => ticks.map((value) => tick(value, duration)) }],
    },
    data: uPlot.join(lines.map(({ x, y }) => [x, y])),
  };
}

function table(drawn: readonly Drawn[]) {
  const rows = drawn.flatMap((run) => run.steps.first.map((first, at) => [run.letter, run.name, first, run.steps.last[at] ?? null, (run.steps.mean_ns["wall"]?.[at] ?? 0) / 1e6]));
  return { columns: ["run", "name", "first_step", "last_step", "mean_ms"], rows };
}
