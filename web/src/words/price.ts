/** The cost of a finding, as figures to draw and as words. Pure. */

import type { Finding } from "../api/documents";
import { digits, duration, percent } from "../ui/format";
import { isStop } from "./kinds";

export interface Price {
  /** Short phrases such as `61% of the training time`. */
  words: string[];
  /** Share of the time that would remain; null: unknown. */
  left: number | null;
}

const TRIVIAL = 0.01;

/** Null: it costs no time, or too little to mention. `live`: the cost may still grow. */
export function priceOf({ cost, kind }: Pick<Finding, "cost" | "kind">, live: boolean): Price | null {
  if (cost === null || typeof cost !== "object") return null;
  const { share, seconds, rank_hours: hours } = cost;
  const soFar = live ? " so far" : "";
  const most = kind === "healthy" || cost.up_to ? "at most " : "";
  const words: string[] = [];
  const least = cost.least ?? null;
  if (isStop(kind)) {
    // During a hang its card counts the seconds; this figure would not move.
    if (live && kind.startsWith("hang_")) return null;
    if (seconds) words.push(kind === "rank_crashed" ? `${duration(seconds * 1e9)} of training lost` : `${duration(seconds * 1e9)} without progress`);
  } else if (share && share >= TRIVIAL && typeof seconds === "number") {
    const [low, spent] = least === null ? ["", ""] : [`${percent(least.share)} to `, `${duration(least.seconds * 1e9)} to `];
    words.push(`${most}${low}${percent(share)} of the training time`, `${spent}${duration(seconds * 1e9)}${soFar}`);
  }
  if (words.length === 0) return null;
  if (hours && hours >= 0.1) words.push(`${digits(hours)} rank-hours`);
  const fixed = cost.if_fixed;
  if (!fixed?.step_ms || !fixed.speedup || isStop(kind)) return { words, left: null };
  const now = duration(fixed.step_ms * fixed.speedup * 1e6);
  if (least?.if_fixed?.step_ms && least.if_fixed.speedup) {
    const range = `${duration(fixed.step_ms * 1e6)} to ${duration(least.if_fixed.step_ms * 1e6)} instead of ${now} on average`;
    words.push(`without it a step takes ${range}, ${least.if_fixed.speedup.toFixed(2)} to ${fixed.speedup.toFixed(2)}× as fast: the exchange may take longer when all ranks arrive together`);
    return { words, left: 1 / fixed.speedup };
  }
  words.push(`without ${cost.up_to ? "all of it" : "it"} a step takes ${duration(fixed.step_ms * 1e6)} instead of ${now} on average, ${cost.up_to ? "at most " : ""}${fixed.speedup.toFixed(2)}× as fast`);
  return { words, left: 1 / fixed.speedup };
}

/** The confidence in words. */
export function sureness(confidence: number): string {
  return confidence >= 0.9 ? "nearly certain" : confidence >= 0.75 ? "likely" : confidence >= 0.5 ? "possible" : "a guess";
}
