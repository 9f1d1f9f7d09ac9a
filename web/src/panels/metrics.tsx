/** The numbers that the script gave to `stepscope.note()` or that were seen in training, such as loss, learning rate and throughput, and the pace, over steps. */

import { useMemo } from "preact/hooks";
import type { Finding, MetricsDocument, StepsDocument } from "../api/documents";
import { lineSeries } from "../charts/curves";
import { Plot, type Chart } from "../charts/plot";
import { useAnswer, type OpenRun } from "../run/open-run";
import { useSlowly } from "../run/slowly";
import { BINS } from "../run/steps";
import { extent } from "../run/stretch";
import { Card } from "../ui/card";
import type { Csv } from "../ui/csv";
import { count } from "../ui/format";
import { stepAxis } from "./step-axis";
import "./metrics.css";

type Metric = MetricsDocument["metrics"][number];

const CALM_MS = 1000;

/** Renders nothing if there are none. */
export function MetricsPanel({ run }: { run: OpenRun }) {
  const view = run.view.value;
  const all = useSlowly(run.steps, CALM_MS);
  const whole = extent(all);
  const params = view === null ? { bins: BINS } : { bins: BINS, first: view.first, last: view.last };
  const answer = useAnswer<MetricsDocument>(run, "metrics", params, 3000).value;
  const noted = answer?.metrics.filter(({ step }) => step.length > 0) ?? [];
  const metrics = useMemo(() => (all === null || noted.length === 0 ? noted : [...noted, paceOf(all)]), [answer, all]);
  const lost = lostSince(run.findings.value?.findings ?? []);
  if (answer === null || whole === null || noted.length === 0) return null;
  return (
    <Card
      title="Metrics"
      about={`noted by the script or seen in training${(run.status.value?.ranks ?? 0) > 1 ? ", mean over ranks" : ""}; samples/s and tokens/s of the job${answer.left_out > 0 ? `; ${count(answer.left_out)} more not shown` : ""}`}
      csv={{ name: `${run.name}-metrics`, make: () => metricTable(metrics) }}
    >
      <div class="metrics">
        {metrics.map((metric) => (
          <section key={metric.name} class="metric">
            <h3>
              {metric.name} <LastValue metric={metric} lost={lost.get(metric.name)} />
            </h3>
            <Plot
              label={metricWords(metric)}
              height={130}
              {...stepAxis(run, whole)}
              make={() => metricChart(metric)}
              deps={[metric]}
              format={numberText}
            />
          </section>
        ))}
      </div>
    </Card>
  );
}

function LastValue({ metric, lost }: { metric: Metric; lost: number | undefined }) {
  if (lost !== undefined) return <span class="metric-lost">NaN or infinite from step {count(lost)} on</span>;
  return <span class="muted">{numberText(metric.value.at(-1) ?? Number.NaN)}</span>;
}

/** By name, the step from which on a metric is no number: its curve ends there, and its last value is not the current one. */
export function lostSince(findings: readonly Finding[]): Map<string, number> {
  const found = findings.flatMap(({ kind, evidence: { name, first_step: step } }) => ((kind === "loss_nan" || kind === "nan_gradients") && typeof name === "string" && typeof step === "number" ? [[name, step] as const] : []));
  return new Map(found);
}

/** Steps per second over the run, from the starts of its bins. */
export function paceOf(steps: StepsDocument): Metric {
  const found: Metric = { name: "steps per second", step: [], value: [] };
  const every = Math.max(1, Math.ceil(steps.first.length / PACE_POINTS));
  for (let at = 0; at + every < steps.first.length; at += every) {
    const seconds = ((steps.start_wall_ns[at + every] ?? 0) - (steps.start_wall_ns[at] ?? 0)) / 1e9;
    const made = (steps.first[at + every] ?? 0) - (steps.first[at] ?? 0);
    if (!(seconds > 0)) continue;
    found.step.push(steps.first[at] ?? 0);
    found.value.push(made / seconds);
  }
  return found;
}

/** Few, so that hosts that run ahead of their devices do not make it jagged. */
const PACE_POINTS = 40;

function metricChart({ name, step, value }: Metric): Chart {
  return { options: { series: [{ label: "step" }, lineSeries(name, 0)], axes: [{}, { values: (_plot, ticks) => ticks.map((at) => (at === null ? "" : axisText(at))) }] }, data: [step, value] };
}

/** Accessible description. */
export function metricWords({ name, step, value }: Metric): string {
  return `${name} over ${count(step.length)} points: first ${numberText(value[0] ?? Number.NaN)}, last ${numberText(value.at(-1) ?? Number.NaN)}`;
}

export function metricTable(metrics: readonly Metric[]): Csv {
  return { columns: ["name", "step", "value"], rows: metrics.flatMap(({ name, step, value }) => step.map((at, place) => [name, at, value[place] ?? null])) };
}

/** A label that fits beside an axis: with an exponent if it would be cut off. */
export function axisText(value: number): string {
  const text = numberText(value);
  return Number.isFinite(value) && text.length > AXIS_LETTERS ? Number(value.toPrecision(4)).toExponential() : text;
}

/** In the narrower margin of `axisLeft`. */
const AXIS_LETTERS = 7;

/** Four digits, whatever the size: a learning rate is small. */
export function numberText(value: number): string {
  if (!Number.isFinite(value)) return "–";
  const rounded = Number(value.toPrecision(4));
  return Math.abs(rounded) >= 1000 && Math.abs(rounded) < 1e9 ? count(rounded) : String(rounded);
}
