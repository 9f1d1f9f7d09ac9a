import { expect, test } from "vitest";
import type { Finding } from "../src/api/documents";
import { gpuLoad, timeAccountOf } from "../src/words/context";
import { evidenceRows, flat, shown } from "../src/words/evidence";
import { figureOf, nameOf } from "../src/words/names";
import { rangeText } from "../src/words/nodes";
import { picturesOf } from "../src/words/pictures";
import { priceOf } from "../src/words/price";
import { ranksText, spansText } from "../src/words/ranks";

const finding = (more: Partial<Finding>): Finding => ({
  kind: "compute_straggler",
  severity: "critical",
  title: "",
  ranks: [],
  phase: null,
  steps: [3, 99],
  cost: { share: 0.6089, seconds: 2.647, rank_hours: 0.0029, if_fixed: { step_ms: 17.422, speedup: 2.557 } },
  evidence: {},
  advice: [],
  confidence: 0.97,
  ...more,
});

test("the suffix of a key gives the unit", () => {
  const said: [string, number, string][] = [
    ["excess_ms", 30.051, "30.1 ms"],
    ["excess_ms", -0.113, "−113 µs"],
    ["input_ms_per_step", 2, "2.00 ms per step"],
    ["bytes_per_step", 1_500_000, "1.4 MiB per step"],
    ["loss_share", 0.034, "3.4%"],
    ["cpu_pressure", 0.5, "50%"],
    ["util_percent", 41.5, "41.5%"],
    ["rtt_us", 850, "850 µs"],
    ["net_rx_bps", 2e6, "1.9 MiB/s"],
    ["net_errors_ps", 3, "3/s"],
    ["stood_s", 13.407, "13.4 s"],
    ["steps_used", 97, "97"],
    ["last_step", 12_345, "12,345"],
    ["z", 4.2, "4.20"],
    ["p", 0.00001, "1.0e-5"],
  ];
  for (const [key, value, words] of said) expect([key, figureOf(key, value)]).toEqual([key, words]);
  expect(figureOf("excess_ms", Number.NaN)).toBe("–");
});

test("keys become words", () => {
  expect(["excess_ms", "peak_allocated_bytes", "own_cpu_percent", "toString", "x"].map(nameOf)).toEqual(["longer by", "peak allocated", "own CPU", "toString", "x"]);
});

test("evidence of the demo becomes nested rows", () => {
  const rows = evidenceRows({
    compared: "work",
    excess_ms: 30.051,
    median_ms_by_rank: { "0": 5.963, "2": 36.08 },
    excess_ms_by_phase: { forward: 30.401, between: -2 },
    wait_measured: true,
    hosts: ["vm"],
    place: null,
    victims: [0, 2, 3, 4],
  });
  expect(rows.map((row) => `${row.name}: ${flat(row.value)}`)).toEqual([
    "what was compared: work",
    "longer by: 30.1 ms",
    "median by rank: rank 0 5.96 ms, rank 2 36.1 ms",
    "longer by, per phase: forward 30.4 ms, between steps −2.00 ms",
    "waiting was measured: yes",
    "hosts: vm",
    "waiting ranks: 0 and 2–4",
  ]);
});

test("similar records become a table, places one line, and long lists are cut", () => {
  const groups = Array.from({ length: 30 }, (_, at) => ({ group: `g${at}`, transfer_ms: at, at: { file: "a.py", line: 3, function: "f" } }));
  expect(shown("groups", groups, 0)).toMatchObject({ form: "table", columns: ["group", "transfer", "place"], left: 6 });
  expect(flat(shown("at", { file: "a.py", line: 3, function: "f" }, 0))).toBe("a.py:3 in f");
  const long = shown("at_steps", Array.from({ length: 100 }, (_, at) => at), 0);
  expect(flat(long)).toMatch(/^0, 1, .*23 and 76 more$/);
});

test("any value is shown, without endless recursion or failure", () => {
  const deep: Record<string, unknown> = {};
  let at = deep;
  for (let level = 0; level < 5000; level += 1) at = at["inner"] = {} as Record<string, unknown>;
  at["end"] = 1;
  expect(flat(shown("x", deep, 0))).toContain("…");
  const odd = { a: [[], [1, [2, [3, [4, [5]]]]]], __proto__: 3, constructor: null, "": 0, u: undefined, h: "<img src=x onerror=alert(1)>" };
  const text = evidenceRows(odd).map((row) => `${row.name} ${flat(row.value)}`);
  expect(text.join()).toContain("<img src=x onerror=alert(1)>");
  expect(text.join()).not.toContain("[object");
});

test("a cost is worded as in the summary", () => {
  expect(priceOf(finding({}), false)).toEqual({ words: ["61% of the training time", "2.65 s", "without it a step takes 17.4 ms instead of 44.5 ms on average, 2.56× as fast"], left: 1 / 2.557 });
  const least = { share: 0.5, seconds: 2.1, rank_hours: 0, if_fixed: { step_ms: 22.25, speedup: 2 } };
  const range = { ...(finding({}).cost ?? { share: 0, seconds: 0, rank_hours: 0, if_fixed: null }), least };
  expect(priceOf(finding({ cost: range }), false)?.words).toEqual(["50% to 61% of the training time", "2.10 s to 2.65 s", "without it a step takes 17.4 ms to 22.3 ms instead of 44.5 ms on average, 2.00 to 2.56× as fast: the exchange may take longer when all ranks arrive together"]);
  expect(priceOf(finding({}), true)?.words[1]).toBe("2.65 s so far");
  expect(priceOf(finding({ cost: { share: 0.004, seconds: 1, rank_hours: 0, if_fixed: null } }), false)).toBeNull();
  expect(priceOf(finding({ cost: null }), false)).toBeNull();
  expect(priceOf(finding({ kind: "hang_input", cost: { share: 0, seconds: 13.4, rank_hours: 0, if_fixed: null } }), false)).toEqual({ words: ["13.4 s without progress"], left: null });
  expect(priceOf(finding({ kind: "hang_input", cost: { share: 0, seconds: 13.4, rank_hours: 0, if_fixed: null } }), true)).toBeNull(); // the card of the hang counts
});

