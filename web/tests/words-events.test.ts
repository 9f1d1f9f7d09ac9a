import { expect, test } from "vitest";
import type { CollectiveGroup, NodeRow, RunEvent } from "../src/api/documents";
import { binary } from "../src/ui/format";
import { arrivalsOf, exchangeRows, measuredText, sorted, timesOf } from "../src/words/collectives";
import { commandText, endText, machineRows, meshText, peersText, whoText } from "../src/words/context";
import { attemptText, attemptsOf, errorText, errorsOf, followedText, toldFirst } from "../src/words/endings";
import { EVENTS, eventRows, eventText, severityOf, stepOfEvent } from "../src/words/events";
import { problemsOf } from "../src/words/nodes";

let number = 0;
const event = (name: string, more: Record<string, unknown> = {}): RunEvent => ({ number: (number += 1), node: "2", wall_ns: 1e18, event: name, ...more }) as RunEvent;

test("events are sentences", () => {
  const said: [string, Record<string, unknown>, string][] = [
    ["rank_start", { rank: 3, host: "b" }, "Rank 3 started on b."],
    ["rank_end", { rank: 3, state: "vanished", collective: { op: "all_reduce" } }, "Rank 3 vanished; its last call was all_reduce."],
    ["rank_end", { rank: 3, state: "vanished", oom_kill: true }, "Rank 3 was killed by the kernel (out of memory)."],
    ["agent_end", { host: "vm", end: { exit_code: -9, status: "crashed" } }, "Recording ended on vm: crashed, ended by SIGKILL."],
    ["hang", { title: "Rank 1 sleeps." }, "The job hangs. Rank 1 sleeps."],
    ["hang", { title: "Rank 1 sleeps.", steps: [41, 41] }, "The job hangs in step 41. Rank 1 sleeps."],
    ["hang_over", { seconds: 61 }, "The job continues after a hang of 1 min 1 s."],
    ["node_lost", { host: "b", silent_s: 12.5 }, "Node 2 (b) has been silent for 12.5 s."],
    ["node_absent", { nodes: [1, 2, 3, 7] }, "Not connected yet: nodes 1–3 and 7."],
    ["clock_skew", { host: "b", offset_ns: -2e9 }, "The clock of node 2 (b) is 2.00 s behind; times are corrected."],
    ["warning", { message: "the disk is full" }, "The disk is full."],
    ["note", { rank: 0, step: 7, values: { loss: 0.25 } }, "Rank 0 noted in step 7: loss 0.25"],
    ["something_new", { rank: 1, why: "so" }, "Something new: rank 1, why so"],
    ["constructor", {}, "Constructor."],
  ];
  for (const [name, more, words] of said) expect([name, eventText(event(name, more))]).toEqual([name, words]);
});

