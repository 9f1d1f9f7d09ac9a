/**
 * The steps of the visible range, in the finest resolution that the screen can show.
 *
 * The whole run is already loaded (`run.steps`); a range is requested from the hub, slightly larger than the view, so that
 * following the run or a small drag needs no new request. The newest steps come from the stream.
 */

import { useEffect, useMemo } from "preact/hooks";
import type { StepsDocument } from "../api/documents";
import type { StepClock } from "./align";
import { useAnswer, type OpenRun, type View } from "./open-run";
import { joined } from "./steps";

export interface Question {
  first: number;
  /** Null: up to the newest step. */
  last: number | null;
  bins: number;
}

/** Round the range to a grid of about a quarter of the window, so that many windows share one request. */
export function question(view: View, whole: View, pixels: number): Question {
  const length = view.last - view.first + 1;
  const raster = 2 ** Math.max(0, Math.floor(Math.log2(Math.max(1, length / 4))));
  const first = Math.max(whole.first, Math.floor(view.first / raster) * raster);
  const end = Math.ceil((view.last + 1) / raster) * raster - 1;
  const last = end >= whole.last ? null : end;
  const requested = (last ?? Math.max(whole.last, view.last)) - first + 1;
  const bins = Math.ceil(((pixels / 2) * requested) / length / 64) * 64;
  return { first, last, bins: Math.min(4096, Math.max(64, bins)) };
}

/** The wall clock range of a view, for samples; rounded like `question`. */
export function wallSpan(view: View | null, whole: View, clock: StepClock): { first_ns?: string; last_ns?: string } {
  if (view === null) return {};
  const { first, last } = question(view, whole, 1);
  const [from, to] = [clock.wall(first), last === null ? null : clock.wall(last + 1)];
  const second = (ns: number): string => String(BigInt(Math.floor(ns / 1e9)) * 1_000_000_000n);
  return { ...(from === null ? {} : { first_ns: second(from) }), ...(to === null ? {} : { last_ns: second(to + 1e9) }) };
}

/** First and last known step; null if there are none. */
export function extent(steps: StepsDocument | null): View | null {
  const [first, last] = [steps?.first[0], steps?.last.at(-1)];
  return first === undefined || last === undefined ? null : { first, last };
}

/** `fine` plus the newer part of `all`. */
export function completed(fine: StepsDocument, all: StepsDocument): StepsDocument {
  const end = fine.last.at(-1);
  if (end === undefined) return all;
  const from = all.first.findIndex((step) => step > end);
  return from < 0 ? fine : joined(fine, sliced(all, from, all.first.length));
}

/** The bins with a step in the view, plus one at each side. */
export function within(steps: StepsDocument, view: View): StepsDocument {
  let from = steps.last.findIndex((last) => last >= view.first);
  if (from < 0) from = steps.first.length;
  let to = from;
  while (to < steps.first.length && (steps.first[to] ?? 0) <= view.last) to += 1;
  return sliced(steps, Math.max(0, from - 1), Math.min(steps.first.length, to + 1));
}

function sliced(steps: StepsDocument, from: number, to: number): StepsDocument {
  const cut = <T>(columns: Record<string, T[]>): Record<string, T[]> => Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values.slice(from, to)]));
  return {
    first: steps.first.slice(from, to),
    last: steps.last.slice(from, to),
    steps: steps.steps.slice(from, to),
    ranks: steps.ranks.slice(from, to),
    quantiles: steps.quantiles,
    ns: cut(steps.ns),
    mean_ns: cut(steps.mean_ns),
    device_mean_ns: cut(steps.device_mean_ns),
    ...(steps.device_slowest_ns === undefined ? {} : { device_slowest_ns: steps.device_slowest_ns.slice(from, to) }),
    worst: steps.worst.slice(from, to),
    start_wall_ns: steps.start_wall_ns.slice(from, to),
    memory_bytes: cut(steps.memory_bytes),
  };
}

/**
 * The finest known data for the view; `asking`: whether finer data is being loaded. One panel requests it, the others read
 * `run.seen`.
 */
export function useStretch(run: OpenRun, pixels: number): { steps: StepsDocument | null; asking: boolean } {
  const all = run.steps.value;
  const view = run.view.value;
  const whole = extent(all);
  const wanted = view === null || whole === null || finest(all, view) ? null : question(view, whole, pixels);
  const answer = useAnswer<StepsDocument>(run, wanted === null ? null : "steps", wanted === null ? {} : params(wanted), 2000);
  const fine = wanted === null || view === null || answer.value === null || !covers(answer.value, view) ? null : answer.value;
  const steps = useMemo(
    () => (all === null || view === null ? all : within(fine === null ? all : completed(fine, all), view)),
    [all, view?.first, view?.last, fine],
  );
  useEffect(() => {
    run.seen.value = steps;
  }, [steps]);
  return { steps, asking: wanted !== null && fine === null };
}

function params(wanted: Question): Record<string, number> {
  return { first: wanted.first, bins: wanted.bins, ...(wanted.last === null ? {} : { last: wanted.last }) };
}

/** Whether the loaded data already has each step of the view individually. */
function finest(all: StepsDocument | null, view: View): boolean {
  if (all === null) return false;
  return all.first.every((first, at) => (all.last[at] ?? 0) < view.first || first > view.last || all.steps[at] === 1);
}

/** Whether the answer, which may be to the previous request, covers the view. */
function covers(steps: StepsDocument, view: View): boolean {
  const [first, last] = [steps.first[0], steps.last.at(-1)];
  return first !== undefined && last !== undefined && first <= view.first + 1 && last >= view.first;
}
