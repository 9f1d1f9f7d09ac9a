/** Data for small charts of a finding's evidence: bars, steps on a line, growing memory. Pure. */

import type { Finding } from "../api/documents";
import { binary, duration, percent } from "../ui/format";
import { isRecord } from "./evidence";
import { figureOf, nameOf } from "./names";

export type Tone = "culprit" | "plain" | "good";

export interface Bar {
  name: string;
  value: number;
  text: string;
  tone: Tone;
  /** Use the color of this phase. */
  phase?: string;
}

export type Picture =
  | { form: "bars"; title: string; bars: Bar[]; note: string; most?: number; mark?: { value: number; name: string } }
  | { form: "strip"; title: string; steps: number[]; first: number; last: number }
  | { form: "slope"; title: string; points: [number, number][]; end: { step: number; text: string } | null };

const MOST_BARS = 10;
const TRIVIAL = 0.02;

export function picturesOf(finding: Finding): Picture[] {
  const of = finding.evidence;
  const found = [byRank(finding), byPhase(of, "excess_ms_by_phase"), byPhase(of, "extra_ms_by_phase"), strip(finding), slope(finding)];
  for (const [title, keys] of Object.entries(COMPARED)) found.push(compared(of, title, keys));
  if (finding.kind === "healthy") found.push(shares(of["opportunities"], "Possible gain, at most"));
  if (finding.kind === "compute_bound") found.push(shares(of["shares"], "Share of the training time"));
  if (finding.kind.endsWith("_bound")) found.push(share(finding));
  return found.filter((one): one is Picture => one !== null);
}

/** Two or three figures of the same kind to compare; the first is the one in question. */
const COMPARED: Readonly<Record<string, readonly string[]>> = {
  "Step time": ["after_ms", "before_ms"],
  "Step time, last and first": ["last_ms", "first_ms"],
  "Round trip": ["rtt_us", "others_rtt_us"],
  "Packets lost": ["loss_share", "others_loss_share"],
  "Link speed": ["speed_bps", "others_speed_bps"],
  "Communication": ["exposed_ms", "exchange_ms", "compute_ms"],
  "Device memory needed": ["needed_bytes", "used_bytes", "total_bytes"],
  "Device memory": ["peak_bytes", "typical_bytes", "total_bytes"],
  "Allocator": ["reserved_bytes", "peak_allocated_bytes", "total_bytes"],
  "Host memory": ["available_bytes", "total_bytes"],
  "CPU usage": ["cpu_percent", "own_cpu_percent"],
  "GPU utilization": ["util_percent", "lowest_percent", "highest_percent"],
  "Steps per second": ["steps_per_second_during", "steps_per_second_before"],
};

function compared(of: Readonly<Record<string, unknown>>, title: string, keys: readonly string[]): Picture | null {
  const bars = keys.flatMap((key, at) => {
    const value = of[key];
    return typeof value === "number" ? [{ name: nameOf(key), value, text: figureOf(key, value), tone: at === 0 ? ("culprit" as const) : ("plain" as const) }] : [];
  });
  return bars.length < 2 || typeof of[keys[0] ?? ""] !== "number" ? null : { form: "bars", title, bars, note: "", ...(keys[0]?.endsWith("_percent") ? { most: 100 } : {}) };
}

function byRank({ evidence, ranks }: Finding): Picture | null {
  const figures = numbersOf(evidence["median_ms_by_rank"]);
  if (figures.length < 2) return null;
  const guilty = new Set(ranks.map(String));
  const most = [...figures].sort((one, two) => two[1] - one[1]);
  const kept = figures.length <= MOST_BARS ? figures : [...most.filter(([rank]) => guilty.has(rank)), ...most.filter(([rank]) => !guilty.has(rank))].slice(0, MOST_BARS);
  const bars = kept
    .sort((one, two) => Number(one[0]) - Number(two[0]))
    .map(([rank, ms]): Bar => ({ name: `rank ${rank}`, value: ms, text: duration(ms * 1e6), tone: guilty.has(rank) ? "culprit" : "plain" }));
  const peers = evidence["peers_median_ms"];
  const left = figures.length - bars.length;
  return {
    form: "bars",
    title: evidence["compared"] === "work" ? "Median work per step, without the wait for others" : `Median ${String(evidence["compared"] ?? "time")} per step`,
    bars,
    note: left > 0 ? `and ${left} more ranks` : "",
    ...(typeof peers === "number" ? { mark: { value: peers, name: `median of the others: ${duration(peers * 1e6)}` } } : {}),
  };
}

