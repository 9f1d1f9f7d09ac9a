/** Memory over steps, of devices and processes; if it keeps growing, when it runs out. */

import { useSignal } from "@preact/signals";
import { useMemo } from "preact/hooks";
import type { SamplesDocument, StepsDocument } from "../api/documents";
import { stepRange } from "../charts/columns";
import { LineLegend } from "../charts/line-legend";
import { Plot } from "../charts/plot";
import type { Curve } from "../charts/curves";
import { StepClock } from "../run/align";
import { useAnswer, type OpenRun, type View } from "../run/open-run";
import { useSlowly } from "../run/slowly";
import { extent, wallSpan } from "../run/stretch";
import { Card, Nothing } from "../ui/card";
import { bytes } from "../ui/format";
import { deviceCurves, forecasts, forecastWords, hostCurves, memoryChart, memoryTable, moments, type Forecast } from "./memory-figures";
import { stepAxis } from "./step-axis";
import "./memory.css";

const WORST = 4;
const CALM_MS = 1000;
/** A forecast up to this multiple of the run's length is shown by default. */
const NEAR = 2;

export function Memory({ run }: { run: OpenRun }) {
  const all = useSlowly(run.steps, CALM_MS);
  const whole = extent(all);
  if (all === null || whole === null) {
    return (
      <Card title="Memory" class="half">
        <Nothing>{run.about.value === null ? "Loading the run …" : "No step has ended yet."}</Nothing>
      </Card>
    );
  }
  return <MemoryOf run={run} all={all} whole={whole} />;
}

function MemoryOf({ run, all, whole }: { run: OpenRun; all: StepsDocument; whole: View }) {
  const steps = useSlowly(run.seen, CALM_MS) ?? all;
  const device = useMemo(() => deviceCurves(steps), [steps]);
  const clock = useMemo(() => new StepClock(all), [all]);
  const params = { kind: "process", fields: "rss,rss_file", bins: 300, limit: 1024, ...wallSpan(run.view.value, whole, clock) };
  const samples = useAnswer<SamplesDocument>(run, "samples", params, 5000);
  const host = useMemo(() => (samples.value === null ? null : hostCurves(samples.value, clock, WORST)), [samples.value, run.status.value?.over === true ? clock : null]);
  const found = forecasts(run.findings.value?.findings ?? []);
  const ofDevice = found.find(({ which }) => which.startsWith("device")) ?? null;
  const ofHost = found.find(({ which }) => which.startsWith("host")) ?? null;
  const table = () =>
    memoryTable([
      { what: "device", rows: moments(device.x, clock), curves: device.curves },
      { what: "host", rows: moments(host?.x ?? [], clock), curves: host?.curves ?? [] },
    ]);
  const nothing = device.curves.length === 0 && samples.value !== null && (host?.curves.length ?? 0) === 0;
  if (nothing && run.status.value?.over === true && run.view.value === null) return null;
  return (
    <Card title="Memory" about="over steps" class="half" csv={{ name: `${run.name}-memory`, make: table }}>
      {device.curves.length > 0 ? (
        <Part run={run} whole={whole} heading="Device" x={device.x} curves={device.curves} median={false} forecast={ofDevice} />
      ) : null}
      {host !== null && host.curves.length > 0 && host.x.length > 0 ? (
        <Part run={run} whole={whole} heading="Processes" about="without mapped files" x={host.x} curves={host.curves} median={host.median} forecast={ofHost} />
      ) : (
        <p class="muted memory-none">{samples.failure?.message ?? (samples.value === null ? "Loading process memory …" : "Processes: no samples for these steps.")}</p>
      )}
    </Card>
  );
}

interface PartProps {
  run: OpenRun;
  whole: View;
  heading: string;
  about?: string;
  x: number[];
  curves: Curve[];
  median: boolean;
  forecast: Forecast | null;
}

function Part({ run, whole, heading, about, x, curves, median, forecast }: PartProps) {
  const view = run.view.value;
  const far = forecast?.endStep != null && forecast.endStep > whole.last ? forecast.endStep : null;
  const near = far !== null && far - whole.first <= NEAR * (whole.last - whole.first + 1);
  const toEnd = useSignal<boolean | null>(null);
  const shown = view === null && far !== null && (toEnd.value ?? near);
  const until = shown ? (far ?? whole.last) : whole.last;
  const range = view !== null ? stepRange(view) : stepRange({ first: whole.first, last: until });
  const most = Math.max(0, ...curves.flatMap(({ values }) => values.filter((value): value is number => value !== null)));
  return (
    <section class="memory-part">
      <h3>
        {heading} {about !== undefined && <span class="muted">{about}</span>}
      </h3>
      {forecast !== null && (
        <p class={`forecast ${forecast.severity}`}>
          <span>
            <strong>{forecastWords(forecast)}.</strong> Based on the lowest points after warm-up; the dashed line shows this rate.
          </span>
          {far !== null && view === null && (
            <button type="button" class="quiet" aria-pressed={shown} onClick={() => (toEnd.value = !shown)}>
              {shown ? "only these steps" : "show until then"}
            </button>
          )}
        </p>
      )}
      <Plot
        label={`${heading} memory over steps; at most ${bytes(most)}${forecast === null ? "" : `; ${forecastWords(forecast)}`}`}
        height={170}
        {...stepAxis(run, whole)}
        make={() => memoryChart(x, curves, median, forecast, until)}
        deps={[x, curves, median, forecast?.endStep, forecast?.lastBytes, until]}
        range={range}
        format={bytes}
      />
      <LineLegend
        label={`Lines of ${heading.toLowerCase()} memory`}
        lines={curves.map(({ name }, at) => ({ name, look: median ? (at === 0 ? null : at - 1) : at, ...chooses(run, name) }))}
      />
    </section>
  );
}

function chooses(run: OpenRun, name: string): { onChoose?: () => void } {
  const rank = /^rank (\d+)$/.exec(name)?.[1];
  return rank === undefined ? {} : { onChoose: () => (run.rank.value = Number(rank)) };
}
