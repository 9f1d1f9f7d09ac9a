/** The charts of one rank: phases compared with the mean of the others, device times, memory. */

import uPlot from "uplot";
import type { RankDocument } from "../api/documents";
import { ceiling, closed, edges, stacked } from "../charts/columns";
import { BINARY } from "../charts/curves";
import { phaseProperty } from "../charts/palette";
import type { Chart } from "../charts/plot";
import type { Csv } from "../ui/csv";
import { bytes, duration, tick } from "../ui/format";
import { token } from "../ui/theme";

export type RankSteps = RankDocument["steps"];

const MEMORY = ["allocated", "reserved", "peak_allocated"];

/** Stacked phases; the line is the mean of the other ranks for the same steps. */
export function rankChart(steps: RankSteps, values: Record<string, (number | null)[]>, phases: readonly string[], others: (number | null)[]): Chart {
  const drawn = stepped();
  const sums = stacked(
    phases.map((phase) => values[phase] ?? []),
    steps.first.length,
  ).reverse();
  const series: uPlot.Series[] = [{ label: "step" }];
  const data: (number | null)[][] = [edges(steps.first, steps.last)];
  for (const [at, phase] of [...phases].reverse().entries()) {
    series.push({ label: phase, stroke: token(phaseProperty(phase)), fill: token(phaseProperty(phase)), width: 0, points: { show: false }, ...drawn });
    data.push(closed(sums[at] ?? []));
  }
  if (others.some((value) => value !== null)) {
    series.push({ label: "other ranks, mean", stroke: token("--text"), width: 1.5, points: { show: false }, ...drawn });
    data.push(closed(others));
  }
  const top = ceiling(sums[0] ?? [], others.filter((value) => value !== null), false).top;
  return {
    blocks: true,
    key: top.toPrecision(2),
    options: { series, scales: { y: { range: () => [0, top] } }, axes: [{}, { values: (_plot, ticks) => ticks.map((value) => tick(value, duration)) }] },
    data: data as uPlot.AlignedData,
  };
}

export function memoryChart(steps: RankSteps): Chart {
  const names = memoryNames(steps);
  const series: uPlot.Series[] = names.map((name, at) => ({
    label: name.replace("_", " "),
    stroke: token(`--series-${at}`),
    width: 1.5,
    spanGaps: true,
    points: { show: false },
    ...stepped(),
  }));
  return {
    blocks: true,
    options: {
      series: [{ label: "step" }, ...series],
      scales: { y: { range: (_plot, _least, most) => [0, (most ?? 0) * 1.05 || 1] } },
      axes: [{}, { incrs: BINARY, values: (_plot, ticks) => ticks.map((at) => tick(at, bytes)) }],
    },
    data: [edges(steps.first, steps.last), ...names.map((name) => closed(steps.memory_bytes[name] ?? []))] as uPlot.AlignedData,
  };
}

export function memoryNames(steps: RankSteps): string[] {
  return MEMORY.filter((name) => steps.memory_bytes[name]?.some((level) => level !== null));
}

export function rankTable(steps: RankSteps, phases: readonly string[], others: (number | null)[]): Csv {
  const device = Object.keys(steps.device_ns);
  const memory = memoryNames(steps);
  return {
    columns: ["first_step", "last_step", "wall_ns", ...phases.map((phase) => `${phase}_ns`), ...device.map((phase) => `device_${phase}_ns`), ...memory.map((name) => `${name}_bytes`), "other_ranks_mean_wall_ns", "start_wall_ns"],
    rows: steps.first.map((first, at) => [
      first,
      steps.last[at] ?? null,
      steps.wall_ns[at] ?? null,
      ...phases.map((phase) => steps.phase_ns[phase]?.[at] ?? null),
      ...device.map((phase) => steps.device_ns[phase]?.[at] ?? null),
      ...memory.map((name) => steps.memory_bytes[name]?.[at] ?? null),
      others[at] ?? null,
      steps.start_wall_ns[at] ?? null,
    ]),
  };
}

function stepped(): Partial<uPlot.Series> {
  const paths = uPlot.paths.stepped?.({ align: 1 });
  return paths === undefined ? {} : { paths };
}
