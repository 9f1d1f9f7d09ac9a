/** Data of the step time chart: stacked by phase, and as a table. */

import uPlot from "uplot";
import type { StepsDocument } from "../api/documents";
import { ceiling, closed, edges, stacked, type Ceiling } from "../charts/columns";
import { ordered, phaseProperty } from "../charts/palette";
import type { Chart } from "../charts/plot-instance";
import type { Tip } from "../charts/tip";
import { devicePhases, deviceSlowest, deviceWall, heldOnDevice, quantile } from "../run/steps";
import type { Csv } from "../ui/csv";
import { count, duration, tick } from "../ui/format";
import { token } from "../ui/theme";

/** Mean over ranks, median over ranks by phase, the rank that worked longest, or the mean over devices. */
export type Whose = "mean" | "median" | "worst" | "device";

export const WHOSE: Record<Exclude<Whose, "device">, string> = { mean: "mean over ranks", median: "median rank", worst: "worst rank" };

export interface Shown {
  whose: Whose;
  slowest: boolean;
  spread: boolean;
  /** Show the full height of the highest step, even if it flattens all others. */
  whole: boolean;
}

/** With more blocks than this, lines are drawn thin. */
const CROWDED = 200;

/** The value of a phase in each bin. */
export function phaseValues(steps: StepsDocument, phase: string, whose: Whose): number[] {
  if (whose === "mean") return steps.mean_ns[phase] ?? [];
  if (whose === "median") return quantile(steps, phase, 0.5);
  if (whose === "device") return heldOnDevice(steps, steps.device_mean_ns[phase] ?? []);
  return steps.worst.map(([rank]) => rank?.[phase] ?? 0);
}

function slowestRank(steps: StepsDocument, whose: Whose): number[] {
  return whose === "device" ? deviceSlowest(steps) : quantile(steps, "wall", 1);
}

/** Text next to the title. With a GPU it always says whether times are of the host or the device. */
export function aboutWords(whose: Whose, several: boolean, timed: boolean): string {
  if (whose === "device") return `device time by phase${several ? ", mean over ranks" : ""}`;
  const which = several ? WHOSE[whose] : "";
  const odd = whose === "median" ? "; medians may not add up" : "";
  if (timed) return `host time by phase${which && `, ${which}`}${odd}`;
  return `${which && `${which}, `}by phase${odd}`;
}

/** Each series is the cumulative sum up to its phase; the highest is drawn first, so only its own phase stays visible. */
export function stepTimeChart(steps: StepsDocument, phases: readonly string[], shown: Shown): Chart {
  const sums = stacked(
    phases.map((phase) => phaseValues(steps, phase, shown.whose)),
    steps.first.length,
  ).reverse();
  const block = uPlot.paths.stepped?.({ align: 1 });
  const drawn = block === undefined ? {} : { paths: block };
  const series: uPlot.Series[] = [{ label: "step" }];
  const data: number[][] = [edges(steps.first, steps.last)];
  for (const [at, phase] of [...phases].reverse().entries()) {
    series.push({ label: phase, stroke: token(phaseProperty(phase)), fill: token(phaseProperty(phase)), width: 0, points: { show: false }, ...drawn });
    data.push(closed(sums[at] ?? []));
  }
  const bands: uPlot.Band[] = [];
  if (shown.spread) {
    const line = { stroke: token("--text"), width: 1, dash: [2, 3], points: { show: false }, ...drawn };
    series.push({ label: "5% of ranks", ...line }, { label: "95% of ranks", ...line });
    data.push(closed(quantile(steps, "wall", 0.05)), closed(quantile(steps, "wall", 0.95)));
    bands.push({ series: [series.length - 1, series.length - 2], fill: token("--spread") });
  }
  if (shown.slowest) {
    series.push({ label: "slowest rank", stroke: token("--text"), width: steps.first.length > CROWDED ? 1 : 1.5, points: { show: false }, ...drawn });
    data.push(closed(slowestRank(steps, shown.whose)));
  }
  return {
    blocks: true,
    key: String(shown.whole),
    options: {
      series,
      bands,
      scales: { y: { range: (plot) => [0, heightOf(plot.data, plot.scales["x"], shown.whole).top] } },
      axes: [{}, { values: (_plot, ticks) => ticks.map((at) => tick(at, duration)) }],
      hooks: { draw: [drawBeyond] },
    },
    data: data as uPlot.AlignedData,
  };
}

/** Height of the axis from the visible data: the stack (first row) and the lines (last row). */
export function heightOf(data: uPlot.AlignedData, x: uPlot.Scale | undefined, whole: boolean): Ceiling {
  const xs = data[0];
  const [least, most] = [x?.min ?? -Infinity, x?.max ?? Infinity];
  const [stack, lines]: [number[], number[]] = [[], []];
  for (let at = 0; at + 1 < xs.length; at += 1) {
    if ((xs[at + 1] ?? 0) <= least || (xs[at] ?? 0) >= most) continue;
    stack.push(data[1]?.[at] ?? 0);
    lines.push(data.at(-1)?.[at] ?? 0);
  }
  return ceiling(stack, lines, whole);
}

