import { expect, test, vi } from "vitest";
import type { CollectiveGroup } from "../src/api/documents";
import { binary } from "../src/ui/format";
import { arrivalsOf, exchangeRows, sorted, timesOf } from "../src/words/collectives";
import { commandText, gpuLoad, machineRows, meshText, peersText, timeAccountOf, whoText } from "../src/words/context";
import { ranksText, spansText } from "../src/words/ranks";
import { eventRows, stepOfEvent } from "../src/run/event-rows";
import { eventOf } from "./documents-made";

vi.mock("../src/ui/theme", () => ({ theme: { value: "light" }, token: (name: string) => name }));
const { nothingText } = await import("../src/panels/verdict");
const { rangeText } = await import("../src/panels/nodes");
const { statusLook } = await import("../src/ui/status-chip");

test("ranks that start or end together share a row, newest first", () => {
  const start = (number: number, rank: number) => eventOf(number, "rank_start", { rank, text: `Rank ${rank} started.`, text_of_ranks: "started." });
  const rows = eventRows([
    eventOf(1, "agent_start", { text: "Recording started." }),
    start(2, 2),
    start(3, 0),
    start(4, 1),
    eventOf(5, "rank_end", { rank: 0, text: "Rank 0 exited normally.", text_of_ranks: "exited normally." }),
    eventOf(6, "rank_end", { rank: 1, severity: "critical", text: "Rank 1 vanished.", text_of_ranks: "vanished." }),
  ]);
  expect(rows.map((row) => [row.text, row.severity, row.ranks])).toEqual([
    ["Rank 1 vanished.", "critical", [1]],
    ["Rank 0 exited normally.", "info", [0]],
    ["Ranks 0–2 started.", "info", [0, 1, 2]],
    ["Recording started.", "info", []],
  ]);
  expect(eventRows([])).toEqual([]);
});

test("rank_start has no step, nor do events before the first step ended", () => {
  const steps = { first: 0, step: (wallNs: number) => wallNs / 10 };
  const at = (event: string, wallNs: number) => stepOfEvent({ event, wall_ns: wallNs }, steps);
  expect([at("rank_start", 65), at("note", 65), at("note", 9), at("note", 10)]).toEqual([null, 6, null, 1]);
});

test("the hub's words for how a run ended are shown as sent, without a tick beside a crash", () => {
  const look = (status_text: string, status_severity: "info" | "warning" | "critical") => statusLook({ status_text, status_severity })[1];
  expect([look("finished", "info"), look("killed (SIGKILL)", "critical"), look("hung", "critical"), look("running", "info"), look("interrupted", "warning")]).toEqual(["✓", "✖", "✖", "●", "■"]);
});

test("without findings the hub's sentence is shown, unless the hub is silent or left too early", () => {
  const found = { live: true, verdict: null, findings: [], nothing: ["Collecting: 3 of 10 steps.", "More."] as [string, string] };
  expect(nothingText(found, { live: true, lost: false, steps: 4 })).toEqual(found.nothing);
  expect(nothingText(found, { live: true, lost: true, steps: 4 })[0]).toBe("The state of the run is unknown.");
  expect(nothingText(found, { live: false, lost: false, steps: 4 })[0]).toBe("The run has ended; the final verdict did not reach this page.");
});

test("a user without a name is shown as a uid", () => {
  expect([whoText({ user: "0", host: "vm" }), whoText({ user: "ada", host: "vm" }), whoText({ user: null, host: "vm" })]).toEqual(["uid 0 on vm", "ada on vm", "vm"]);
});

test("collectives are sorted, unknown values last", () => {
  const op = (name: string, exposed: number | null) => ({ op: name, count: 1, bytes: 8, exposed_ms: exposed, overlapped_ms: 0 });
  const group: CollectiveGroup = { name: "0", kind: "world", description: "", backend: "gloo", size: 2, ranks: [0, 1], timed: true, ops: [op("b", 1), op("a", null), op("c", 3)], arrivals: null };
  const rows = exchangeRows([group]);
  expect(sorted(rows, "exposedMs", false).map((row) => row.op)).toEqual(["c", "b", "a"]);
  expect(sorted(rows, "exposedMs", true).map((row) => row.op)).toEqual(["b", "c", "a"]);
  expect(sorted(rows, "op", false).map((row) => row.op)).toEqual(["a", "b", "c"]);
  expect(rows[0]?.group).toBe("group 0");
  expect(arrivalsOf({ steps: 4, collectives: 8, ranks: [{ rank: 1, last: 2, late_ms: 1 }, { rank: 0, last: 6, late_ms: 2 }, {}] })?.ranks.map((one) => one.rank)).toEqual([0, 1]);
  expect(arrivalsOf("no")).toBeNull();
});

test("percentages need more than a few values", () => {
  expect([timesOf(1, 3), timesOf(19, 19), timesOf(5, 20), timesOf(900, 1200)]).toEqual(["1 of 3", "19 of 19", "25% of 20", "75% of 1,200"]);
});

test("less than a byte is not zero", () => {
  expect([binary(0), binary(0.36), binary(0.6), binary(4)]).toEqual(["0 B", "<1 B", "1 B", "4 B"]);
});

test("the context in words", () => {
  expect(commandText(["python", "train.py", "--name", "it's <b>", ""])).toBe("python train.py --name 'it'\\''s <b>' ''");
  expect(commandText(null)).toBe("");
  expect([meshText({ names: ["dp", "tp"], shape: [4, 2] }), meshText(null), peersText([[0, 4, 2]]), peersText([[0, 1e9, 1]]), peersText("x")]).toEqual(["dp 4 × tp 2", "", "4 ranks: 0, 2, 4 and 6", "1,000,000,000 ranks", ""]);
  const gpu = (index: number) => ({ node: "a", index, name: "H100", mem_total: 80e9 });
  expect(machineRows({ nodes: [{ node: "a", cpu_count: 64, mem_total: 5e11 }], gpus: [gpu(0), gpu(1)] }).map((row) => row.value)).toEqual([
    { form: "text", text: "a: 64 processors, 466 GiB" },
    { form: "text", text: "2 × H100, 75 GiB" },
  ]);
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
