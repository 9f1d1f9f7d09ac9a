/** Readable names for the keys of documents, and values with the unit given by the key's suffix: `_ms`, `_bytes`, `_share` … */

import { binary, dateTime, digits, duration, percent } from "../ui/format";

/** Names for keys that are not clear by themselves. */
const NAMES: Readonly<Record<string, string>> = {
  action: "what was done",
  after_ms: "afterwards",
  at: "place",
  at_steps: "in steps",
  before_ms: "before",
  between: "between steps",
  clock: "clock",
  compared: "what was compared",
  cycle: "cycle",
  excess_ms: "longer by",
  excess_ms_by_phase: "longer by, per phase",
  excess_share: "longer by, share of the step",
  explains: "also explains",
  extra_ms_by_phase: "extra per phase",
  extra_ms: "extra",
  first_bytes: "at the start",
  first_ms: "at the start",
  first_step: "from step",
  gain_ms: "gain per step if fixed",
  last_bytes: "at the end",
  last_ms: "at the end",
  last_step: "to step",
  last_in_steps: "arrived last in steps",
  large: "a fifth of the training time or more",
  least_gain_ms: "gain per step if fixed, at least",
  lockstep: "ranks wait for each other",
  median_ms_by_rank: "median by rank",
  ms_per_1000_steps: "growth per 1,000 steps",
  of_ranks: "of ranks",
  opportunity: "largest opportunity",
  opportunities: "possible gain, at most",
  others_rtt_us: "round trip of others",
  over: "how it ended",
  p: "probability by chance (p)",
  peers_median_ms: "median of the others",
  place: "place in the code",
  runs_out_at_step: "runs out at step",
  runs_out_in_s: "runs out in",
  rtt_us: "round trip",
  steps_used: "steps analyzed",
  stood_s: "hung for",
  stopped_wall_ns: "last activity",
  threshold_s: "examined after",
  told_by: "evidence",
  usual_ms: "usually",
  util_percent: "utilization",
  victims: "waiting ranks",
  wait_measured: "waiting was measured",
  wall_ns: "when",
  wander_ms: "normal variation",
  which: "which memory",
  z: "standard errors (z)",
};

const WORDS: Readonly<Record<string, string>> = { cpu: "CPU", gpu: "GPU", gpus: "GPUs", ddp: "DDP", rss: "resident memory", rtt: "round trip", sm: "SM", pid: "process", tcp: "TCP", ib: "InfiniBand", tf32: "TF32", gc: "garbage collector", op: "operation", ops: "operations", net: "network", mem: "memory", rx: "received", tx: "sent", io: "I/O" };

type Unit = (value: number) => string;

const rounded = (value: number, unit: string): string => `${short(value)} ${unit}`;

/** By suffix of the key, longest first. */
const UNITS: readonly (readonly [string, Unit])[] = [
  ["_wall_ns", dateTime],
  ["_ms_per_step", (value) => `${duration(value * 1e6)} per step`],
  ["_ms_by_rank", (value) => duration(value * 1e6)],
  ["_ms_by_phase", (value) => duration(value * 1e6)],
  ["ms_per_step", (value) => `${duration(value * 1e6)} per step`],
  ["ms_per_1000_steps", (value) => duration(value * 1e6)],
  ["bytes_per_step", (value) => `${binary(value)} per step`],
  ["bytes_per_second", (value) => `${binary(value)}/s`],
  ["steps_per_second", (value) => rounded(value, "steps/s")],
  ["_percent", (value) => `${short(value)}%`],
  ["_bytes", binary],
  ["_share", percent],
  ["_bps", (value) => `${binary(value)}/s`],
  ["_mhz", (value) => rounded(value, "MHz")],
  ["_ps", (value) => `${short(value)}/s`],
  ["_ms", (value) => duration(value * 1e6)],
  ["_us", (value) => duration(value * 1e3)],
  ["_ns", duration],
  ["_mb", (value) => rounded(value, "MiB")],
  ["_s", (value) => duration(value * 1e9)],
  ["_w", (value) => rounded(value, "W")],
  ["_c", (value) => rounded(value, "°C")],
  ["pressure", percent],
  ["seconds", (value) => duration(value * 1e9)],
  ["wall_ns", dateTime],
  ["bytes", binary],
  ["share", percent],
  ["shares", percent],
  ["opportunities", percent],
];

export function nameOf(key: string): string {
  const known = Object.hasOwn(NAMES, key) ? NAMES[key] : undefined;
  if (known !== undefined) return known;
  const plain = key.replace(/_(wall_ns|ms|us|ns|bytes|share|percent|mhz|bps|ps|s|mb|w|c)$/, "").replace(/_(wall_ns|ms|bytes|share|ns|mb)_/, "_");
  const words = plain.split("_").filter(Boolean);
  return words.map((word) => (Object.hasOwn(WORDS, word) ? WORDS[word] : word)).join(" ") || key;
}

/** A number with its unit; the sign of negative numbers is kept. */
export function figureOf(key: string, value: number): string {
  if (!Number.isFinite(value)) return "–";
  // Names from the kernel or torch may end like a unit without having one.
  const unit = UNITS.find(([end]) => key.endsWith(end))?.[1];
  return unit === undefined ? short(value) : unit(value).replace(/^-/, "−");
}

/** A number without unit: integers in full, others with three digits. */
export function short(value: number): string {
  if (Number.isInteger(value)) return value.toLocaleString("en-GB").replace(/^-/, "−");
  const size = Math.abs(value);
  const text = size < 0.001 ? value.toExponential(1) : size < 1 ? value.toPrecision(2) : digits(value);
  return text.replace(/^-/, "−");
}
