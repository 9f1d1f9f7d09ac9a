import { expect, test, vi } from "vitest";
import type { RunRow } from "../src/api/documents";
import type { Source } from "../src/api/source";
import { chosenRows, statuses, toggled, withNewest, type ListView } from "../src/run/list-rows";
import { RunFeed } from "../src/run/run-feed";

const row = (id: string, at: number, more: Partial<RunRow> = {}): RunRow => ({
  id,
  name: id,
  created_wall_ns: at,
  status: "finished",
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
const VIEW: ListView = { search: "", status: "", column: "created_wall_ns", down: true };
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

test("a third selected run replaces the first", () => {
  expect(toggled(toggled(toggled([], "a"), "b"), "c")).toEqual(["b", "c"]);
  expect(toggled(["a", "b"], "a")).toEqual(["b"]);
});
