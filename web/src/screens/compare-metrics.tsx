/** Loss and other metrics of the compared runs, one chart for each name, with a line for each run that has it. */

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import uPlot from "uplot";
import { encoded } from "../address";
import type { CompareDocument } from "../api/compare-documents";
import type { MetricsDocument } from "../api/documents";
import type { Source } from "../api/source";
import { lineLook, lineSeries } from "../charts/curves";
import { Plot, type Chart } from "../charts/plot";
import { axisText, numberText } from "../panels/metrics";
import { letterOf } from "../run/compare";
import { BINS } from "../run/steps";
import { Card } from "../ui/card";

export interface Overlay {
  name: string;
  /** The runs that have it, by their place in the comparison. */
  lines: { at: number; step: number[]; value: number[] }[];
}

/** `answers`: of `useMetrics`. */
export function CompareMetrics({ found, answers }: { found: CompareDocument; answers: readonly (MetricsDocument | null)[] }) {
  const overlays = overlaysOf(answers);
  if (overlays.length === 0) return null;
  const names = found.runs.map((run, at) => `${letterOf(at)}: ${run.label}`);
  return (
    <Card title="Metrics over the run" about="noted by the scripts or seen in training, by step" csv={{ name: "compare-metrics", make: () => table(found, overlays) }}>
      <div class="metrics">
        {overlays.map((overlay) => (
          <section key={overlay.name} class="metric" aria-label={overlay.name}>
            <h3>{overlay.name}</h3>
            <Plot label={`${overlay.name} of ${overlay.lines.map(({ at }) => names[at] ?? "").join("; of ")}, by step`} height={150} make={() => chart(overlay)} deps={[overlay]} format={numberText} />
          </section>
        ))}
      </div>
      <ul class="legend" aria-label="Lines of the metrics">
        {found.runs.map((run, at) => (
          <li key={run.id}>
            <span class="compare-line" style={{ borderTopColor: `var(${lineLook(at).property})`, borderTopStyle: lineLook(at).dash === undefined ? "solid" : "dashed" }} /> {names[at]}
          </li>
        ))}
      </ul>
    </Card>
  );
}

/** The metrics of each run, requested once for table and charts; null: not known. */
export function useMetrics(source: Source, found: CompareDocument | null): (MetricsDocument | null)[] {
  const answers = useSignal<(MetricsDocument | null)[]>([]);
  useEffect(() => {
    if (found === null) return undefined;
    const stop = new AbortController();
    const ask = (id: string): Promise<MetricsDocument | null> => source.get<MetricsDocument>(`runs/${encoded(id)}/metrics`, { bins: BINS }, stop.signal).catch(() => null);
    void Promise.all(found.runs.map((run) => ask(run.id))).then((all) => {
      if (!stop.signal.aborted) answers.value = all;
    });
    return () => stop.abort();
  }, [source, found]);
  return answers.value;
}

/** Metrics with a curve in at least one run; a loss first, otherwise in the order of the runs. */
export function overlaysOf(answers: readonly (MetricsDocument | null)[]): Overlay[] {
  const found = new Map<string, Overlay>();
  answers.forEach((answer, at) => {
    for (const { name, step, value } of answer?.metrics ?? []) {
      if (step.length === 0) continue;
      const overlay = found.get(name) ?? { name, lines: [] };
      overlay.lines.push({ at, step, value });
      found.set(name, overlay);
    }
  });
  return [...found.values()].sort((one, two) => Number(/loss/i.test(two.name)) - Number(/loss/i.test(one.name)));
}

function chart(overlay: Overlay): Chart {
  return {
    options: {
      series: [{ label: "step" }, ...overlay.lines.map(({ at }) => ({ ...lineSeries(letterOf(at), at), spanGaps: true }))],
      axes: [{}, { values: (_plot, ticks) => ticks.map((value) => (value === null ? "" : axisText(value))) }],
    },
    data: uPlot.join(overlay.lines.map(({ step, value }) => [step, value])),
  };
}

function table(found: CompareDocument, overlays: readonly Overlay[]) {
  const rows = overlays.flatMap(({ name, lines }) => lines.flatMap(({ at, step, value }) => step.map((one, place) => [name, letterOf(at), found.runs[at]?.label ?? "", one, value[place] ?? null])));
  return { columns: ["metric", "run", "name", "step", "value"], rows };
}
