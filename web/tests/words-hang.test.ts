import { expect, test } from "vitest";
import type { Hang, RankThere, StackGroup } from "../src/api/hang-documents";
import { MARKS, groupsInTrouble, meaningOf, partedText, sideText, waitText } from "../src/words/flight";
import { callText, circleOf, culpritsOf, groupName, sinceText, whereabouts, workerText } from "../src/words/hang";
import { KINDS, PAST, kindOf } from "../src/words/kinds";
import { alike, isUsers, piecesOf, placeOf, placeText, shortFile } from "../src/words/stacks";

const TORCH = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py";
const frame = (file: string, line: number, name: string) => ({ file, line, function: name });
const main = (...frames: ReturnType<typeof frame>[]) => [{ main: true, name: "", frames }];
const call = { group: "0", description: "default_pg", sequence: 25, op: "all_reduce", sizes: "[512]", dtypes: "Float", peer: null };
const there = (rank: number, more: Partial<RankThere> = {}): RankThere => ({ rank, pid: rank, alive: true, step: 7, phase: "comm", since_s: 10, process_state: "S", cpu_share: 0, gil_held: false, waiting_in: call, at: frame("/job/train.py", 73, "share"), workers: [], host: "", ...more });
const hang = (more: Partial<Hang>): Hang => ({ number: 1, host: "a", kind: "hang_missing_collective", title: "", declared_wall_ns: 112e9, stopped_wall_ns: 100e9, threshold_s: 10, step_s: 0.08, culprits: [], victims: [], undecidable: false, collective: null, cycle: [], evidence: [], ranks: [], stacks: [], flight: {}, over: null, over_wall_ns: null, action: "", hosts: [], parts: [], steps: null, file: "", ...more });

test("user code is distinguished from libraries", () => {
  const own = ["/job/train.py", "train.py", "/users/me/torch/train.py", "/scratch/stepscope/testing/scripts/hang_job.py"];
  const others = [TORCH, "<frozen runpy>", "/usr/lib/python3.11/threading.py", "/src/torch/nn/modules/module.py", "/x/stepscope/recorder/collectives.py", "/x/stepscope/recorder/hooks/ddp.py", ""];
  expect(own.map(isUsers)).toEqual(own.map(() => true));
  expect(others.map(isUsers)).toEqual(others.map(() => false));
  expect([shortFile(TORCH), shortFile("/job/src/train.py"), placeText(frame("/job/train.py", 41, "<module>"))]).toEqual(["torch/distributed/distributed_c10d.py", "src/train.py", "job/train.py:41"]);
});

test("library frames between user code form one piece, and our hooks are dropped", () => {
  const pieces = piecesOf([frame("/x/stepscope/recorder/collectives.py", 222, "wait"), frame("/x/stepscope/recorder/hooks/collectives.py", 9, "wait"), frame(TORCH, 1, "a"), frame(TORCH, 2, "b"), frame("/job/train.py", 3, "c"), frame("<string>", 4, "d")]);
  expect(pieces.map((piece) => [piece.users, piece.frames.map((one) => one.function)])).toEqual([
    [false, ["a", "b"]],
    [true, ["c"]],
    [false, ["d"]],
  ]);
});

test("the same main thread is shown once, culprits before the others", () => {
  const [waits, sleeps] = [main(frame(TORCH, 1, "all_reduce"), frame("/job/train.py", 73, "share")), main(frame("/job/train.py", 41, "next"))];
  const helper = { main: false, name: "pin", frames: [frame("/x.py", 1, "f")] };
  const groups: StackGroup[] = [
    { ranks: [0, 3], threads: waits, workers_of: false },
    { ranks: [1], threads: sleeps, workers_of: false },
    { ranks: [2], threads: [...waits, helper], workers_of: false },
    { ranks: [1], threads: sleeps, workers_of: true },
  ];
  const shown = alike(groups, [1]);
  expect(shown.map((group) => [group.ranks, group.threads.length, group.workers_of])).toEqual([
    [[1], 1, true],
    [[1], 1, false],
    [[0, 2, 3], 2, false],
  ]);
  expect(placeOf(waits)).toEqual(frame("/job/train.py", 73, "share"));
  expect(placeOf([])).toBeNull();
});

test("where each rank is: grouped, culprits first", () => {
  const one = hang({ culprits: [{ rank: 1, reason: "sleeps", at: null }], ranks: [there(0), there(1, { waiting_in: null, at: frame("/job/train.py", 41, "next"), cpu_share: 0.5 }), there(2, { cpu_share: 0.1, since_s: 12 }), there(3, { alive: false, waiting_in: null })] });
  expect(whereabouts(one, true).map((row) => [row.ranks, row.doing, row.state, row.cpu, row.silentS, row.culprit])).toEqual([
    [[1], "not in a collective", "sleeps", [0.5, 0.5], 10, true],
    [[3], "", "is gone", [0, 0], 10, false],
    [[0, 2], "all_reduce number 25 of default_pg, [512] Float", "sleeps", [0, 0.1], 12, false],
  ]);
  expect(whereabouts(one, false).map((row) => row.state)).toEqual(["slept", "was gone", "slept"]);
  expect(whereabouts(hang({ ranks: [there(0, { gil_held: true, process_state: "R" })] }), false).map((row) => row.state)).toEqual(["ran, held the GIL"]);
});