test("the parts of the whole run have their names and times", () => {
  const account = { seconds: 20, training_time_s: 12, until_ranks_s: 4, parts: { start_up: 8, training: 12, end: 0 }, text: { start_up: ["start-up", "8.00 s (40%)"], training: ["training", "12.0 s (60%)"] } };
  expect(timeAccountOf(account)).toEqual({
    rows: [
      { key: "start_up", name: "start-up", value: 8, text: "8.00 s (40%)" },
      { key: "training", name: "training", value: 12, text: "12.0 s (60%)" },
    ],
    seconds: 20,
    note: "20.0 s in all. Shares in findings and charts are of the training time, 12.0 s: the steps after warm-up.",
  });
  for (const unknown of [undefined, null, {}, { parts: {}, text: {} }]) expect(timeAccountOf(unknown)).toBeNull();
});

test("charts show the culprit among its peers, and the phases", () => {
  const evidence = { compared: "work", median_ms_by_rank: { "0": 6, "1": 6, "2": 36 }, peers_median_ms: 6, excess_ms_by_phase: { forward: 30, input: 0.01, comm: -29 } };
  const [ranks, phases, ...rest] = picturesOf(finding({ ranks: [2], evidence }));
  expect(rest).toEqual([]);
  expect(ranks).toMatchObject({ form: "bars", mark: { value: 6 }, bars: [{ name: "rank 0", tone: "plain" }, { tone: "plain" }, { name: "rank 2", tone: "culprit", text: "36.0 ms" }] });
  expect(phases).toMatchObject({ bars: [{ name: "forward", text: "+30.0 ms" }, { name: "comm", text: "−29.0 ms" }] });
});

test("with many ranks, the culprits and the slowest are drawn", () => {
  const median_ms_by_rank = Object.fromEntries(Array.from({ length: 64 }, (_, rank) => [rank, rank === 50 ? 1 : rank]));
  const [picture] = picturesOf(finding({ ranks: [50], evidence: { median_ms_by_rank } }));
  expect(picture?.form === "bars" && picture.bars.map((bar) => bar.name)).toEqual(["rank 50", ...[55, 56, 57, 58, 59, 60, 61, 62, 63].map((rank) => `rank ${rank}`)]);
  expect(picture).toMatchObject({ note: "and 54 more ranks" });
});

test("memory is drawn up to its limit, slow steps at their positions", () => {
  const creep = finding({ kind: "memory_creep", steps: [0, 100], evidence: { first_bytes: 1e9, last_bytes: 2e9, bytes_per_step: 1e7, runs_out_at_step: 200 } });
  expect(picturesOf(creep)).toMatchObject([{ form: "slope", points: [[0, 1e9], [100, 2e9], [200, 3e9]], end: { step: 200 } }]);
  const placed = { ...creep, evidence: { ...creep.evidence, first_step: 10, last_step: 90 } };
  expect(picturesOf(placed)).toMatchObject([{ form: "slope", points: [[10, 1e9], [90, 2e9], [200, 2e9 + 110 * Number(creep.evidence["bytes_per_step"])]] }]);
  const jitter = finding({ kind: "jitter", steps: [20, 295], evidence: { at_steps: [20, 45, 295] } });
  expect(picturesOf(jitter)).toMatchObject([{ form: "strip", first: 20, last: 295 }]);
  expect(picturesOf(finding({ kind: "change_point", evidence: { before_ms: 39, after_ms: 80 } }))).toMatchObject([{ form: "bars", bars: [{ name: "afterwards", tone: "culprit" }, { name: "before" }] }]);
});

test("ranks in words", () => {
  expect([[1], [3, 2, 0], [0, 1, 2, 3, 10], []].map(spansText)).toEqual(["1", "0, 2 and 3", "0–3 and 10", "none"]);
  expect([ranksText([1]), ranksText([2, 1], true)]).toEqual(["rank 1", "Ranks 1 and 2"]);
  expect(spansText(Array.from({ length: 20 }, (_, at) => at * 2))).toBe("0, 2, 4, 6, 8, 10, 12, 14 and 12 more");
});

test("figures of alike nodes are a range, and GPU load is one glance", () => {
  const whole = (value: number): string => `${Math.round(value)}%`;
  expect([rangeText([38.2, 45, null, 40], whole), rangeText([38.1, 38.2], whole), rangeText([null, undefined], whole)]).toEqual(["38% – 45%", "38%", "–"]);
  const gpu = (median: number | null) => ({ util_percent: median === null ? null : { median } });
  expect(gpuLoad({ gpus: [gpu(97.4), gpu(61), gpu(null)] })?.words).toBe("2 GPUs 61–97% busy");
  expect(gpuLoad({ gpus: [gpu(100)] })?.words).toBe("GPU 100% busy");
  expect([gpuLoad({ gpus: [] }), gpuLoad(undefined)]).toEqual([null, null]);
});