function byPhase(of: Readonly<Record<string, unknown>>, key: string): Picture | null {
  const figures = numbersOf(of[key]);
  const largest = Math.max(...figures.map(([, ms]) => Math.abs(ms)), 0);
  const bars = figures
    .filter(([, ms]) => Math.abs(ms) >= largest * TRIVIAL && ms !== 0)
    .sort((one, two) => two[1] - one[1])
    .map(([phase, ms]): Bar => ({ name: phase === "between" ? "between steps" : phase, value: ms, text: signed(ms), tone: "plain", phase: phase === "between" ? "other" : phase }));
  return bars.length === 0 ? null : { form: "bars", title: key.startsWith("excess") ? "Longer than the others, by phase" : "Extra time, by phase", bars, note: key.startsWith("excess") ? wholeText(of) : "" };
}

/** The title has what fixing gains, a mean; phases are medians, and what is longer in one may be shorter in another. */
function wholeText(of: Readonly<Record<string, unknown>>): string {
  const [gain, whole] = [of["gain_ms"], of["excess_ms"]];
  if (typeof gain === "number") return `medians. Fixing it gains ${duration(gain * 1e6)} per step on average, in all phases together`;
  return typeof whole === "number" && of["compared"] === "work" ? `total work: ${signed(whole)}. Phases are compared separately and may not add up to it` : "";
}

function shares(value: unknown, title: string): Picture | null {
  const bars = numbersOf(value)
    .sort((one, two) => two[1] - one[1])
    .slice(0, MOST_BARS)
    .map(([name, part]): Bar => ({ name: name.replaceAll("_", " "), value: part, text: percent(part), tone: "good", ...(title.startsWith("Share") ? { phase: name } : {}) }));
  return bars.length === 0 ? null : { form: "bars", title, bars, note: "" };
}

function share({ evidence, phase }: Finding): Picture | null {
  const part = phase === null ? null : evidence[`${phase}_share`];
  if (typeof part !== "number" || phase === null) return null;
  const [low, high] = [evidence["lowest_share"], evidence["highest_share"]];
  const note = typeof low === "number" && typeof high === "number" && low !== high ? `from ${percent(low)} to ${percent(high)} across ranks` : "";
  const bars: Bar[] = [
    { name: phase, value: part, text: percent(part), tone: "culprit", phase },
    { name: "everything else", value: 1 - part, text: percent(1 - part), tone: "plain" },
  ];
  return { form: "bars", title: "Share of the median rank’s time", bars, note, most: 1 };
}

function strip({ evidence, kind, steps }: Finding): Picture | null {
  const at = (evidence["at_steps"] ?? (kind === "stall" ? evidence["steps_longer"] : null)) as unknown;
  const numbers = Array.isArray(at) ? at.filter((one): one is number => typeof one === "number") : [];
  if (numbers.length === 0 || steps === null) return null;
  const [first, last] = [Math.min(steps[0], ...numbers), Math.max(steps[1], ...numbers)];
  return last > first ? { form: "strip", title: "Slow steps", steps: numbers, first, last } : null;
}

function slope({ evidence, steps }: Finding): Picture | null {
  const [first, last, rate] = [evidence["first_bytes"], evidence["last_bytes"], evidence["bytes_per_step"]];
  if (typeof first !== "number" || typeof last !== "number" || typeof rate !== "number" || steps === null || steps[1] <= steps[0]) return null;
  const ends = evidence["runs_out_at_step"];
  const place = (name: string, otherwise: number): number => (typeof evidence[name] === "number" ? evidence[name] : otherwise);
  const [from, to] = [place("first_step", steps[0]), place("last_step", steps[1])];
  const known = typeof ends === "number" && ends > to;
  const points: [number, number][] = [
    [from, first],
    [to, last],
  ];
  return {
    form: "slope",
    title: `From ${binary(first)} to ${binary(last)}: ${binary(rate)} more per step`,
    points: known ? [...points, [ends, last + (ends - to) * rate]] : points,
    end: known ? { step: ends, text: `runs out at step ${ends.toLocaleString("en-GB")}` } : null,
  };
}

function signed(ms: number): string {
  return `${ms < 0 ? "−" : "+"}${duration(Math.abs(ms) * 1e6)}`;
}

function numbersOf(value: unknown): [string, number][] {
  if (!isRecord(value)) return [];
  return Object.entries(value).filter((entry): entry is [string, number] => typeof entry[1] === "number" && Number.isFinite(entry[1]));
}
