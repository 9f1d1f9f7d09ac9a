/** Host and GPU metrics: one metric at a time, a line for each node or device. */

import { useComputed, useSignal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";
import type { SamplesDocument } from "../api/documents";
import type { NodesDocument } from "../api/node-documents";
import { stepRange, viewOf } from "../charts/columns";
import { LineLegend } from "../charts/line-legend";
import { Plot } from "../charts/plot";
import { unlessAll } from "../charts/window";
import { StepClock } from "../run/align";
import { useAnswer, type OpenRun } from "../run/open-run";
import { useSlowly } from "../run/slowly";
import { extent, wallSpan } from "../run/stretch";
import { Card, Nothing } from "../ui/card";
import { count } from "../ui/format";
import { FIGURES, known, machineChart, machineLines, machineWords, nodeName, type Figure } from "./machine-figures";
import { curveTable, moments } from "./memory-figures";

const MOST_LINES = 12;
const CALM_MS = 1000;
/** If a hub has too many samples for one response, only this many nodes are requested. */
const FEW_NODES = 16;

export function Machine({ run }: { run: OpenRun }) {
  const few = useSignal<string | null>(null);
  const there = useKnown(run, few.value);
  const chosen = useSignal<string | null>(null);
  const node = useSignal<string | null>(null);
  const timed = useSignal(false);
  const nodes = useFewNodes(run, there.tooMany);
  useEffect(() => {
    few.value = nodes;
  }, [nodes]);

  const figure = there.figures.find((one) => named(one) === chosen.value) ?? preferred(there.figures);
  const all = useSlowly(run.steps, CALM_MS);
  const whole = extent(all);
  const clock = useMemo(() => (all === null ? null : new StepClock(all)), [all]);
  const span = clock === null || whole === null ? {} : wallSpan(run.view.value, whole, clock);
  const answer = useAnswer<SamplesDocument>(
    run,
    figure === null ? null : "samples",
    { kind: figure?.kind ?? "host", fields: figure?.field ?? "", bins: 400, limit: 1024, ...(few.value === null ? {} : { nodes: few.value }), ...span },
    5000,
  );
  const samples = answer.value !== null && answer.value.kind === figure?.kind ? answer.value : null;
  const lines = useMemo(
    () => (samples === null || figure === null ? null : machineLines(samples, figure, timed.value ? null : clock, node.value, MOST_LINES)),
    [samples, figure, node.value, timed.value, timed.value ? null : clock],
  );
  if (figure === null && there.none && run.status.value?.over === true) return null;
  if (figure === null || lines === null || whole === null) {
    return (
      <Card title="Hosts and GPUs">
        <Nothing>{answer.failure?.message ?? (figure !== null && whole === null ? "No step has ended yet." : there.why)}</Nothing>
      </Card>
    );
  }
  const names = new Map(samples?.series.map((series) => [series.node, nodeName(series)]) ?? []);
  return (
    <Card
      title="Hosts and GPUs"
      about={`${figure.name}, by ${figure.kind === "gpu" ? "device" : "node"}${lines.median ? `: the worst ${MOST_LINES} of ${count(lines.of)}` : ""}${few.value === null ? "" : `; only the first ${FEW_NODES} nodes`}`}
      tools={
        <>
          <label>
            <span class="hidden">Figure</span>
            <select value={named(figure)} onChange={(event) => (chosen.value = event.currentTarget.value)}>
              {there.figures.map((one) => (
                <option key={named(one)} value={named(one)}>
                  {one.name}
                </option>
              ))}
            </select>
          </label>
          {names.size > 1 && (
            <label>
              <span class="hidden">Nodes</span>
              <select value={node.value ?? ""} onChange={(event) => (node.value = event.currentTarget.value || null)}>
                <option value="">all nodes</option>
                {[...names].map(([name, shown]) => (
                  <option key={name} value={name}>
                    {shown}
                  </option>
                ))}
              </select>
            </label>
          )}
          <button type="button" aria-pressed={timed.value} onClick={() => (timed.value = !timed.value)}>
            over time
          </button>
        </>
      }
      csv={{ name: `${run.name}-${figure.field}`, make: () => curveTable(moments(lines.x, clock, timed.value), lines.curves, figure.unit) }}
    >
      {lines.x.length === 0 ? (
        <Nothing>
          There are no samples for these steps (machines are sampled once per second). {lines.outside > 0 && "Use “over time” to see those before and after."}
        </Nothing>
      ) : (
        <Plot
          label={machineWords(lines, figure)}
          height={190}
          {...(timed.value ? {} : { together: `${run.name}/steps` })}
          make={() => machineChart(lines, figure, timed.value)}
          deps={[lines, figure]}
          range={timed.value ? null : stepRange(run.view.value ?? whole)}
          all={timed.value ? null : stepRange(whole)}
          format={figure.format}
          chosen={timed.value ? null : run.step.value}
          onChoose={(x) => {
            const step = timed.value ? (clock?.step(x * 1e9) ?? null) : x;
            if (step !== null) run.step.value = timed.value ? Math.floor(step) : Math.round(step);
          }}
          onStretch={(first, last) => {
            const [from, to] = timed.value ? [clock?.step(first * 1e9) ?? whole.first, clock?.step(last * 1e9) ?? whole.last] : [first, last];
            run.view.value = unlessAll(viewOf(from, to, whole), whole);
          }}
          onWhole={() => {
            run.view.value = null;
          }}
        />
      )}
      {lines.x.length > 0 && <LineLegend label={`Lines of ${figure.name}`} lines={lines.curves.map(({ name }, at) => ({ name, look: lines.median ? (at === 0 ? null : at - 1) : at }))} />}
    </Card>
  );
}

function named({ kind, field }: Figure): string {
  return `${kind}/${field}`;
}

/** GPU utilization if there is any, else CPU. */
function preferred(figures: readonly Figure[]): Figure | null {
  return figures.find(({ field }) => field === "util_percent") ?? figures.find(({ field }) => field === "cpu_percent") ?? figures[0] ?? null;
}

/** The available metrics: requested rarely and without curves. */
function useKnown(run: OpenRun, nodes: string | null) {
  const some = { bins: 1, limit: 64, ...(nodes === null ? {} : { nodes }) };
  const ask = (kind: Figure["kind"]) => ({ ...some, kind, fields: FIGURES.filter((one) => one.kind === kind).map(({ field }) => field).join(",") });
  const resource = useComputed(() => run.steps.value === null).value ? null : "samples";
  const hosts = useAnswer<SamplesDocument>(run, resource, ask("host"), 30_000);
  const gpus = useAnswer<SamplesDocument>(run, resource, ask("gpu"), 30_000);
  const tooMany = hosts.failure?.trouble === "wrong";
  const loaded = hosts.value !== null && gpus.value !== null;
  const why = loaded ? "This run has no machine samples: it was too short (they are taken once per second), or sampling failed." : "Loading the machine samples …";
  return { figures: known([gpus.value, hosts.value]), tooMany, none: loaded, why: hosts.failure?.message ?? why };
}

function useFewNodes(run: OpenRun, wanted: boolean): string | null {
  const answer = useAnswer<NodesDocument>(run, wanted ? "nodes" : null, { limit: FEW_NODES }, 60_000);
  const names = answer.value?.nodes.map(({ node }) => node) ?? [];
  return names.length === 0 ? null : names.join(",");
}
