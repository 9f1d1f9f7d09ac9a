/** Machine and GPU metrics from the agents, and their curves over steps or time. */

import type uPlot from "uplot";
import type { SampleSeries, SamplesDocument } from "../api/documents";
import { BINARY, lineSeries, medianCurve, picked, type Curve } from "../charts/curves";
import type { Chart } from "../charts/plot-instance";
import { ontoSteps, type StepClock } from "../run/align";
import { bytes, digits, tick } from "../ui/format";
import { token } from "../ui/theme";

export interface Figure {
  kind: "host" | "gpu";
  field: string;
  name: string;
  /** Whether high or low values are bad. */
  bad: "high" | "low";
  format: (value: number) => string;
  /** Unit of the values, for tables. */
  unit: string;
  /** Minimum upper end of the axis. */
  top?: number;
}

const percent = (value: number): string => `${digits(value).replace(/\.0+$/, "")}%`;
const share = (value: number): string => percent(100 * value);
const rate = (value: number): string => `${bytes(value)}/s`;
const often = (value: number): string => `${digits(value)}/s`;
const plain = (value: number): string => digits(value);

const host = (field: string, name: string, bad: Figure["bad"], format: Figure["format"], unit: string, top?: number): Figure => ({
  kind: "host",
  field,
  name,
  bad,
  format,
  unit,
  ...(top === undefined ? {} : { top }),
});
const gpu = (...figure: Parameters<typeof host>): Figure => ({ ...host(...figure), kind: "gpu" });

export const FIGURES: readonly Figure[] = [
  gpu("util_percent", "GPU utilization", "low", percent, "%", 100),
  gpu("mem_used", "GPU memory in use", "high", bytes, "bytes"),
  gpu("power_w", "GPU power", "low", (value) => `${digits(value)} W`, "W"),
  gpu("sm_clock_mhz", "GPU clock", "low", (value) => `${Math.round(value)} MHz`, "MHz"),
  gpu("temperature_c", "GPU temperature", "high", (value) => `${digits(value)} °C`, "°C"),
  gpu("throttle_reasons", "GPU throttled, share of the time", "high", share, "share", 1),
  gpu("mem_util_percent", "GPU memory bus", "low", percent, "%", 100),
  gpu("mem_clock_mhz", "GPU memory clock", "low", (value) => `${Math.round(value)} MHz`, "MHz"),
  host("cpu_percent", "CPU", "high", percent, "%", 100),
  host("own_cpu_percent", "CPU used by the job", "high", percent, "%", 100),
  host("mem_available", "memory available", "low", bytes, "bytes"),
  host("net_rx_bps", "network in", "high", rate, "bytes/s"),
  host("net_tx_bps", "network out", "high", rate, "bytes/s"),
  host("ib_rx_bps", "InfiniBand in", "high", rate, "bytes/s"),
  host("ib_tx_bps", "InfiniBand out", "high", rate, "bytes/s"),
  host("tcp_retrans_ps", "TCP retransmissions", "high", often, "1/s"),
  host("net_errors_ps", "network errors", "high", often, "1/s"),
  host("net_drops_ps", "packets dropped", "high", often, "1/s"),
  host("ib_errors_ps", "InfiniBand errors", "high", often, "1/s"),
  host("disk_read_bps", "disk read", "high", rate, "bytes/s"),
  host("disk_write_bps", "disk write", "high", rate, "bytes/s"),
  host("cpu_pressure", "waiting for a CPU (pressure)", "high", share, "share", 1),
  host("io_pressure", "waiting for a disk (pressure)", "high", share, "share", 1),
  host("memory_pressure", "waiting for memory (pressure)", "high", share, "share", 1),
  host("swap_used", "swap in use", "high", bytes, "bytes"),
  host("load1", "load", "high", plain, ""),
  host("procs_running", "runnable tasks", "high", plain, ""),
];

/** The metrics available in this run, in the order of the list. */
export function known(documents: readonly (SamplesDocument | null)[]): Figure[] {
  return FIGURES.filter(({ kind, field }) => documents.some((one) => one?.kind === kind && one.series.some(({ values }) => values[field]?.some((value) => value !== null))));
}

/** A node's host, and its number if it has one. */
export function nodeName({ node, host }: SampleSeries): string {
  return host === undefined || host === node ? node : `${host} (node ${node})`;
}

export function whose(series: SampleSeries): string {
  return series.index === undefined ? nodeName(series) : `${nodeName(series)} GPU ${series.index}`;
}

export interface MachineLines {
  /** Steps, or seconds since 1970. */
  x: number[];
  curves: Curve[];
  /** Whether the first curve is the overall median. */
  median: boolean;
  /** Total number of curves. */
  of: number;
  /** Samples before the first step or after the last. */
  outside: number;
}

/** The curves of a metric, over steps if there is a clock. `only`: restrict to this node. */
export function machineLines(samples: SamplesDocument, figure: Figure, clock: StepClock | null, only: string | null, most: number): MachineLines {
  const all = samples.series.flatMap((series): Curve[] => {
    const values = series.values[figure.field];
    return values === undefined || (only !== null && series.node !== only) ? [] : [{ name: whose(series), values }];
  });
  const worst = picked(all, most, figure.bad);
  const median = all.length > worst.length;
  const curves = median ? [{ name: `median of ${all.length}`, values: medianCurve(all) }, ...worst] : worst;
  const middle = samples.wall_ns.map((wall) => wall + samples.bin_ns / 2);
  const columns = curves.map(({ values }) => values);
  const put = clock === null ? { x: middle.map((wall) => wall / 1e9), columns, outside: 0 } : ontoSteps(clock, middle, columns);
  return { x: put.x, curves: curves.map(({ name }, at) => ({ name, values: put.columns[at] ?? [] })), median, of: all.length, outside: put.outside };
}

export function machineChart(lines: MachineLines, figure: Figure, timed: boolean): Chart {
  const series: uPlot.Series[] = [{ label: timed ? "time" : "step" }];
  for (const [at, { name }] of lines.curves.entries()) {
    if (lines.median && at === 0) series.push({ label: name, stroke: token("--muted"), width: 3, points: { show: false }, spanGaps: true });
    else series.push(lineSeries(name, lines.median ? at - 1 : at));
  }
  return {
    key: `${figure.kind}/${figure.field}/${timed}`,
    options: {
      series,
      scales: { x: { time: timed }, y: { range: (_plot, _least, most) => [0, Math.max(figure.top ?? 0, (most ?? 0) * (most === figure.top ? 1 : 1.08)) || 1] } },
      axes: [timed ? { values: (_plot, ticks) => ticks.map((at) => new Date(at * 1000).toLocaleTimeString("en-GB")), space: 90 } : {}, { ...(figure.unit.startsWith("bytes") ? { incrs: BINARY } : {}), values: (_plot, ticks) => ticks.map((at) => tick(at, figure.format)) }],
    },
    data: [lines.x, ...lines.curves.map(({ values }) => values)] as uPlot.AlignedData,
  };
}

/** Accessible description with the last values. */
export function machineWords(lines: MachineLines, figure: Figure): string {
  const last = (values: Curve["values"]): number | null => values.findLast((value): value is number => value !== null) ?? null;
  const [worst] = lines.median ? lines.curves.slice(1) : lines.curves;
  const value = worst === undefined ? null : last(worst.values);
  return worst === undefined || value === null ? `${figure.name}: no values` : `${figure.name} of ${lines.of}; worst is ${worst.name}, last ${figure.format(value)}`;
}
