import { expect, test, vi } from "vitest";
import type { RunRow } from "../src/api/documents";
import type { Source } from "../src/api/source";
import { chosenRows, mostFrequentJob, NEWEST, readView, shownMetrics, statuses, tagsOf, toggled, usersOf, withNewest, writeView, type ListView } from "../src/run/list-rows";
import { RunFeed } from "../src/run/run-feed";

const row = (id: string, at: number, more: Partial<RunRow> = {}): RunRow => ({
  id,
  name: id,
  created_wall_ns: at,
  status: "finished",
  status_text: more.status ?? "finished",
  status_severity: "info",
  ranks: 1,
  steps: 1,
  median_step_ms: null,
  verdict: "",
  ...more,
});
const ROWS = [
  row("run-10", 1, { median_step_ms: 5, verdict: "Rank 3 is slow" }),
  row("run-9", 2, { status: "failed", median_step_ms: 50 }),
  row("other", 3, { ranks: null, status: "failed" }),
];
const VIEW: ListView = NEWEST;
const ids = (view: Partial<ListView>): string[] => chosenRows(ROWS, { ...VIEW, ...view }).map((one) => one.id);

test("newest first, natural order of names, rows without a value always last", () => {
  expect(ids({})).toEqual(["other", "run-9", "run-10"]);
  expect(ids({ column: "name", down: false })).toEqual(["other", "run-9", "run-10"]);
  expect(ids({ column: "median_step_ms", down: true })).toEqual(["run-9", "run-10", "other"]);
  expect(ids({ column: "median_step_ms", down: false })).toEqual(["run-10", "run-9", "other"]);
  expect(ids({ column: "ranks", down: true })).toEqual(["run-9", "run-10", "other"]);
});

test("every search word must match", () => {
  expect(ids({ search: "RANK slow" })).toEqual(["run-10"]);
  expect(ids({ search: "run failed" })).toEqual(["run-9"]);
  expect(ids({ search: ".*" })).toEqual([]);
  expect(ids({ status: "failed" })).toEqual(["other", "run-9"]);
  expect(statuses(ROWS)).toEqual([["failed", 2], ["finished", 1]]);
  expect(statuses([row("killed", 4, { status: "crashed", status_text: "killed (SIGKILL)" })])).toEqual([["killed (SIGKILL)", 1]]);
});

test("runs by tag, and found by anything that the list shows", () => {
  const rows = [row("a", 1, { tags: ["x", "b10"], note: "two workers" }), row("b", 2, { tags: ["b9"], command: ["train.py", "--lr", "3"] }), row("c", 3)];
  const found = (view: Partial<ListView>): string[] => chosenRows(rows, { ...NEWEST, ...view }).map((one) => one.id);
  expect(found({ tag: "x" })).toEqual(["a"]);
  expect(found({ tag: "none" })).toEqual([]);
  expect(found({ search: "WORKERS" })).toEqual(["a"]);
  expect(found({ search: "train --lr" })).toEqual(["b"]);
  expect(found({ search: "b9" })).toEqual(["b"]);
  expect(tagsOf(rows)).toEqual([["b9", 1], ["b10", 1], ["x", 1]]);
});

test("the view survives the round trip through the address, and invalid parts are ignored", () => {
  expect(writeView(NEWEST)).toBe("");
  const views: Partial<ListView>[] = [{ search: "a & b=c #?" }, { status: "killed (SIGKILL)", tag: "x/y" }, { column: "cost_share" }, { column: "name", down: false }, { column: "name", down: true }, { down: false }, { user: "anna" }, { runs: ["a,b", "c&d"], about: "slow rank" }];
  for (const view of views) expect(readView(writeView({ ...NEWEST, ...view }))).toEqual({ ...NEWEST, ...view });
  expect(readView("sort=constructor&order=x&y=z")).toEqual(NEWEST);
  expect(readView(`q=${"x".repeat(500)}`).search.length).toBe(200);
});