/** Draw a small arrow where a value exceeds the axis. */
function drawBeyond(plot: uPlot): void {
  const top = plot.scales["y"]?.max;
  const xs = plot.data[0];
  const last = plot.data.at(-1);
  if (top === undefined || top === null) return;
  const { ctx, bbox } = plot;
  const size = (xs.length > CROWDED ? 3 : 4) * uPlot.pxRatio;
  ctx.save();
  ctx.fillStyle = token("--text");
  for (let at = 0; at + 1 < xs.length; at += 1) {
    if (Math.max(plot.data[1]?.[at] ?? 0, last?.[at] ?? 0) <= top) continue;
    const x = plot.valToPos(((xs[at] ?? 0) + (xs[at + 1] ?? 0)) / 2, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top - 1.5 * size);
    ctx.lineTo(x - size, bbox.top);
    ctx.lineTo(x + size, bbox.top);
    ctx.fill();
  }
  ctx.restore();
}

export function stepTip(steps: StepsDocument, phases: readonly string[], shown: Shown, at: number): Tip | null {
  const [first, last] = [steps.first[at], steps.last[at]];
  if (first === undefined || last === undefined) return null;
  const worst = steps.worst[at]?.[0];
  const name = first === last ? `Step ${count(first)}` : `Steps ${count(first)}–${count(last)}`;
  const whose = shown.whose === "worst" ? `rank ${worst?.rank ?? "–"}${first === last ? "" : `, step ${count(worst?.step)}`}` : shown.whose === "median" ? "median rank" : "mean";
  const alone = (steps.ranks[at] ?? 1) <= 1;
  const rows: Tip["rows"] = [...phases].reverse().flatMap((phase) => {
    const value = phaseValues(steps, phase, shown.whose)[at] ?? 0;
    return value > 0 ? [{ name: phase, value: duration(value), color: token(phaseProperty(phase)) }] : [];
  });
  rows.unshift({ name: alone ? "step" : `step, ${whose}`, value: duration(wallOf(steps, shown.whose, at)), strong: true });
  if (!alone) {
    rows.push({ name: "slowest rank", value: duration(slowestRank(steps, shown.whose)[at]) });
    if (shown.spread) rows.push({ name: "5–95% of ranks", value: `${duration(quantileAt(steps, 0.05, at))} – ${duration(quantileAt(steps, 0.95, at))}` });
  }
  if (shown.whose === "device") rows.push({ name: alone ? "step on the host" : "step on the host, mean", value: duration(steps.mean_ns["wall"]?.[at]) });
  const longest = worst !== undefined && !alone ? `rank ${worst.rank} worked longest (${duration(worst.work)})` : undefined;
  const note = shown.whose === "device" ? deviceNote(steps, phases, at) : longest;
  return { title: name, rows, ...(note === undefined ? {} : { note }) };
}

function deviceNote(steps: StepsDocument, phases: readonly string[], at: number): string {
  if (phases.some((phase) => (steps.device_mean_ns[phase]?.[at] ?? null) !== null)) return "phases as timed on the device";
  return "not timed on the device; phases are from the last timed step";
}

function wallOf(steps: StepsDocument, whose: Whose, at: number): number | undefined {
  if (whose === "device") return deviceWall(steps)[at];
  if (whose === "mean") return steps.mean_ns["wall"]?.[at];
  return whose === "median" ? quantileAt(steps, 0.5, at) : steps.worst[at]?.[0]?.wall;
}

function quantileAt(steps: StepsDocument, wanted: number, at: number): number | undefined {
  return steps.ns["wall"]?.[at]?.[steps.quantiles.indexOf(wanted)];
}

/** The mean phases add up to the mean step, as in the hub's data. */
export function stepTable(steps: StepsDocument, phases: readonly string[]): Csv {
  const median = quantile(steps, "wall", 0.5);
  const slowest = quantile(steps, "wall", 1);
  const device = ordered(devicePhases(steps));
  return {
    columns: ["first_step", "last_step", "steps", "ranks", "mean_ns", ...phases.map((phase) => `${phase}_mean_ns`), "work_mean_ns", ...device.map((phase) => `device_${phase}_mean_ns`), "median_ns", "slowest_ns", "worst_rank", "worst_rank_work_ns", "start_wall_ns"],
    rows: steps.first.map((first, at) => [
      first,
      steps.last[at] ?? null,
      steps.steps[at] ?? null,
      steps.ranks[at] ?? null,
      steps.mean_ns["wall"]?.[at] ?? null,
      ...phases.map((phase) => steps.mean_ns[phase]?.[at] ?? null),
      steps.mean_ns["work"]?.[at] ?? null,
      ...device.map((phase) => steps.device_mean_ns[phase]?.[at] ?? null),
      median[at] ?? null,
      slowest[at] ?? null,
      steps.worst[at]?.[0]?.rank ?? null,
      steps.worst[at]?.[0]?.work ?? null,
      steps.start_wall_ns[at] ?? null,
    ]),
  };
}

/** Accessible description: the main fact in a sentence. */
export function stepWords(steps: StepsDocument, phases: readonly string[], device: boolean): string {
  const total = (values: readonly number[]): number => values.reduce((sum, value, at) => sum + value * (steps.steps[at] ?? 1), 0);
  const all = steps.steps.reduce((sum, held) => sum + held, 0);
  const wall = total(device ? deviceWall(steps) : (steps.mean_ns["wall"] ?? []));
  const [largest] = phases.map((phase) => ({ phase, ns: total(phaseValues(steps, phase, device ? "device" : "mean")) })).sort((one, two) => two.ns - one.ns);
  const where = device ? "on the device " : devicePhases(steps).length > 0 ? "on the host " : "";
  const share = largest === undefined || wall === 0 ? "" : `; ${where}${largest.phase} takes ${Math.round((100 * largest.ns) / wall)}% of it`;
  return `Step time over steps ${count(steps.first[0])} to ${count(steps.last.at(-1))}: ${duration(wall / Math.max(1, all))} a step on average${share}`;
}
