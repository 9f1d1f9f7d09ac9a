/** Options common to all charts: axes, colors, cursor. */

import type uPlot from "uplot";
import { count } from "../ui/format";
import { token } from "../ui/theme";
import { axisLeft, RIGHT_PX } from "./margins";

export interface Setting {
  width: number;
  height: number;
  together: string | undefined;
  /** Whether dragging selects a range. */
  drags: boolean;
  /** Whether the points under the cursor are marked. */
  points: boolean;
}

const FONT = "12px system-ui, sans-serif";
/** Tick increments: whole steps only. */
const WHOLE = [1, 2, 5].flatMap((digit) => Array.from({ length: 12 }, (_, power) => digit * 10 ** power)).sort((one, two) => one - two);

export function complete(options: Omit<uPlot.Options, "width" | "height">, setting: Setting, range: () => readonly [number, number] | null): uPlot.Options {
  const timed = options.scales?.["x"]?.time === true;
  const [across = {}, ...up] = options.axes ?? [{}, {}];
  const quiet: uPlot.Axis = {
    stroke: token("--muted"),
    grid: { stroke: token("--grid"), width: 1 },
    ticks: { stroke: token("--line"), width: 1, size: 4 },
    font: FONT,
    labelFont: FONT,
    gap: 4,
  };
  const steps: uPlot.Axis = { label: "step", labelSize: 18, labelGap: 0, incrs: WHOLE, values: (_plot, ticks) => ticks.map((tick) => count(tick)) };
  return {
    ...options,
    width: setting.width,
    height: setting.height,
    padding: options.padding ?? [8, RIGHT_PX, 0, 0],
    legend: options.legend ?? { show: false },
    scales: { ...options.scales, x: { ...options.scales?.["x"], time: timed, range: (_plot, least, most) => seen(range(), least, most) } },
    axes: [
      { ...quiet, size: 26, space: 70, ...(timed ? {} : steps), ...across },
      ...up.map((axis) => ({ ...quiet, space: 26, ...axis, size: (plot: uPlot) => axisLeft(plot.width) })),
    ],
    cursor: {
      y: false,
      points: { show: setting.points, size: 7 },
      ...(setting.together === undefined ? {} : { sync: { key: setting.together, setSeries: false, scales: ["x", null], filters: { pub: moves, sub: moves } } }),
      ...options.cursor,
      drag: { x: setting.drags, y: false, setScale: false, dist: 3 },
      bind: { dblclick: () => null },
    },
  };
}

/** Synchronize cursors, but not the selection by dragging. */
function moves(type: string): boolean {
  return type === "mousemove" || type === "mouseleave" || type === "mouseenter";
}

/** The exact wanted range; a single point gets space at both sides. */
export function seen(wanted: readonly [number, number] | null, least: number | null, most: number | null): [number, number] {
  const [from, to] = wanted ?? [least ?? 0, most ?? 1];
  return to > from ? [from, to] : [from - 0.5, from + 0.5];
}
