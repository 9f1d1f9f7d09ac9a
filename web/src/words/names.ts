/** Keys of documents as people read them, and their figures with the unit that the key's end says: `_ms`, `_bytes`, `_share` … */

import { binary, dateTime, digits, duration, percent } from "../ui/format";

/** Where the key alone would not be understood. */
const NAMES: Readonly<Record<string, string>> = {
  action: "what was done",
  after_ms: "afterwards",
  at: "place",
  at_steps: "in steps",
  before_ms: "before",
  between: "between steps",
  clock: "clock",
  compared: "what was compared",
  cycle: "circle",
  excess_ms: "longer by",
  excess_ms_by_phase: "longer by, in each phase",
  excess_share: "longer by, of the step",
  explains: "also explains",
  extra_ms_by_phase: "extra in each phase",
  extra_ms: "extra",
  first_bytes: "at the beginning",
  first_ms: "at the beginning",
  first_step: "from step",
  last_bytes: "at the end",
  last_ms: "at the end",
  last_step: "to step",
  last_in_steps: "came last in steps",
  large: "a fifth of the time or more",
  lockstep: "ranks wait for each other",
  median_ms_by_rank: "median by rank",
  ms_per_1000_steps: "growth in 1,000 steps",
  of_ranks: "of ranks",
  opportunity: "largest opportunity",
  opportunities: "what is left to gain, at most",
  others_rtt_us: "round trip of the others",
  over: "how it ended",
  p: "chance of an accident (p)",
  peers_median_ms: "median of the peers",
  place: "place in the code",
  runs_out_at_step: "runs out at step",
  runs_out_in_s: "runs out after another",
  rtt_us: "round trip",
  steps_used: "steps looked at",
  stood_s: "stood still for",
  stopped_wall_ns: "last heard of",
  threshold_s: "looked into after",
  told_by: "told by",
  usual_ms: "usually",
  util_percent: "utilisation",
  victims: "waiting ranks",
  wait_measured: "waiting was measured",
  wall_ns: "when",
  wander_ms: "natural wander",
  which: "which memory",
  z: "standard errors (z)",
};

const WORDS: Readonly<Record<string, string>> = { cpu: "CPU", gpu: "GPU", gpus: "GPUs", ddp: "DDP", rss: "resident memory", rtt: "round trip", sm: "SM", pid: "process", tcp: "TCP", ib: "InfiniBand", tf32: "TF32", gc: "garbage collector", op: "operation", ops: "operations", net: "network", mem: "memory", rx: "received", tx: "sent", io: "I/O" };

type Unit = (value: number) => string;

const rounded = (value: number, unit: string): string => `${short(value)} ${unit}`;

/** By how the key ends, the longest end first. */
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

/** A figure with its unit; a negative one keeps its sign. */
export function figureOf(key: string, value: number): string {
  if (!Number.isFinite(value)) return "–";
  // The kernel's and torch's own names may end like a unit and are none.
  const unit = UNITS.find(([end]) => key.endsWith(end))?.[1];
  return unit === undefined ? short(value) : unit(value).replace(/^-/, "−");
}

/** A bare number: whole ones whole, others in three digits. */
export function short(value: number): string {
  if (Number.isInteger(value)) return value.toLocaleString("en-GB").replace(/^-/, "−");
  const size = Math.abs(value);
  const text = size < 0.001 ? value.toExponential(1) : size < 1 ? value.toPrecision(2) : digits(value);
  return text.replace(/^-/, "−");
}
