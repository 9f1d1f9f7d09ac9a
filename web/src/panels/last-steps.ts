/** Which steps the hub's means over ranks cover: its window of the newest steps, independent of the visible range. */

import type { OpenRun } from "../run/open-run";
import { count } from "../ui/format";

export function lastStepsWords(run: OpenRun): string {
  const words = windowWords(run.about.value?.info["window"], run.status.value?.newest_step ?? -1);
  return run.view.value === null ? words : `${words}, not of the selected range`;
}

/** `mean of the last 256 steps`; of all steps of a short run; of every n-th step with very many ranks. */
export function windowWords(window: unknown, newest: number): string {
  const { steps, stride } = (typeof window === "object" && window !== null ? window : {}) as Record<string, unknown>;
  if (typeof steps !== "number" || newest < 0) return "mean of the last steps";
  const every = typeof stride === "number" ? stride : 1;
  const reach = steps * every;
  const which = reach > newest ? "all steps after warm-up" : `the last ${count(reach)} steps`;
  return every > 1 ? `mean of one in ${count(every)} of ${which}` : `mean of ${which}`;
}