test("any event is a sentence, even if fields are missing or odd", () => {
  const odd = { rank: "x", end: 3, nodes: "no", counts: [], values: [1, { a: null }], git: 7, message: null, host: {}, seconds: "long", ignored: { foreign: 2 }, title: 5, state: "<b>" };
  for (const name of Object.keys(EVENTS)) {
    for (const more of [{}, odd]) {
      const text = eventText(event(name, more));
      expect(text).not.toMatch(/undefined|\[object|NaN/);
      expect(text.length).toBeGreaterThan(3);
      expect(["critical", "warning", "info"]).toContain(severityOf(event(name, more)));
    }
  }
});

test("ranks that start together share a row, newest first", () => {
  const rows = eventRows([event("agent_start"), ...[2, 0, 1].map((rank) => event("rank_start", { rank })), event("rank_end", { rank: 0, state: "exited" }), event("rank_end", { rank: 1, state: "vanished" })]);
  expect(rows.map((row) => [row.text, row.severity, row.ranks])).toEqual([
    ["Rank 1 vanished.", "critical", [1]],
    ["Rank 0 exited normally.", "info", [0]],
    ["Ranks 0–2 started.", "info", [0, 1, 2]],
    ["Recording started.", "info", []],
  ]);
  expect(eventRows([])).toEqual([]);
});

test("several vanished or killed ranks share a sentence", () => {
  const gone = (more: Record<string, unknown>): string | undefined => eventRows([1, 0].map((rank) => event("rank_end", { rank, state: "vanished", ...more })))[0]?.text;
  expect(gone({})).toBe("Ranks 0 and 1 vanished.");
  expect(gone({ oom_kill: true })).toBe("Ranks 0 and 1 were killed by the kernel (out of memory).");
});

test("only the status calls a run failed or crashed", () => {
  expect(eventText(event("agent_end", { host: "vm", end: { exit_code: 1, status: "failed" } }))).toBe("Recording ended on vm: exit code 1.");
  expect(endText({ exit_code: 1, status: "failed", wall_ns: 0 }, "crashed")).toMatch(/^crashed, exit code 1, /);
  expect(endText({ exit_code: 0, status: "finished", wall_ns: 0 }, null)).toMatch(/^finished, 1 /);
});

test("errors: original and consequences", () => {
  const errors = errorsOf([
    { rank: 1, pid: 5, type: "ValueError", message: "bad <b>", step: 7, victim: false, traceback: "…" },
    { rank: 0, type: "RuntimeError", message: "", victim: true },
    { rank: null, type: "ChildFailedError", message: "x", exit_codes: { "1": 1, "0": -15 } },
    "nonsense",
  ]);
  const { own, followed } = toldFirst(errors);
  expect(own.map(errorText)).toEqual(["Rank 1 raised ValueError in step 7: bad <b>"]);
  expect(followed.map(errorText)).toEqual(["Rank 0 raised RuntimeError", "The launcher raised ChildFailedError: x (rank 0 ended by SIGTERM, rank 1 exit code 1)"]);
  // One of two ranks is left: the launcher is not a rank, and a rank that reported twice counts once.
  expect(followedText([...followed, ...followed], own)).toBe("After that, rank 0 and the launcher ended: Rank 0 raised RuntimeError");
  expect(followedText(followed.slice(1), own)).toBe("The launcher raised ChildFailedError: x (rank 0 ended by SIGTERM, rank 1 exit code 1)");
  expect([errorsOf(null), attemptsOf(undefined)]).toEqual([[], []]);
});

test("rank_start has no step, nor do events before the first step ended", () => {
  const steps = { first: 0, step: (wallNs: number) => wallNs / 10 };
  const at = (event: string, wallNs: number) => stepOfEvent({ event, wall_ns: wallNs }, steps);
  expect([at("rank_start", 65), at("note", 65), at("note", 9), at("note", 10)]).toEqual([null, 6, null, 1]);
});

test("a user without a name is shown as a uid", () => {
  expect([whoText({ user: "0", host: "vm" }), whoText({ user: "ada", host: "vm" }), whoText({ user: null, host: "vm" })]).toEqual(["uid 0 on vm", "ada on vm", "vm"]);
});

test("a long message is cut between characters, not within one", () => {
  const said = errorText(errorsOf([{ rank: 0, type: "E", message: `${"a".repeat(239)}🔥 and more` }])[0]);
  expect(said).toBe(`Rank 0 raised E: ${"a".repeat(239)}…`);
});

test("attempts", () => {
  const [one, two] = attemptsOf([{ attempt: 0, world_size: 4, first_step: 0, last_step: 99, seconds: 60, end: "rank 1 raised ValueError" }, { attempt: 1, end: null }]);
  expect([one, two].map((attempt) => attempt && attemptText(attempt))).toEqual(["Attempt 0 of 4 ranks: steps 0–99 in 1 min; rank 1 raised ValueError", "Attempt 1: no known steps, still running"]);
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

test("how collectives were measured on a device", () => {
  const measured = { steps: 230, of: 230, missed: 0, last_unread: 0, exposed_ms: null };
  const how = "Measured on the device (NCCL's Flight Recorder) in";
  expect([measuredText(null), measuredText(undefined), measuredText(measured)]).toEqual(["", "", `${how} 230 of 230 steps.`]);
  expect(measuredText({ ...measured, steps: 212, missed: 18, exposed_ms: 4.2 })).toBe(`${how} 212 of 230 steps; 18 steps were overwritten before they could be read; computation waits 4.20 ms per step for it.`);
  expect(measuredText({ ...measured, steps: 228, missed: 1, last_unread: 1 })).toBe(`${how} 228 of 230 steps; 1 step was overwritten before it could be read; the last step was not read.`);
});

test("percentages need more than a few values", () => {
  expect([timesOf(1, 3), timesOf(19, 19), timesOf(5, 20), timesOf(900, 1200)]).toEqual(["1 of 3", "19 of 19", "25% of 20", "75% of 1,200"]);
});

test("less than a byte is not zero", () => {
  expect([binary(0), binary(0.36), binary(0.6), binary(4)]).toEqual(["0 B", "<1 B", "1 B", "4 B"]);
});

test("problems of a node", () => {
  const node: NodeRow = { node: "1", hosts: ["b"], ranks: 4, live_ranks: 4, rank_spans: [[4, 7]], number: 1, address: null, offset_ns: 0, rtt_ns: 1, heard_wall_ns: 100e9, bye: null, refused: 0, sample: { mem_total: 100, mem_available: 50 } };
  expect(problemsOf(node, 101e9, true)).toEqual([]);
  expect(problemsOf({ ...node, live_ranks: 3, refused: 2, offset_ns: -5e9, sample: { mem_total: 100, mem_available: 1, net_drops_ps: 2 } }, 160e9, true)).toEqual(["silent for 1 min", "1 rank ended", "2 frames refused", "clock is off; times are corrected", "memory is nearly full", "dropped packets"]);
  expect(problemsOf(node, 160e9, false)).toEqual(["did not report how it ended"]);
  expect(problemsOf({ ...node, bye: { status: "failed" } }, 160e9, false)).toEqual(["ended: failed"]);
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