test("since when, and how it ended", () => {
  const steps: [number, number] = [7, 7];
  expect(sinceText(hang({ steps }), 160e9)).toBe("No progress for 1 min in step 7; a step usually takes 80.0 ms.");
  expect(sinceText(hang({ steps, over: "recovered", over_wall_ns: 130e9, step_s: null }), null)).toBe("It hung for 30.0 s in step 7, then continued.");
  expect(sinceText(hang({ steps }), null)).toBe("No progress for 12.0 s in step 7 when this was written; how it ended is unknown; a step usually takes 80.0 ms.");
  expect(sinceText(hang({ steps: [60, 61] }), 160e9)).toBe("No progress for 1 min in steps 60–61; a step usually takes 80.0 ms.");
  // A viewer's slow clock does not make the hang shorter than when it was declared.
  expect(sinceText(hang({}), 0)).toBe("No progress for 12.0 s; a step usually takes 80.0 ms.");
});

test("culprits with the same reason are grouped", () => {
  const at = frame("/job/train.py", 98, "two");
  const told = culpritsOf(hang({ culprits: [{ rank: 0, reason: "a", at }, { rank: 1, reason: "b", at }, { rank: 3, reason: "a", at }] }));
  expect(told.map((one) => [one.ranks, one.reason])).toEqual([
    [[0, 3], "a"],
    [[1], "b"],
  ]);
});

test("a cycle is drawn only if the sentences close it", () => {
  const cycle = ["rank 0 waits for rank 2 in dp (all_reduce 7)", "rank 2 waits for rank 0 in tp (all_reduce 7)"];
  expect(circleOf(cycle)).toEqual([
    { rank: 0, how: "dp (all_reduce 7)" },
    { rank: 2, how: "tp (all_reduce 7)" },
  ]);
  expect(circleOf(cycle.map((line) => line.replace("waits", "waited")))).toEqual(circleOf(cycle));
  expect([circleOf(["rank 0 waits for rank 2", "rank 1 waits for rank 0"]), circleOf(["something else", "and more"]), circleOf([])]).toEqual([null, null, null]);
});

test("calls and sides in words", () => {
  expect(["default_pg", "undefined", ""].map((description) => groupName({ group: "1", description }))).toEqual(["default_pg", "group 1", "group 1"]);
  expect(callText({ ...call, sequence: null, description: "", sizes: "", dtypes: "", op: "recv", peer: 3 })).toBe("recv of group 0 with rank 3");
  const side = { ranks: [1], op: null, sizes: "", dtypes: "", at: null, frames: [] };
  expect([sideText(side), sideText({ ...side, op: "barrier" })]).toEqual(["did not call it", "barrier"]);
  const parted = { group: "0", description: "dp", sequence: 7, differs: "missing", ranks: [2], call_sites: [] };
  expect([partedText(parted), partedText({ ...parted, differs: "size" })]).toEqual(["Rank 2 did not call number 7 of dp.", "The ranks diverged at number 7 of dp: another size."]);
});

test("groups with unfinished calls come first, with differing ranks", () => {
  const at = (enqueued: number, completed: number) => ({ enqueued, started: completed, completed });
  const rows = groupsInTrouble([
    { name: "0", description: "default_pg", members: [0, 1], ranks: { "0": at(24, 24), "1": at(24, 24) } },
    { name: "1", description: "tp", members: [0, 1], ranks: { "0": at(6, 6), "1": at(7, 6) } },
  ]);
  expect(rows.map((row) => [row.name, row.trouble, row.called, row.ended])).toEqual([
    ["tp", true, "6 (rank 0), 7 (rank 1)", "6"],
    ["default_pg", false, "24", "24"],
  ]);
});

test("past hangs use the past tense", () => {
  const wait = { waiters: [0, 2], waited: [1], group: "1", description: "undefined", sequence: 41, op: "all_reduce" };
  expect([waitText(wait, true), waitText({ ...wait, waiters: [0] }, true), waitText(wait, false)]).toEqual([
    "Ranks 0 and 2 wait for rank 1 in all_reduce number 41 of group 1.",
    "Rank 0 waits for rank 1 in all_reduce number 41 of group 1.",
    "Ranks 0 and 2 waited for rank 1 in all_reduce number 41 of group 1.",
  ]);
  const worker = { pid: 4711, kind: "dataloader", state: "T" };
  expect([workerText(worker, true), workerText(worker, false)]).toEqual(["DataLoader worker 4711 is stopped", "DataLoader worker 4711 was stopped"]);
  const present = /\b(hangs?|waits?|is|are|has|does|holds|can)\b/;
  expect(Object.values(MARKS).map((mark) => meaningOf(mark, false)).filter((words) => present.test(words))).toEqual([]);
  // Every kind of hang has a past form, and none of them uses the present tense.
  expect(Object.keys(PAST).sort()).toEqual(Object.keys(KINDS).filter((kind) => kind.startsWith("hang_") || kind === "rank_lost").sort());
  expect(Object.values(PAST).map(({ name, meaning }) => `${name}. ${meaning}`).filter((words) => present.test(words))).toEqual([]);
  expect([kindOf("hang_deadlock").name, kindOf("hang_deadlock", true).name, kindOf("jitter", true)]).toEqual(["Ranks wait for each other", "Ranks waited for each other", KINDS["jitter"]]);
});
