/**
 * A chart over steps (or time): uPlot with resizing, themes and keyboard control.
 *
 * `make` returns options and data whenever `deps` change; the chart is rebuilt only if its series change, otherwise its data
 * is replaced. The cursor has a tooltip. Left and right move it, Enter selects its step, plus and minus zoom around it,
 * Escape removes it; dragging selects a range, a double click shows everything. Two fingers zoom.
 */

import { useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import "uplot/dist/uPlot.min.css";
import { count, digits } from "../ui/format";
import { theme } from "../ui/theme";
import { PlotInstance, type Chart, type Wishes } from "./plot-instance";
import { MarkLane } from "./mark-lane";
import type { Mark } from "./marks";
import "./plot.css";
import { TipBox, tipWords, type Tip } from "./tip";

export type { Chart } from "./plot-instance";
export type { Mark } from "./marks";
export type { Tip } from "./tip";

interface PlotProps extends Wishes {
  /** Accessible description in a sentence. */
  label: string;
  height?: number;
  make: () => Chart;
  deps: readonly unknown[];
  /** Charts with the same name share their cursor. */
  together?: string;
  /** Tooltip for entry `index` of the data; default: the series and their values. */
  tip?: (index: number) => Tip | null;
  /** Format of values in the default tooltip. */
  format?: (value: number) => string;
  /** Findings and events at their steps. */
  marks?: readonly Mark[];
  /** The selected step, marked by a line. */
  chosen?: number | null;
}

export function Plot({ label, height = 200, make, deps, together, tip, format, marks = [], chosen = null, ...wishes }: PlotProps) {
  const box = useRef<HTMLDivElement>(null);
  const [held, setHeld] = useState<PlotInstance | null>(null);
  const chart = useRef<Chart | null>(null);
  const announced = useSignal("");
  const now = theme.value;
  if (held !== null) held.wishes = wishes;

  useLayoutEffect(() => {
    const place = box.current;
    if (place === null) return;
    const made = new PlotInstance(place);
    setHeld(made);
    return () => made.close();
  }, []);

  useEffect(() => {
    if (held === null) return;
    // Draw only when visible: most charts of a screen are above or below.
    held.whenSeen(() => {
      chart.current = make();
      held.show(chart.current, height, now, together);
    });
  }, [held, now, height, wishes.range?.[0], wishes.range?.[1], ...deps]);

  useEffect(() => {
    const place = box.current;
    if (place === null || held === null) return;
    const size = new ResizeObserver(() => held.resize(height));
    const sight = new IntersectionObserver((entries) => held.seen(entries.at(-1)?.isIntersecting ?? true), { rootMargin: "300px" });
    size.observe(place);
    sight.observe(place);
    return () => {
      size.disconnect();
      sight.disconnect();
    };
  }, [held, height]);

  const read = (index: number): Tip | null => (tip !== undefined ? tip(index) : chart.current === null ? null : plainTip(chart.current, index, format ?? digits));
  const pressed = (event: KeyboardEvent): void => {
    if (held === null || event.ctrlKey || event.metaKey || event.altKey || !held.key(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    const at = held.at.value;
    const found = at === null ? null : read(at.index);
    announced.value = found === null ? "" : tipWords(found);
  };

  return (
    <div class="plot-frame">
      {held !== null && <MarkLane marks={marks} frame={held.frame} height={height} />}
      <div
        class={wishes.onStretch === undefined ? "plot" : "plot movable"}
        ref={box}
        role="application"
        aria-roledescription="chart"
        aria-label={label}
        tabIndex={0}
        style={{ height: `${height}px` }}
        onKeyDown={pressed}
        onBlur={() => held?.leave()}
      >
        {held !== null && <ChosenLine held={held} chosen={chosen} />}
        {held !== null && <TipBox at={held.at} frame={held.frame} read={read} />}
      </div>
      <p class="hidden" aria-live="polite">
        {announced.value}
      </p>
    </div>
  );
}

function ChosenLine({ held, chosen }: { held: PlotInstance; chosen: number | null }) {
  const where = held.frame.value;
  if (where === null || chosen === null || chosen < where.least || chosen > where.most) return null;
  const left = where.left + ((chosen - where.least) / (where.most - where.least)) * where.width;
  return <div class="chosen-line" style={{ left: `${left}px`, top: `${where.top}px`, height: `${where.height}px` }} />;
}

function plainTip({ options, data, blocks }: Chart, index: number, format: (value: number) => string): Tip {
  const x = (data[0][index] ?? 0) + (blocks === true ? 0.5 : 0);
  const timed = options.scales?.["x"]?.time === true;
  const rows = options.series.slice(1).flatMap((series, at) => {
    const value = data[at + 1]?.[index];
    if (series.show === false || value === null || value === undefined || Number.isNaN(value)) return [];
    const color = typeof series.stroke === "string" ? { color: series.stroke } : {};
    return [{ name: typeof series.label === "string" ? series.label : "", value: format(value), ...color }];
  });
  return { title: timed ? new Date(x * 1000).toLocaleTimeString("en-GB") : `step ${count(Math.round(x))}`, rows };
}