test("a loss and a throughput are shown before other numbers", () => {
  const metrics = { lr: 0.1, tokens_per_s: 9, train_loss: 2 };
  expect(shownMetrics(row("a", 1, { metrics }))).toEqual([["train_loss", 2], ["tokens_per_s", 9]]);
  expect(shownMetrics(row("a", 1))).toEqual([]);
});

test("the history is that of the command with most runs", () => {
  const done = (id: string, at: number, command: string, more: Partial<RunRow> = {}): RunRow => row(id, at, { command: [command], median_step_ms: 5, ...more });
  const rows = [done("x", 9, "once"), done("a", 1, "often"), done("b", 3, "often"), done("c", 2, "often", { ranks: 2 }), done("d", 8, "often", { status: "running" })];
  expect(mostFrequentJob(rows).map((one) => one.id)).toEqual(["b", "a"]);
  expect(mostFrequentJob([])).toEqual([]);
});

test("the newest rows replace known ones, unless rows disappeared", () => {
  const fresh = row("run-9", 2, { steps: 9 });
  expect(withNewest(ROWS, [row("new", 4), fresh], 4)?.map((one) => [one.id, one.steps])).toEqual([["new", 1], ["run-9", 9], ["run-10", 1], ["other", 1]]);
  expect([withNewest(ROWS, [fresh], 1), withNewest(ROWS, [fresh], 5)]).toEqual([null, null]);
});

test("a run removed while the list is open disappears from it, however old", async () => {
  vi.stubGlobal("document", { hidden: true, addEventListener: () => undefined, removeEventListener: () => undefined });
  let there = Array.from({ length: 2500 }, (_none, at) => row(`run-${at}`, 2500 - at));
  const asked: number[] = [];
  const get = (_path: string, params: Record<string, number>): Promise<unknown> => {
    const first = params["first"] ?? 0;
    asked.push(first);
    return Promise.resolve({ runs: there.slice(first, first + (params["limit"] ?? 0)), total: there.length });
  };
  const feed = new RunFeed({ get } as unknown as Source);
  const told = async (): Promise<number[]> => {
    asked.length = 0;
    await feed.ask();
    expect(feed.rows.value?.map((one) => one.id)).toEqual(there.map((one) => one.id));
    return [...asked];
  };
  expect(await told()).toEqual([0, 1000, 2000]);
  expect(await told()).toEqual([0]);
  there = [row("new", 9999), ...there];
  expect(await told()).toEqual([0]);
  there = there.filter((one) => one.id !== "run-1700");
  expect(await told()).toEqual([0, 1000, 2000]);
  there = there.filter((one) => one.id !== "run-7").slice(0, 900);
  expect(await told()).toEqual([0]);
  feed.close();
  vi.unstubAllGlobals();
});

test("up to eight runs are selected; the first stays the baseline", () => {
  expect(toggled(toggled(toggled([], "a"), "b"), "c")).toEqual(["a", "b", "c"]);
  expect(toggled([..."abcdefgh"], "i")).toEqual([..."abcdefgi"]);
  expect(toggled(["a", "b"], "a")).toEqual(["b"]);
});

test("runs of one user, and of a list of runs", () => {
  const rows = [row("a", 1, { user: "ben" }), row("b", 2, { user: "anna" }), row("c", 3, { user: "carl" }), row("d", 4)];
  const found = (view: Partial<ListView>): string[] => chosenRows(rows, { ...NEWEST, ...view }).map((one) => one.id);
  expect(found({ user: "anna" })).toEqual(["b"]);
  expect(found({ runs: ["c", "a", "gone"] })).toEqual(["c", "a"]);
  expect(found({ search: "CARL" })).toEqual(["c"]);
  expect(usersOf(rows, "carl")).toEqual([["carl", 1], ["anna", 1], ["ben", 1]]);
});
