/** Memory by kind over the sampled steps, gradients by module, and the figures of the layers as a table. */

import type { Finding } from "../api/documents";
import type uPlot from "uplot";
import type { LayerRow, LayersDocument, Norm } from "../api/layer-documents";
import { BINARY } from "../charts/curves";
import type { Chart } from "../charts/plot-instance";
import type { Csv } from "../ui/csv";
import { bytes, tick } from "../ui/format";
import { token } from "../ui/theme";

const KIND_COLORS: Readonly<Record<string, string>> = {
  parameters: "--phase-forward",
  gradients: "--phase-comm",
  optimizer: "--phase-optimizer",
  buffers: "--phase-other",
  activations: "--phase-input",
};

/** The custom property with the color of a kind of memory. */
export function kindProperty(kind: string): string {
  return KIND_COLORS[kind] ?? "--phase-other";
}

export function passProperty(pass: "forward" | "backward"): string {
  return `--phase-${pass}`;
}

export interface TimelineLine {
  name: string;
  property: string;
  dash?: number[];
  values: (number | null)[];
}

/** One line for each kind, their sum, the peak of the step, and the most that the device's allocator had up to it. */
export function timelineLines({ timeline, kinds }: LayersDocument): TimelineLine[] {
  const lines: TimelineLine[] = kinds.flatMap(({ kind, title }) => {
    const values = timeline.bytes[kind];
    return values === undefined ? [] : [{ name: title, property: kindProperty(kind), values }];
  });
  lines.push({ name: "sum", property: "--text", values: timeline.total_bytes });
  const peaks = timeline.peak_bytes ?? [];
  if (peaks.some((value) => value !== null)) lines.push({ name: "step peak", property: "--muted", dash: [2, 3], values: peaks });
  if (timeline.device_peak.some((value) => value !== null)) lines.push({ name: "device peak so far", property: "--muted", dash: [6, 4], values: timeline.device_peak });
  return lines;
}

export function timelineChart(steps: readonly number[], lines: readonly TimelineLine[]): Chart {
  const series: uPlot.Series[] = [{ label: "step" }];
  for (const { name, property, dash } of lines) series.push({ label: name, stroke: token(property), width: 1.5, ...(dash === undefined ? {} : { dash }), points: { show: true, size: 5, fill: token(property) }, spanGaps: true });
  return {
    options: {
      series,
      scales: { y: { range: (_plot, _least, most) => [0, most > 0 ? most * 1.08 : 1] } },
      axes: [{}, { incrs: BINARY, values: (_plot, ticks) => ticks.map((at) => tick(at, bytes)) }],
    },
    data: [[...steps], ...lines.map(({ values }) => values)] as uPlot.AlignedData,
  };
}

export const HEALTH = ["grad_norm", "weight_norm", "update_ratio", "zero_share"] as const;
export type Health = (typeof HEALTH)[number];

/** Modules that hold parameters with a gradient, or with a weight norm. */
export function trained(rows: readonly LayerRow[]): LayerRow[] {
  return rows.filter((row) => row.elements > 0 && (row.grad_norm !== null || row.weight_norm !== null));
}

/** By one figure, the highest first (`up`: the lowest); what is not finite counts as higher than all numbers. */
export function byHealth(rows: readonly LayerRow[], column: Health | null, up: boolean): LayerRow[] {
  if (column === null) return [...rows];
  const keyed = rows.map((row) => ({ row, key: sortKey(row[column]) }));
  keyed.sort((one, two) => {
    if (one.key === null || two.key === null) return Number(one.key === null) - Number(two.key === null);
    return one.key === two.key ? 0 : up === one.key < two.key ? -1 : 1;
  });
  return keyed.map(({ row }) => row);
}

function sortKey(value: Norm): number | null {
  return typeof value === "string" ? Infinity : value;
}

/** NaN or infinite: something is wrong with the layer. */
export function notFinite(value: Norm): boolean {
  return typeof value === "string";
}

export function layersTable({ modules, kinds, clock }: LayersDocument): Csv {
  const names = kinds.map(({ kind }) => kind);
  const both = clock === "device";
  return {
    columns: ["module", "type", "parameters", ...names.map((kind) => `${kind}_bytes`), "total_bytes", "forward_us", "own_forward_us", "backward_us", "own_backward_us", ...(both ? ["host_forward_us", "host_backward_us"] : []), ...HEALTH],
    rows: modules.map((row) => [
      row.name,
      row.type,
      row.elements,
      ...names.map((kind) => row.bytes[kind] ?? 0),
      row.total_bytes,
      row.forward_us,
      row.own_forward_us,
      row.backward_us,
      row.own_backward_us,
      ...(both ? [row.host_forward_us ?? null, row.host_backward_us ?? null] : []),
      ...HEALTH.map((name) => row[name]),
    ]),
  };
}

/** The rank whose layer the verdict names, if it was sampled: the charts then show what the verdict says. */
export function rankOfVerdict(findings: readonly Finding[], sampled: readonly number[]): number | null {
  const [first] = findings;
  const rank = first?.ranks[0];
  return rank !== undefined && typeof first?.evidence["layer"] === "string" && sampled.includes(rank) ? rank : null;
}
