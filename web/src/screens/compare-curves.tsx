/** The step times of two runs in one chart: by step, or by share of the run. */

import { useSignal } from "@preact/signals";
import uPlot from "uplot";
import { Plot, type Chart } from "../charts/plot";
import { ceiling, curve } from "../run/compare";
import { onDevice, type ComparedRun } from "../run/compared-run";
import { Card, Nothing } from "../ui/card";
import { duration, tick } from "../ui/format";
import { token } from "../ui/theme";

export function CompareCurves({ pair: [one, two] }: { pair: [ComparedRun, ComparedRun] }) {
  const by = useSignal<"step" | "share">("step");
  if (one.steps.first.length === 0 && two.steps.first.length === 0) {
    return (
      <Card title="Step time over the run">
        <Nothing>Neither run has completed a step yet.</Nothing>
      </Card>
    );
  }
  const device = onDevice(one, two);
  const { top, beyond } = ceiling([one, two].flatMap((run) => curve(run.steps, "step", device).y));
  return (
    <Card
      title="Step time over the run"
      about={`${device ? "device time, " : ""}mean over ranks${beyond > 0 ? `; ${beyond === 1 ? "one point is" : `${beyond} points are`} off the chart` : ""}`}
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
      csv={{ name: `compare-${one.id}-${two.id}`, make: () => table(one, two) }}
    >
      <Plot
        key={by.value}
        label={`Step time of A, ${one.about.name}, and of B, ${two.about.name}, over ${by.value === "step" ? "steps" : "the share of each run"}`}
        height={230}
        make={() => chart(one, two, by.value, top)}
        deps={[one, two, by.value]}
      />
      <ul class="legend" aria-label="Lines">
        <li>
          <span class="line-a" /> A: {one.about.name}
        </li>
        <li>
          <span class="line-b" /> B: {two.about.name}
        </li>
      </ul>
    </Card>
  );
}

function chart(one: ComparedRun, two: ComparedRun, by: "step" | "share", top: number): Chart {
  const device = onDevice(one, two);
  const [a, b] = [curve(one.steps, by, device), curve(two.steps, by, device)];
  return {
    options: {
      series: [
        {},
        { label: "A", stroke: token("--side-a"), width: 1.6, spanGaps: true, points: { show: false } },
        { label: "B", stroke: token("--side-b"), width: 1.6, dash: [7, 4], spanGaps: true, points: { show: false } },
      ],
      scales: { x: { time: false }, y: { range: () => [0, top || 1] } },
      axes: [by === "share" ? { values: (_plot, ticks) => ticks.map((share) => `${share}%`) } : {}, { size: 70, values: (_plot, ticks) => ticks.map((value) => tick(value, duration)) }],
    },
    data: uPlot.join([
      [a.x, a.y],
      [b.x, b.y],
    ]),
  };
}

function table(one: ComparedRun, two: ComparedRun) {
  const rows = ([["A", one], ["B", two]] as const).flatMap(([letter, run]) =>
    run.steps.first.map((first, at) => [letter, run.id, first, run.steps.last[at] ?? null, (run.steps.mean_ns["wall"]?.[at] ?? 0) / 1e6]),
  );
  return { columns: ["side", "run", "first_step", "last_step", "mean_ms"], rows };
}
